"""``jk.kfac`` without a number: it adapts rate, momentum and damping."""

import jaxkfac as jk
from benchmarks.optimizers._kfac import documented
from benchmarks.optimizers._method import Method, here

KFAC = Method(
    name="kfac",
    title="jk.kfac(like=like)",
    settings=(),
    run=here(documented(lambda like, setting: jk.kfac(like=like), every=5, adaptive=True)),
    documented=({},),
    timed=True,
)
