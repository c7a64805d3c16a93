"""Which axes of a kernel are a stack, inputs, outputs."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxkfac.interception import Layer, LayerTable, selector


@dataclasses.dataclass(frozen=True)
class KernelAxes:
    """How a kernel is read as a stack of matrices.

    Attributes:
        name: The layer, for messages.
        stack: Number of leading axes that are a stack.
        shape: Shape of the kernel.
        inputs: Which axes behind them are contracted, ascending.
    """

    name: str
    stack: int
    shape: tuple[int, ...]
    inputs: tuple[int, ...]

    @classmethod
    def plain(cls, name: str, shape: tuple[int, ...], stack: int) -> "KernelAxes":
        """A kernel ``(stack..., in, out)``."""
        if len(shape) != stack + 2:
            raise ValueError(
                f"layer {name!r}: with stack={stack}, expected a kernel of {stack + 2} axes "
                f"(stack..., in, out), got shape {shape}. Give stack=, the number of scanned or "
                "expert axes, in a call of its own; or table=jk.find_layers(apply_fn, params, "
                "inputs), which knows every axis; or leave it out with layers="
            )
        return cls(name, stack, shape, (0,))

    @property
    def features(self) -> tuple[int, ...]:
        return self.shape[self.stack :]

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.features)) if d not in self.inputs)

    @property
    def in_features(self) -> int:
        return math.prod(self.features[d] for d in self.inputs)

    @property
    def out_features(self) -> int:
        return math.prod(self.features[d] for d in self.outputs)

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """One slice as ``(out, in)``, as PyTorch has it."""
        turned = kernel.transpose(*self.outputs, *self.inputs)
        return turned.reshape(self.out_features, self.in_features)


def axes_of(table: LayerTable, layers: str, leaves: dict[str, Any]) -> dict[str, KernelAxes]:
    """``{path: axes}`` of the layers of a table that a pattern matches.

    Raises:
        UnknownLayerError: none, or one whose parameter is not in the tree.
        ValueError: one is not dense, or its axes are not wholly stack, input or output.
    """
    found: dict[str, KernelAxes] = {}
    chosen = selector(layers, [n for n in table if table[n].weight.path in leaves])
    for name in (n for n in table if n in chosen):
        layer, path = table[name], table[name].weight.path
        if not layer.is_dense:
            raise ValueError(
                f"layer {name!r} is of kind {layer.kind!r}, and only dense layers can be NF4: "
                "make layers= narrower"
            )
        own = _from_layer(layer, tuple(leaves[path].shape))
        if found.setdefault(path, own).inputs != own.inputs:
            raise ValueError(
                f"layer {name!r}: its parameter is also used in another orientation "
                f"({found[path].name!r}), and blocks run along the inputs of one: keep it in full "
                "precision"
            )
    for name, layer in table.items():
        if not layer.is_dense and layer.weight.path in found:
            raise ValueError(
                f"layer {found[layer.weight.path].name!r}: its parameter is also read as an "
                f"{layer.kind} ({name!r}), which NF4 cannot be: keep it in full precision"
            )
    return found


def _from_layer(layer: Layer, shape: tuple[int, ...]) -> KernelAxes:
    weight = layer.weight
    if math.prod(weight.atoms) != math.prod(shape[len(weight.index) :]):
        raise ValueError(
            f"layer {layer.name!r}: table= was made for a parameter of {math.prod(weight.atoms)} "
            f"elements, and params hold {shape}: make it with jk.find_layers of this model"
        )
    role = dict.fromkeys(weight.stack, "stack") | dict.fromkeys(weight.inputs, "input")
    atoms = [(size, role.get(i, "output")) for i, size in enumerate(weight.atoms) if size > 1]
    roles = ["stack"] * len(weight.index)
    for size in shape[len(weight.index) :]:
        mine: set[str] = set()
        while size > 1 and atoms and size % atoms[0][0] == 0:
            part, kind = atoms.pop(0)
            size //= part
            mine.add(kind)
        if size > 1 or len(mine) > 1:
            raise ValueError(
                f"layer {layer.name!r}: an axis of its parameter {shape} is split between "
                f"{' and '.join(sorted(mine))} by the program: keep it in full precision"
            )
        # An axis of one is an output; in front of the inputs it may be a stack, to the same end.
        roles.append(mine.pop() if mine else "output")
    stack = next((d for d, kind in enumerate(roles) if kind != "stack"), len(roles))
    if "stack" in roles[stack:]:
        raise ValueError(
            f"layer {layer.name!r}: its stacked axis is not in front (shape {shape}), so slices of "
            "it cannot be taken undecoded: move the axis to the front, or keep it in full precision"
        )
    inputs = tuple(d for d, kind in enumerate(roles[stack:]) if kind == "input")
    return KernelAxes(layer.name, stack, shape, inputs)
