"""LS-LoRA: low-rank adapters with a learnable Fourier nonlinearity, for any JAX function."""

from jaxkfac.lslora._attach import Adapted, attach
from jaxkfac.lslora._bank import Bank, stack
from jaxkfac.lslora._config import Adapter, Adapters, Config, EmbeddingAdapter, RmsSigma
from jaxkfac.lslora._diagnose import Diagnosis, diagnose, fourier_loss, regulariser
from jaxkfac.lslora._files import load, save
from jaxkfac.lslora._folder import SavedModules, read_modules
from jaxkfac.lslora._init import calibrate, init
from jaxkfac.lslora._merge import ApproximateMerge, approximate_merge, as_fourier, merge
from jaxkfac.lslora._modules import fuse, module_name, split
from jaxkfac.lslora._nonlinearity import Nonlinearity, find_nonlinearity, fourier, register
from jaxkfac.lslora._pretrained import PretrainedModel

__all__ = [
    "Adapted",
    "Adapter",
    "Adapters",
    "ApproximateMerge",
    "Bank",
    "Config",
    "Diagnosis",
    "EmbeddingAdapter",
    "Nonlinearity",
    "PretrainedModel",
    "RmsSigma",
    "SavedModules",
    "approximate_merge",
    "as_fourier",
    "attach",
    "calibrate",
    "diagnose",
    "find_nonlinearity",
    "fourier",
    "fourier_loss",
    "fuse",
    "init",
    "load",
    "merge",
    "module_name",
    "read_modules",
    "register",
    "regulariser",
    "save",
    "split",
    "stack",
]
