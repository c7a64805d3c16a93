"""Quantizing trees of parameters to NF4, and back."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxkfac._arguments import ArrayTree, path_of
from jaxkfac.interception import Layer, LayerTable, selector
from jaxkfac.interception.values import is_encoded
from jaxkfac.lslora.nf4._tensor import (
    NESTED_BLOCK,
    NF4,
    Nested,
    encode,
    encode_scales,
    nested_levels,
)

# ---------------- the axes of a kernel: stack, inputs, outputs


@dataclasses.dataclass(frozen=True)
class KernelAxes:
    """How to read a kernel as a stack of matrices.

    Attributes:
        name: Name of the layer, for messages.
        stack: Number of leading axes that form the stack.
        shape: Shape of the kernel.
        inputs: Contracted axes, counted after the stack, ascending.
    """

    name: str
    stack: int
    shape: tuple[int, ...]
    inputs: tuple[int, ...]

    @classmethod
    def plain(cls, name: str, shape: tuple[int, ...], stack: int) -> "KernelAxes":
        """Axes of a kernel ``(stack..., in, out)``."""
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
        """One slice as ``(out, in)``, as PyTorch stores it."""
        turned = kernel.transpose(*self.outputs, *self.inputs)
        return turned.reshape(self.out_features, self.in_features)


def axes_of(table: LayerTable, layers: str, leaves: dict[str, Any]) -> dict[str, KernelAxes]:
    """``{path: axes}`` of the layers in a table that a pattern matches.

    Raises:
        UnknownLayerError: no layer matches, or the tree lacks the parameter of a matching one.
        ValueError: a layer is not dense, or an axis mixes stack, inputs and outputs.
    """
    axes_by_path: dict[str, KernelAxes] = {}
    chosen = selector(layers, [n for n in table if table[n].weight.path in leaves])
    for name in (n for n in table if n in chosen):
        layer, path = table[name], table[name].weight.path
        if not layer.is_dense:
            raise ValueError(
                f"layer {name!r} is of kind {layer.kind!r}, and only dense layers can be NF4: "
                "make layers= narrower"
            )
        axes = _from_layer(layer, tuple(leaves[path].shape))
        if axes_by_path.setdefault(path, axes).inputs != axes.inputs:
            raise ValueError(
                f"layer {name!r}: its parameter is also used in another orientation "
                f"({axes_by_path[path].name!r}), and blocks run along the inputs of one: keep it "
                "in full precision"
            )
    for name, layer in table.items():
        if not layer.is_dense and layer.weight.path in axes_by_path:
            raise ValueError(
                f"layer {axes_by_path[layer.weight.path].name!r}: its parameter is also read as an "
                f"{layer.kind} ({name!r}), which NF4 cannot be: keep it in full precision"
            )
    return axes_by_path


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
            atom_size, kind = atoms.pop(0)
            size //= atom_size
            mine.add(kind)
        if size > 1 or len(mine) > 1:
            raise ValueError(
                f"layer {layer.name!r}: an axis of its parameter {shape} is split between "
                f"{' and '.join(sorted(mine))} by the program: keep it in full precision"
            )
        # An axis of size one counts as an output. In front of the inputs it could be a stack too.
        roles.append(mine.pop() if mine else "output")
    stack = next((d for d, kind in enumerate(roles) if kind != "stack"), len(roles))
    if "stack" in roles[stack:]:
        raise ValueError(
            f"layer {layer.name!r}: its stacked axis is not in front (shape {shape}), so slices of "
            "it cannot be taken undecoded: move the axis to the front, or keep it in full precision"
        )
    inputs = tuple(d for d, kind in enumerate(roles[stack:]) if kind == "input")
    return KernelAxes(layer.name, stack, shape, inputs)


# ---------------- quantizing


def quantize(
    params: ArrayTree,
    layers: str = r"(.*/)?kernel",
    *,
    stack: int = 0,
    table: LayerTable | None = None,
    block: int = 64,
    double: bool = True,
) -> ArrayTree:
    r"""Quantize the kernels of dense layers to NF4, on the host, slice by slice.

    Each block of 64 inputs of one output is divided by its largest absolute value $s$ and
    rounded to the nearest of 16 levels. With ``double``, the scales $s$ minus their mean over
    the slice are themselves quantized to 8 bits, in blocks of 256. Codes and scales equal those of
    bitsandbytes (``quantize_4bit(weight, quant_type="nf4", compress_statistics=double)``) for
    the weight ``(out, in)``; only the mean, which PyTorch sums in its own order, may differ in its
    last bits.

    A tree alone does not tell inputs from outputs. Without ``table``, a kernel is read as
    ``(in, out)`` with ``stack`` scanned or expert axes in front. With a layer table, the program
    determines inputs, outputs and stack, whatever the order of the kernel's axes.

    Args:
        params: Floating parameters; bfloat16, float16 and float64 are quantized as float32.
            ``jax.ShapeDtypeStruct`` leaves give NF4 of such leaves, for planning. Leaves that
            are already NF4 stay: quantize stacked and single kernels in two calls.
        layers: Full-match pattern over parameter paths (layer names, with ``table``). By default
            it matches every ``kernel``, including the head: exclude it if its precision matters.
        stack: Number of leading axes that form a stack; not with ``table``.
        table: ``jk.find_layers(apply_fn, params, inputs)``; shapes suffice for it.
        block: Inputs per scale; even.
        double: Whether to quantize the scales too: 4.13 bits per element instead of 4.5.

    Returns:
        The tree, with each kernel replaced by an :class:`NF4`.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.
        ValueError: names the layer: its axes are ambiguous or its inputs not divisible by
            ``block``, it is not dense, or it holds NaN or infinity.

    Memory:
        One slice in full precision beyond ``params`` and the result. In the step, a scanned stack
        is decoded one slice at a time: with 16 layers, temporaries were those of 1 layer's kernels
        forward and of 2 with the adapters' gradients. For an unrolled model the compiler decides
        how many kernels are decoded at once (on a CPU: all of them).

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora, jaxkfac.lslora.nf4 as nf4
        >>> def apply_fn(params, x):
        ...     return x @ params["kernel"]
        >>> params4 = nf4.quantize({"kernel": jnp.ones((64, 2))})
        >>> params4["kernel"]
        NF4((64, 2), float32, block=64, double)
        >>> adapted = lslora.attach(apply_fn, lslora.Config(rank=1, target="kernel"))
        >>> adapted(params4, {}, jnp.ones((5, 64))).shape
        (5, 2)

    References:
        QLoRA: Efficient Finetuning of Quantized LLMs, Dettmers, Pagnoni, Holtzman and
        Zettlemoyer, 2023.
    """
    _check_block(block)
    if table is not None and stack:
        raise ValueError(f"stack={stack} and table=: the table has the stack of every layer")
    path_leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_encoded)
    leaves = {path_of(path): leaf for path, leaf in path_leaves if _is_floating(leaf)}
    axes = axes_of(table, layers, leaves) if table is not None else {}
    if table is None:
        for name in selector(layers, list(leaves)):
            axes[name] = KernelAxes.plain(name, tuple(leaves[name].shape), stack)
    new = {
        path: _quantized(path, leaves[path], kernel_axes, block=block, double=double)
        for path, kernel_axes in axes.items()
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: new.get(path_of(path), leaf), params, is_leaf=is_encoded
    )


def quantize_slices(
    slices: Iterable[Any],
    *,
    length: int,
    block: int = 64,
    double: bool = True,
    inputs: tuple[int, ...] = (0,),
) -> NF4:
    """Build a stack of kernels in NF4 from its slices, with one slice in memory at a time.

    Args:
        slices: Kernels ``(in, out)`` of one shape and dtype, NumPy or JAX; for example from a
            generator that reads them from a file.
        length: Number of slices.
        block: See :func:`quantize`.
        double: See :func:`quantize`.
        inputs: Contracted axes of a slice, if not only the first.

    Raises:
        ValueError: the number of slices is not ``length``, they differ in shape or dtype, their
            inputs are not divisible by ``block``, or one holds NaN or infinity.

    Memory:
        One slice in full precision, and the result.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora.nf4 as nf4
        >>> nf4.quantize_slices((jnp.full((64, 2), i) for i in (1.0, 2.0, 3.0)), length=3)
        NF4((3, 64, 2), float32, block=64, double)
    """
    _check_block(block)
    if length < 1:
        raise ValueError(f"length={length}: expected the number of slices, at least 1")
    remaining, built, count = iter(slices), None, 0
    while (kernel := next(remaining, None)) is not None:
        shape, dtype = tuple(kernel.shape), jnp.dtype(kernel.dtype)
        if built is None:
            axes = KernelAxes("the stack", 1, (length, *shape), tuple(sorted(inputs)))
            built = _Builder(axes, dtype, block, double)
        if count == length:
            raise ValueError(f"expected {length} slices, got more")
        if shape != built.axes.features or dtype != built.dtype:
            raise ValueError(
                f"slice {count}: expected {built.axes.features} {built.dtype}, as the first, got "
                f"{shape} {dtype}"
            )
        built.write((count,), kernel)
        count += 1
        del kernel  # freed before the next one is read
    if built is None or count != length:
        raise ValueError(f"expected {length} slices, got {count}")
    return built.result()


def dequantize(tree: ArrayTree) -> ArrayTree:
    """Decode every NF4 kernel of a tree to a full array; a single kernel is a tree too.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora.nf4 as nf4
        >>> params = {"kernel": jnp.full((64, 2), 3.0)}
        >>> bool((nf4.dequantize(nf4.quantize(params))["kernel"] == 3.0).all())
        True
    """
    return jax.tree.map(lambda x: x.decode() if is_encoded(x) else x, tree, is_leaf=is_encoded)


class _Builder:
    """Builds the arrays of one NF4 slice by slice."""

    def __init__(self, axes: KernelAxes, dtype: np.dtype, block: int, double: bool) -> None:
        self.axes, self.dtype, self.block, self.double = axes, dtype, block, double
        if axes.in_features % block:
            raise ValueError(
                f"layer {axes.name!r}: {axes.in_features} inputs are not divisible by "
                f"block={block}: leave it out with layers=, or take another block"
            )
        self.arrays = jax.tree.map(lambda s: np.empty(s.shape, s.dtype), self.shapes())
        if self.arrays.nested is not None:
            self.arrays.nested.levels[...] = nested_levels()

    def shapes(self) -> NF4:
        axes, shape = self.axes, jax.ShapeDtypeStruct
        stack, outs, ins = axes.shape[: axes.stack], axes.out_features, axes.in_features
        scales, nested = ins // self.block, None
        if self.double:
            nested = Nested(
                shape((*stack, math.ceil(outs * scales / NESTED_BLOCK)), jnp.float32),
                shape((*stack, len(nested_levels())), jnp.float32),
                shape(stack, jnp.float32),
            )
        kind = jnp.uint8 if self.double else jnp.float32
        return NF4(
            shape((*stack, outs, ins // 2), jnp.uint8),
            shape((*stack, outs, scales), kind),
            nested,
            axes.shape[axes.stack :],
            axes.inputs,
            self.dtype,
            self.block,
        )

    def write(self, index: tuple[int, ...], kernel: ArrayLike) -> None:
        try:
            codes, scales = encode(self.axes.matrix(np.asarray(kernel)), self.block)
        except ValueError as error:
            where = f"[{', '.join(map(str, index))}]" if index else ""
            raise ValueError(f"layer {self.axes.name!r}{where}: {error}") from None
        arrays = self.arrays
        arrays.codes[index] = codes
        if arrays.nested is None:
            arrays.absmax[index] = scales
            return
        arrays.absmax[index], arrays.nested.absmax[index], offset = encode_scales(scales)
        arrays.nested.offset[index] = offset

    def result(self) -> NF4:
        return jax.tree.map(jnp.asarray, self.arrays)


def _quantized(path: str, leaf: Any, axes: KernelAxes, *, block: int, double: bool) -> NF4:
    if isinstance(leaf, Tracer):
        raise ValueError(
            f"layer {path!r} is traced: quantize runs on the host, outside jit, where its codes "
            "are bitsandbytes' to the last"
        )
    built = _Builder(axes, jnp.dtype(leaf.dtype), block, double)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return built.shapes()
    for index in np.ndindex(*axes.shape[: axes.stack]):
        built.write(index, leaf[index])
    return built.result()


def _is_floating(leaf: object) -> bool:
    return not is_encoded(leaf) and jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating)


def _check_block(block: int) -> None:
    if block < 2 or block % 2:
        raise ValueError(f"block={block}: expected an even number of inputs, as two share a byte")
