"""The optimizers; a new one is a file here and a line below."""

from benchmarks.optimizers._method import Method
from benchmarks.optimizers.methods.adamw import ADAMW
from benchmarks.optimizers.methods.kfac import KFAC
from benchmarks.optimizers.methods.kfac_adaptive import KFAC_ADAPTIVE
from benchmarks.optimizers.methods.kfac_fixed import KFAC_FIXED
from benchmarks.optimizers.methods.kfac_jax_adaptive import KFAC_JAX_ADAPTIVE
from benchmarks.optimizers.methods.kfac_jax_fixed import KFAC_JAX_FIXED
from benchmarks.optimizers.methods.kfac_rate import KFAC_RATE
from benchmarks.optimizers.methods.kfe_adam import KFE_ADAM
from benchmarks.optimizers.methods.lbfgs import LBFGS
from benchmarks.optimizers.methods.muon import MUON
from benchmarks.optimizers.methods.schedule_free import SCHEDULE_FREE
from benchmarks.optimizers.methods.soap import SOAP

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        ADAMW,
        SCHEDULE_FREE,
        MUON,
        SOAP,
        LBFGS,
        KFAC,
        KFAC_RATE,
        KFE_ADAM,
        KFAC_FIXED,
        KFAC_ADAPTIVE,
        KFAC_JAX_FIXED,
        KFAC_JAX_ADAPTIVE,
    )
}
