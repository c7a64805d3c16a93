"""A linear layer with named LS-LoRA adapters."""

import math

import torch
from torch import nn

from torch_ref.lslora._config import Config
from torch_ref.lslora._fourier import FourierParams
from torch_ref.lslora._nf4 import base_output, form_of


class LSLoRALinear(nn.Module):
    r"""A frozen linear layer and, for every active adapter, its branch.

    Placement ``"output"``: $y = W x + \varphi(s B A x)$; ``"bottleneck"``:
    $y = W x + s B \varphi(A x)$; ``"none"``: $y = W x + s B A x$.

    Adapters are made on the device and in the dtype of the base weight (of one in four bits,
    the dtype that it decodes to), coefficients and $\sigma$ in float32, and stay there:
    ``forward`` moves nothing.

    Parameters are named as PEFT names them: ``lora_A.{adapter}.weight`` (r, in),
    ``lora_B.{adapter}.weight`` (out, r), ``fourier_params.{adapter}.weight`` (4,) and ``.sigma``.

    Args:
        base: Its parameters are frozen. A ``Linear4bit`` of bitsandbytes stays packed.
        name: In the model, for settings of single layers.
    """

    def __init__(self, base: nn.Linear, name: str = ""):
        super().__init__()
        self.name = name
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.lora_dropout = nn.ModuleDict()
        self.fourier_params = nn.ModuleDict()
        self.configs: dict[str, Config] = {}
        self.active: tuple[str, ...] = ()
        self.train(base.training)

    def add_adapter(self, name: str, config: Config) -> None:
        """Make an adapter; with B = 0 and the first coefficients it changes nothing yet."""
        device = self.base_layer.weight.device
        (out_features, in_features), dtype = form_of(self.base_layer, self.name)
        place, rank = {"device": device, "dtype": dtype}, config.rank_of(self.name)
        self.lora_A[name] = nn.Linear(in_features, rank, bias=False, **place)
        self.lora_B[name] = nn.Linear(rank, out_features, bias=False, **place)
        nn.init.kaiming_uniform_(self.lora_A[name].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[name].weight)
        self.lora_dropout[name] = nn.Dropout(config.dropout)
        if config.fourier_placement != "none":
            self.fourier_params[name] = FourierParams(config.init_sigma, device=device)
        self.lora_dropout[name].train(self.training)
        self.configs[name] = config

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter and its parameters."""
        for part in (self.lora_A, self.lora_B, self.lora_dropout, self.fourier_params):
            if name in part:
                del part[name]
        del self.configs[name]
        self.active = tuple(other for other in self.active if other != name)

    def set_active(self, names: tuple[str, ...]) -> None:
        """Which branches are added, and trained; names of other layers' adapters are passed over.

        With ``()`` the layer is the base layer.
        """
        self.active = tuple(name for name in names if name in self.configs)
        for name in self.configs:
            for part in (self.lora_A, self.lora_B, self.fourier_params):
                if name in part:
                    part[name].requires_grad_(name in self.active)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = base_output(self.base_layer, x)
        result = y
        for name in self.active:
            result = result + self._branch(name, x)
        return result.to(y.dtype)

    def _branch(self, name: str, x: torch.Tensor) -> torch.Tensor:
        a, b, config = self.lora_A[name], self.lora_B[name], self.configs[name]
        scaling = config.scaling_of(self.name)
        inside = a(self.lora_dropout[name](x))
        if config.fourier_placement == "none":
            return scaling * b(inside)
        phi = self.fourier_params[name]
        if config.fourier_placement == "output":
            return phi(scaling * b(inside))
        return scaling * b(phi(inside).to(inside.dtype))
