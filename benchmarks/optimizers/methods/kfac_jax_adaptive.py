"""kfac-jax that adapts damping, rate and momentum, from the dampings of ours.

Its README's example has an initial damping of 1, and 5 steps are its default period.
"""

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._peer import in_peer
from benchmarks.optimizers.methods.kfac_adaptive import SETTINGS

KFAC_JAX_ADAPTIVE = Method(
    name="kfac_jax_adaptive",
    title="kfac-jax, adaptive",
    settings=SETTINGS,
    run=in_peer("_kfac_jax"),
    documented=({"initial_damping": 1.0, "period": 5},),
)
