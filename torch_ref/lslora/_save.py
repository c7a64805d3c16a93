"""Adapters on disk, in the layout of PEFT."""

import json
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from torch import nn

from torch_ref.lslora._attach import adapted_layers, adapter_names, attach, delete_adapter
from torch_ref.lslora._config import Config

PREFIX = "base_model.model."


def save(
    folder: Path | str,
    model: nn.Module,
    *,
    name: str = "default",
    dialect: Literal["lslora", "peft"] = "lslora",
) -> None:
    """Write one adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Keys carry no adapter name, so it can be loaded under another one. ``"default"`` is at the
    root of the folder, other adapters in ``folder/name``.

    Args:
        folder: Made if it is missing.
        model: With the adapter attached.
        name: The adapter to write, and no other.
        dialect: ``peft_type`` of the file: ``"lslora"`` is ``LSLORA``, which only LS-LoRA
            readers know; ``"peft"`` is ``LORA``, for stock PEFT with :mod:`.peft_plugin`.
            Without the plug-in PEFT refuses it; plain LoRA itself has this dialect, and needs no
            plug-in.

    Raises:
        ValueError: the model has no such adapter, or plain LoRA in the dialect ``"lslora"``.
    """
    layers = {n: layer for n, layer in adapted_layers(model).items() if name in layer.configs}
    if not layers:
        raise ValueError(f"no adapter {name!r}; there are {sorted(adapter_names(model))}")
    config = next(iter(layers.values())).configs[name]
    folder = adapter_folder(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    record = config.to_peft("LSLORA" if dialect == "lslora" else "LORA")
    (folder / "adapter_config.json").write_text(json.dumps(record, indent=2, sort_keys=True))
    tensors = {
        key: tensor.detach().cpu().contiguous() for key, tensor in _tensors(model, name).items()
    }
    safetensors.torch.save_file(tensors, str(folder / "adapter_model.safetensors"))


def load(folder: Path | str, model: nn.Module, *, name: str = "default") -> Config:
    """Read an adapter, attach it, and make it the active one.

    Args:
        folder: That :func:`save` was given.
        model: Without an adapter of this name.
        name: The adapter's name, in the folder and in the model.

    Returns:
        The settings that were saved with it.

    Raises:
        ValueError: keys or shapes of the file and of the model differ, each named; the adapter
            is then not in the model.
    """
    folder = adapter_folder(folder, name)
    config = Config.from_peft(json.loads((folder / "adapter_config.json").read_text()))
    stored = safetensors.torch.load_file(str(folder / "adapter_model.safetensors"))
    attach(model, config, name=name)
    own = _tensors(model, name)
    if problem := _differences(own, stored):
        delete_adapter(model, name)
        raise ValueError(f"{folder} does not fit the model: {problem}")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(stored[key])
    return config


def adapter_folder(folder: Path | str, name: str) -> Path:
    """Where PEFT puts an adapter: ``"default"`` at the root, others one level down."""
    return Path(folder) if name == "default" else Path(folder) / name


def _tensors(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    found = {}
    for layer_name, layer in adapted_layers(model).items():
        if name in layer.configs:
            where = f"{PREFIX}{layer_name}"
            found[f"{where}.lora_A.weight"] = layer.lora_A[name].weight
            found[f"{where}.lora_B.weight"] = layer.lora_B[name].weight
            if name in layer.fourier_params:
                found[f"{where}.fourier_params.weight"] = layer.fourier_params[name].weight
                found[f"{where}.fourier_params.sigma"] = layer.fourier_params[name].sigma
    return found


def _differences(own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> str:
    if own.keys() != stored.keys():
        missing, extra = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
        return f"it lacks {missing} and has {extra} which the model does not know"
    return "; ".join(
        f"{key} has shape {tuple(stored[key].shape)} there and {tuple(tensor.shape)} here"
        for key, tensor in own.items()
        if tensor.shape != stored[key].shape
    )
