"""``jk.kfac`` with a learning rate and nothing else: the documented one, and a third and thrice it.

The rate is a schedule that stays, so that the three rates share one program.
"""

import jaxkfac as jk
from benchmarks.optimizers._kfac import documented
from benchmarks.optimizers._method import Method, constant, here

RATE = 0.1  # docs/loops.md

KFAC_RATE = Method(
    name="kfac_rate",
    title="jk.kfac(rate, like=like)",
    settings=(),
    run=here(
        documented(
            lambda like, setting: jk.kfac(lambda _: setting["learning_rate"], like=like), every=5
        ),
        traced=("learning_rate",),
    ),
    documented=constant({"learning_rate": factor * RATE} for factor in (1, 0.3, 3)),
)
