"""kfac-jax that adapts damping, rate and momentum, from the dampings of ours."""

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._peer import in_peer
from benchmarks.optimizers.methods.kfac_adaptive import SETTINGS

KFAC_JAX_ADAPTIVE = Method(
    "kfac_jax_adaptive", "kfac-jax, adaptive", SETTINGS, in_peer("_kfac_jax")
)
