"""How Sphinx builds the site: `make docs`."""

from importlib.metadata import version as installed

project = "jax_oneflow_ops"
author = "jax_oneflow_ops"
version = release = installed("jax-oneflow-ops")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_heading_anchors = 3  # headings are targets of links, as they are on GitHub

# The docstrings' sections beside those that Napoleon knows. Types are said in their text; the
# annotations' unions would make signatures that nobody can read.
napoleon_custom_sections = [
    "Numerics",
    "Differentiation",
    "Differentiation and sharding",
    "Sharding",
    "Compilation",
    "Source",
]
autodoc_typehints = "none"

# Names in single backticks are links where this site has them, and code where it does not: those of
# arguments, and of jax, whose pages would have to be fetched from the network.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", r".*"), ("py:exc", r"jax\..*"), ("py:class", r"jax\..*")]

html_theme = "furo"
html_title = "jax_oneflow_ops"
html_show_copyright = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
