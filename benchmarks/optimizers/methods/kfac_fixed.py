"""``jk.kfac`` with a learning rate and a damping that are given."""

from typing import Any

from benchmarks.optimizers._kfac import steps
from benchmarks.optimizers._method import Method, Setting, Steps, here
from benchmarks.optimizers._problem import Arrays, Problem

SETTINGS = tuple(
    {"learning_rate": rate, "damping": damping, "norm_constraint": constraint, "period": 20}
    for rate, damping, constraint in (
        (0.03, 1e-2, 1e-3), (0.03, 1e-1, 1e-2), (0.1, 1e-1, 1e-2), (0.1, 1.0, 1e-1),
        (0.3, 1e-2, 1e-1),
    )
)  # fmt: skip


def _build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
    options: dict[str, Any] = {k: v for k, v in setting.items() if k != "period"}
    return steps(problem, data, setting, **options)


KFAC_FIXED = Method("kfac_fixed", "jk.kfac, fixed", SETTINGS, here(_build))
