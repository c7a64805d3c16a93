"""Stacks of layers in a file that does not say what is scanned."""

from collections.abc import Mapping

import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora._folder import PREFIX, tensor_keys
from jaxkfac.lslora._names import layer_name

_PRODUCTS = tensor_keys(None)

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def stacks_in(
    tensors: Mapping[str, np.ndarray], scanned: str
) -> tuple[Shapes, dict[str, list[str]]]:
    """Shapes of ``a`` and ``b`` of every layer, and its modules in the order of the slices.

    Args:
        tensors: By key.
        scanned: The component behind which a number is a slice.

    Raises:
        CheckpointMismatchError: slices that are missing, or ``b`` of a module, by name.
    """
    suffix = "." + _PRODUCTS["a"]
    found: dict[str, dict[int | None, str]] = {}
    for key in tensors:
        if key.endswith(suffix):
            module = key.removeprefix(PREFIX).removesuffix(suffix)
            layer, index = layer_name(module, scanned)
            found.setdefault(layer, {})[index] = module
    shapes, modules = {}, {}
    for layer, slices in found.items():
        indices = sorted(slices, key=lambda i: -1 if i is None else i)
        if indices not in ([None], list(range(len(indices)))):
            raise CheckpointMismatchError(
                f"layer {layer!r} has adapters of the slices {indices} only, and a stack is "
                "adapted whole: pass like= of a model that keeps its layers apart"
            )
        modules[layer] = [slices[i] for i in indices]
        stack = () if indices == [None] else (len(indices),)
        a, b = (_tensor(tensors, modules[layer][0], part).shape for part in ("a", "b"))
        shapes[layer] = ((*stack, *a[::-1]), (*stack, *b[::-1]))
    return shapes, modules


def _tensor(tensors: Mapping[str, np.ndarray], module: str, part: str) -> np.ndarray:
    key = f"{PREFIX}{module}.{_PRODUCTS[part]}"
    if key not in tensors:
        raise CheckpointMismatchError(f"the file lacks {key!r}")
    return tensors[key]
