"""``jk.kfac`` with Levenberg-Marquardt damping; the quadratic model chooses rate and momentum."""

import jaxkfac as jk
from benchmarks.optimizers._kfac import steps
from benchmarks.optimizers._method import Method, Setting, Steps, here
from benchmarks.optimizers._problem import Arrays, Problem

SETTINGS = tuple(
    {"initial_damping": damping, "period": period} for period in (5, 20) for damping in (0.1, 1.0)
)


def _build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
    rule = jk.LevenbergMarquardt(initial=setting["initial_damping"])
    return steps(
        problem, data, setting, learning_rate="quadratic", momentum="quadratic", damping=rule
    )


KFAC_ADAPTIVE = Method("kfac_adaptive", "jk.kfac, adaptive", SETTINGS, here(_build))
