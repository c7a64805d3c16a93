"""LS-LoRA: low-rank adapters with a learnable Fourier nonlinearity.

The plug-in for stock PEFT is :mod:`torch_ref.lslora.peft_plugin`, imported by name: PEFT is an
extra.
"""

from torch_ref.lslora._attach import (
    adapted_layers,
    adapter_names,
    attach,
    delete_adapter,
    set_active,
)
from torch_ref.lslora._config import Config
from torch_ref.lslora._fourier import FourierParams
from torch_ref.lslora._fourier_loss import Diagnosis, diagnose, fourier_loss
from torch_ref.lslora._layer import LSLoRALinear
from torch_ref.lslora._nf4 import quantize
from torch_ref.lslora._save import load, save

__all__ = [
    "Config",
    "Diagnosis",
    "FourierParams",
    "LSLoRALinear",
    "adapted_layers",
    "adapter_names",
    "attach",
    "delete_adapter",
    "diagnose",
    "fourier_loss",
    "load",
    "quantize",
    "save",
    "set_active",
]
