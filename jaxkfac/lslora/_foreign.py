"""Stacks of layers in a file that does not say what is scanned."""

from collections.abc import Mapping

import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora._folder import PREFIX, adapted_modules, tensor_keys
from jaxkfac.lslora._names import layer_name
from jaxkfac.lslora._stacks import Stack

_PRODUCTS = tensor_keys(None)


def stacks_in(tensors: Mapping[str, np.ndarray], scanned: str) -> dict[str, Stack]:
    """Every layer that a file adapts.

    Args:
        tensors: By key.
        scanned: The component behind which a number is a slice.

    Raises:
        CheckpointMismatchError: slices that are missing, or ``b`` of a module, by name.
    """
    found: dict[str, dict[int | None, str]] = {}
    for module in adapted_modules(tensors):
        layer, index = layer_name(module, scanned)
        found.setdefault(layer, {})[index] = module
    stacks = {}
    for layer, slices in found.items():
        indices = sorted(slices, key=lambda i: -1 if i is None else i)
        if indices not in ([None], list(range(len(indices)))):
            raise CheckpointMismatchError(
                f"layer {layer!r} has adapters of the slices {indices} only, and the file does not "
                "say how many there are: pass model=, or like= of a model"
            )
        modules = [slices[i] for i in indices]
        lead = () if indices == [None] else (len(indices),)
        a, b = (_tensor(tensors, modules[0], part) for part in ("a", "b"))
        stacks[layer] = Stack(lead, a.shape[-1], b.shape[0], modules)
    return stacks


def _tensor(tensors: Mapping[str, np.ndarray], module: str, part: str) -> np.ndarray:
    key = f"{PREFIX}{module}.{_PRODUCTS[part]}"
    if key not in tensors:
        raise CheckpointMismatchError(f"the file lacks {key!r}")
    return tensors[key]
