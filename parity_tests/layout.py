"""One layer on both sides: names, and PyTorch's layouts as jaxkfac reads them.

PyTorch keeps kernels as (out, in, window...), Flax as (window..., in, out). A row of a
convolution is a patch flattened in the kernel's own order, so the input factor of one side is
the other's with rows and columns permuted.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from torch_ref.factors import LayerFactors, LayerGradient

Kind = Literal["dense", "conv", "embedding", "tied head"]


@dataclasses.dataclass(frozen=True)
class Twin:
    """One layer on both sides.

    Attributes:
        name: jaxkfac's name of it.
        modules: torch_ref's name; several are the iterations of a scan, stacked.
        kind: How the kernel is laid out. An embedding, and a head tied to one, are ``(rows,
            features)`` on both sides.
        shape: Of PyTorch's weight.
        kernel: Path of the kernel in jaxkfac's parameters.
        bias: Path of the bias there, ``None`` without one.
        kernel_shape: Of jaxkfac's kernel, where axes are split further.
        bias_shape: Likewise of its bias.
    """

    name: str
    modules: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    kernel: str
    bias: str | None = None
    kernel_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None

    def to_kernel(self, weight: np.ndarray) -> np.ndarray:
        """PyTorch's weight as jaxkfac's kernel."""
        if self.kind == "dense":
            weight = weight.T
        elif self.kind == "conv":
            weight = weight.transpose(*range(2, weight.ndim), 1, 0)
        return weight if self.kernel_shape is None else weight.reshape(self.kernel_shape)

    def to_bias(self, bias: np.ndarray) -> np.ndarray:
        """PyTorch's bias as jaxkfac's."""
        return bias if self.bias_shape is None else bias.reshape(self.bias_shape)

    def to_inputs(self, side: np.ndarray, *, axes: int) -> np.ndarray:
        """Rows of the input factor in jaxkfac's order, along the last ``axes`` axes."""
        if self.kind != "conv":
            return side
        _, channels, *window = self.shape
        order = np.arange(channels * int(np.prod(window))).reshape(channels, *window)
        order = np.moveaxis(order, 0, -1).reshape(-1)
        rest = np.arange(len(order), side.shape[-1])  # the ones column stays last
        order = np.concatenate([order, rest])
        for axis in range(-axes, 0):
            side = np.take(side, order, axis)
        return side

    def stacked(self, parts: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        """What ``read`` gives for each module, stacked where they are iterations."""
        found = [read(parts[module]) for module in self.modules]
        return found[0] if len(found) == 1 else np.stack(found)

    def factors(self, factors: Mapping[str, LayerFactors]) -> dict[str, np.ndarray]:
        """``{"A": ..., "G": ...}`` of torch_ref, as jaxkfac has them."""

        def a(layer: LayerFactors) -> np.ndarray:
            side = layer.a.numpy()
            # a vector is an embedding's diagonal
            return self.to_inputs(side, axes=2) if side.ndim > 1 else side

        return {
            "A": self.stacked(factors, a),
            "G": self.stacked(factors, lambda layer: layer.g.numpy()),
        }

    def leaves(self, gradients: Mapping[str, LayerGradient]) -> dict[str, np.ndarray]:
        """``{path: leaf}`` of a gradient of torch_ref, as jaxkfac has it."""

        def kernel(layer: LayerGradient) -> np.ndarray:
            matrix = layer.weight.detach().cpu().numpy()
            if self.bias is not None and layer.bias is None:
                matrix = matrix[..., :-1]
            if self.kind == "embedding":  # read by torch_ref as (features, rows)
                matrix = matrix.swapaxes(-1, -2)
            return self.to_kernel(matrix.reshape(self.shape))

        def bias(layer: LayerGradient) -> np.ndarray:
            column = layer.weight[..., -1] if layer.bias is None else layer.bias
            return self.to_bias(column.detach().cpu().numpy().reshape(-1))

        found = {self.kernel: self.stacked(gradients, kernel)}
        if self.bias is not None:
            found[self.bias] = self.stacked(gradients, bias)
        return found


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a/b": x}`` as ``{"a": {"b": x}}``."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
