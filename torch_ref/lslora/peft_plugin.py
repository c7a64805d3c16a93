"""Stock PEFT loads and saves LS-LoRA adapters with this file, which only it imports.

``PeftModel.from_pretrained(base, folder, config=read_config(folder))`` reads what
:func:`torch_ref.lslora.save` wrote with ``dialect="peft"``; ``save_pretrained`` writes the same.
Without this file PEFT refuses such a folder, since its ``init_lora_weights`` is unknown there.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora.layer import LoraVariant
from torch import nn

from torch_ref.lslora._config import NEEDS_PLUG_IN
from torch_ref.lslora._fourier import FourierParams


@dataclasses.dataclass
class FourierLoraConfig(LoraConfig):
    """PEFT's settings and LS-LoRA's; all of them are saved."""

    fourier_placement: str = "output"
    init_sigma: float = 1.0
    fourier_reg_weight: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module({nn.Linear: FourierLinear})

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"init_lora_weights": NEEDS_PLUG_IN}


class FourierLinear(lora.Linear):
    """PEFT's adapted linear layer with coefficients beside A and B."""

    adapter_layer_names = (*lora.Linear.adapter_layer_names, "fourier_params")

    def resolve_lora_variant(self, *, config: FourierLoraConfig, **kwargs: Any) -> LoraVariant:
        return _FourierVariant(config.fourier_placement)


class _FourierVariant(LoraVariant):
    def __init__(self, placement: str):
        self.placement = placement

    def supports_lora_conversion(self) -> bool:
        return False

    def init(self, module: FourierLinear, adapter_name: str, config: Any, **kwargs: Any) -> None:
        if not hasattr(module, "fourier_params"):
            module.fourier_params = nn.ModuleDict()
        device = module.lora_A[adapter_name].weight.device
        module.fourier_params[adapter_name] = FourierParams(config.init_sigma, device=device)

    def forward(self, module, active_adapter, x, result, **kwargs) -> torch.Tensor:
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        phi, scaling = module.fourier_params[active_adapter], module.scaling[active_adapter]
        inside = a(module.lora_dropout[active_adapter](x))
        if self.placement == "output":
            return result + phi(scaling * b(inside))
        return result + scaling * b(phi(inside).to(inside.dtype))

    def merge_safe(self, module, active_adapter, orig_weight) -> torch.Tensor:
        raise ValueError("the Fourier branch is not linear: no weight W computes W x + phi(x)")

    merge_unsafe = merge_safe


def read_config(folder: Path | str) -> FourierLoraConfig:
    """The settings in a folder, with the keys that stock PEFT would drop."""
    record = json.loads((Path(folder) / "adapter_config.json").read_text())
    known = {field.name for field in dataclasses.fields(FourierLoraConfig) if field.init}
    keep = known & record.keys() - {"peft_type", "runtime_config", "init_lora_weights"}
    return FourierLoraConfig(**{key: record[key] for key in keep})
