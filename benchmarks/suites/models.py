"""Training steps of whole programs, those of `examples`.

The choices are those of `examples.programs.tracing`. XLA fuses nothing with a custom call, so an op
that is fast by itself can make a program slower: "only OP" says which one does.
"""

import importlib
from functools import partial

from examples import programs

from ..harness import Case, Entrants
from ..timing import reason
from . import common

MODELS = ("unet", "vit", "graph", "language")


def case(model: str, size: str) -> Case:
    """A training step; ``size`` is "full", "small" or "tiny"."""
    name, work = f"{model}-{size}-bf16", partial(enter, model, size)
    return Case("models", name, model, "step", size, "bfloat16", 0, lambda: work)


def cases(platform: str) -> list[Case]:
    """Every program once: "full" on a GPU, "small" on a CPU, "tiny" in a hurry."""
    size = {"gpu": "full", "cpu": "small"}.get(platform, "tiny")
    return [case(model, size) for model in MODELS]


def enter(model: str, size: str) -> Entrants:
    """Compiles the steps one after another, compares losses, and makes the contenders.

    XLA for GPUs times kernels while it compiles. It also reads the environment, which tracing
    changes, and reading it in one thread while another one writes it may crash.
    """
    module = importlib.import_module(f"examples.{model}")
    problem = module.problem(size)
    only = [] if size == "tiny" else [f"only {op}" for op in module.OPS]
    names = ["ours", "xla", *([] if size == "tiny" else ["jnp"]), *only]
    state = programs.start(problem)
    steps, failed = {}, {}
    for name in names:
        try:
            with programs.tracing(name, module.OPS):
                lowered = programs.lower(problem)
            steps[name] = lowered.compile()
        except Exception as error:  # rivals fail in many ways; the row says how
            if name in ("ours", "xla"):
                raise
            failed[name] = reason(error)
    about = programs.check_steps(problem, state, steps)
    contenders = [common.contender(n, step, state, problem.batches) for n, step in steps.items()]
    return Entrants(contenders, about, ["jnp", "xla"], failed, wall=True)
