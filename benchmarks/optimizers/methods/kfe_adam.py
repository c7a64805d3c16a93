"""``jk.kfe_adam`` with a learning rate and nothing else: the documented one, a third and thrice it.

The rate is a schedule that stays, so that the three rates share one program.
"""

import jaxkfac as jk
from benchmarks.optimizers._kfac import documented
from benchmarks.optimizers._method import Method, constant, here

RATE = 1e-2  # its docstring

KFE_ADAM = Method(
    name="kfe_adam",
    title="jk.kfe_adam(rate, like=like)",
    settings=(),
    run=here(
        documented(
            lambda like, setting: jk.kfe_adam(lambda _: setting["learning_rate"], like=like),
            every=10,
            fisher="empirical",  # lower than sampled labels on six of ten problems (seed 0)
        ),
        traced=("learning_rate",),
    ),
    documented=constant({"learning_rate": factor * RATE} for factor in (1, 0.3, 3)),
    timed=True,
)
