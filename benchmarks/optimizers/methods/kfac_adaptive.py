"""``jk.kfac`` with Levenberg-Marquardt damping; the quadratic model chooses rate and momentum."""

import jaxkfac as jk
from benchmarks.optimizers._kfac import steps
from benchmarks.optimizers._method import Method, Setting, Steps, here
from benchmarks.optimizers._problem import Arrays, Problem

SETTINGS = tuple(
    {"initial_damping": damping, "period": period}
    for damping, period in ((0.1, 5), (1.0, 5), (0.1, 20), (1.0, 20), (0.01, 20))
)


def _build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
    rule = jk.LevenbergMarquardt(initial=setting["initial_damping"])
    return steps(
        problem, data, setting, learning_rate="quadratic", momentum="quadratic", damping=rule
    )


KFAC_ADAPTIVE = Method("kfac_adaptive", "jk.kfac, adaptive", SETTINGS, here(_build))
