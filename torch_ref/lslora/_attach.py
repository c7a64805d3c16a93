"""Put adapters into a model, and choose among them."""

import re

from torch import nn

from torch_ref.lslora._config import Config
from torch_ref.lslora._layer import LSLoRALinear
from torch_ref.lslora._nf4 import form_of


def attach(model: nn.Module, config: Config, *, name: str = "default") -> list[str]:
    """Add an adapter to every linear layer that the target matches, and make it the active one.

    Args:
        model: Changed in place: matching layers are wrapped in :class:`LSLoRALinear`, all other
            parameters of the model frozen. Layers may be in four bits: :func:`quantize`, or
            ``Linear4bit`` of bitsandbytes on its device.
        config: The adapter's settings.
        name: The adapter's name: an identifier, neither taken nor ``"lora"``, which would be
            found inside PEFT's own keys.

    Returns:
        The names of the adapted layers.

    Raises:
        ValueError: the name cannot be used, the target matches no linear layer, or a weight
            cannot be read (in eight bits, for example).
    """
    if not name.isidentifier() or name in ("lora", "base_layer"):
        raise ValueError(f"adapter name {name!r}: expected an identifier, and not 'lora'")
    if name in adapter_names(model):
        raise ValueError(f"an adapter {name!r} is attached already; delete it first")
    linear = _linear_layers(model)
    found = [n for n in linear if re.fullmatch(config.target, n)]
    if not found:
        raise ValueError(f"target {config.target!r} matches none of the linear layers {linear}")
    for layer_name in found:
        layer = model.get_submodule(layer_name)
        form_of(getattr(layer, "base_layer", layer), layer_name)
    if not adapted_layers(model):
        model.requires_grad_(False)
    for layer_name in found:
        layer = model.get_submodule(layer_name)
        if not isinstance(layer, LSLoRALinear):
            layer = LSLoRALinear(layer, layer_name)
            parent, _, leaf = layer_name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)
        layer.add_adapter(name, config)
    set_active(model, name)
    return found


def set_active(model: nn.Module, *names: str) -> None:
    """Use and train these adapters, and no other; none at all gives the base model.

    Raises:
        ValueError: a name that no layer has.
    """
    unknown = set(names) - adapter_names(model)
    if unknown:
        raise ValueError(f"no adapters {sorted(unknown)}; there are {sorted(adapter_names(model))}")
    for layer in adapted_layers(model).values():
        layer.set_active(names)


def delete_adapter(model: nn.Module, name: str) -> None:
    """Remove an adapter from every layer that has it."""
    if name not in adapter_names(model):
        raise ValueError(f"no adapter {name!r}; there are {sorted(adapter_names(model))}")
    for layer in adapted_layers(model).values():
        if name in layer.configs:
            layer.delete_adapter(name)


def adapted_layers(model: nn.Module) -> dict[str, LSLoRALinear]:
    """Layers with adapters, active or not, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LSLoRALinear)}


def adapter_names(model: nn.Module) -> set[str]:
    """Every adapter's name."""
    return {name for layer in adapted_layers(model).values() for name in layer.configs}


def _linear_layers(model: nn.Module) -> list[str]:
    adapted = adapted_layers(model)
    inside = tuple(f"{name}." for name in adapted)
    return [
        name
        for name, module in model.named_modules()
        if name in adapted
        or (isinstance(module, nn.Linear) and name and not name.startswith(inside))
    ]
