"""kfac-jax with the settings of our fixed ones."""

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._peer import in_peer
from benchmarks.optimizers.methods.kfac_fixed import SETTINGS

KFAC_JAX_FIXED = Method("kfac_jax_fixed", "kfac-jax, fixed", SETTINGS, in_peer("_kfac_jax"))
