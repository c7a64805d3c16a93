"""Load a model once: in the target dtype, on the target device, without a second copy."""

import itertools
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from torch import nn


def load_once(
    build: Callable[[], nn.Module],
    file: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build a model without memory and fill it, tensor by tensor, from a safetensors file.

    Args:
        build: Makes the model; called on the ``meta`` device, where tensors have no bytes.
        file: Every name of the model's state dict must be in it and the other way round; of
            tied names one is enough.
        dtype: What floating tensors become; a tensor stored so is not converted.
        device: Where tensors are read to, directly.

    Returns:
        The model, as built: in training mode, say.

    Raises:
        ValueError: names that the file lacks or has too many, shapes that differ, or buffers
            that no file holds, each named.

    Memory:
        The model, and one stored tensor where it must be converted. The file is mapped: pages
        that were read count as resident until the system takes them back.
    """
    with torch.device("meta"):
        model = build()
    wanted = _names_of_each_tensor(model)
    with safetensors.safe_open(str(file), framework="pt", device=str(device)) as stored:
        stored_names = set(stored.keys())
        _check_names(wanted, stored_names, model.state_dict().keys(), file)
        for tensor, names in wanted:
            name = next(n for n in names if n in stored_names)
            value = stored.get_tensor(name)
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(value.shape)} in {file} and "
                    f"{tuple(tensor.shape)} in the model"
                )
            if value.is_floating_point() and value.dtype != dtype:
                value = value.to(dtype)  # the stored copy is dropped by the rebinding
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            for alias in names:
                _assign(model, alias, value)
    return model


def _names_of_each_tensor(model: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(names.values())


def _check_names(wanted, stored: set[str], state_names, file: Path | str) -> None:
    unsaved = [n for _, names in wanted for n in names if n not in state_names]
    if unsaved:
        raise ValueError(
            f"buffers {unsaved} are not part of a state dict, so no file holds them and they "
            "would be left without memory; register them as persistent"
        )
    missing = [names[0] for _, names in wanted if not stored.intersection(names)]
    extra = sorted(stored - {name for _, names in wanted for name in names})
    if missing or extra:
        raise ValueError(
            f"{file} does not fit the model: it lacks {missing} and has {extra} which the model "
            "does not know; build the model that was saved"
        )


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = value
