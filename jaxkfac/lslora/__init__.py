"""LS-LoRA: low-rank adapters with a learnable Fourier nonlinearity, for any JAX function."""

from jaxkfac.lslora._adapter import Adapter, Adapters
from jaxkfac.lslora._attach import Adapted, attach
from jaxkfac.lslora._bank import Bank
from jaxkfac.lslora._config import Config, RmsSigma
from jaxkfac.lslora._diagnose import Diagnosis, diagnose
from jaxkfac.lslora._folder import SavedModules, read_modules
from jaxkfac.lslora._fourier import fourier
from jaxkfac.lslora._fused import fuse, split
from jaxkfac.lslora._init import init
from jaxkfac.lslora._load import load
from jaxkfac.lslora._merge import ApproximateMerge, approximate_merge, merge
from jaxkfac.lslora._names import module_name
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._pretrained import PretrainedModel
from jaxkfac.lslora._registry import find_nonlinearity, register
from jaxkfac.lslora._regulariser import fourier_loss, regulariser
from jaxkfac.lslora._save import save
from jaxkfac.lslora._sigma import calibrate
from jaxkfac.lslora._stack import stack
from jaxkfac.lslora._warm_start import as_fourier

__all__ = [
    "Adapted",
    "Adapter",
    "Adapters",
    "ApproximateMerge",
    "Bank",
    "Config",
    "Diagnosis",
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
