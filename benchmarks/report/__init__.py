"""``python -m benchmarks report``: README's tables and the pages of results, from results alone.

``benchmarks/results/DEVICE/SUITE.json`` is all that is read. README has tables between
``<!-- benchmarks:NAME begin -->`` and ``<!-- benchmarks:NAME end -->``; ``docs/benchmarks`` has a
page a suite, and ``docs/articles.md`` sets the articles' figures beside ours. ``--check`` writes
nothing and fails where a document is not what the results say.
"""

from .markdown import rate_unit
from .pages import main
from .training import communication, training

__all__ = ["communication", "main", "rate_unit", "training"]
