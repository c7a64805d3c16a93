"""Trees of parameters to NF4 and back."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from jaxkfac.interception import LayerTable, is_encoded, path_of, selector
from jaxkfac.lslora.nf4._axes import KernelAxes, axes_of
from jaxkfac.lslora.nf4._encode import encode, encode_scales
from jaxkfac.lslora.nf4._levels import NESTED_BLOCK, nested_levels
from jaxkfac.lslora.nf4._tensor import NF4, Nested


def quantize(
    params: PyTree,
    layers: str = r"(.*/)?kernel",
    *,
    stack: int = 0,
    table: LayerTable | None = None,
    block: int = 64,
    double: bool = True,
) -> PyTree:
    r"""The tree with the kernels of dense layers in NF4, quantised on the host slice by slice.

    Each block of 64 inputs of one output is divided by its largest absolute value $s$ and
    rounded to the nearest of 16 levels. With ``double``, the scales $s$ minus their mean over
    the slice are in turn kept in 8 bits, 256 to a scale. Codes and scales are those of
    bitsandbytes (``quantize_4bit(weight, quant_type="nf4", compress_statistics=double)``) for
    the weight ``(out, in)``; only the mean, which PyTorch sums in an order of its own, may differ
    by its last bits.

    A tree alone does not tell inputs from outputs. Without ``table`` a kernel is read as
    ``(in, out)``, with ``stack`` scanned or expert axes in front. With the layer table, inputs,
    outputs and stack are what the program makes of them, whatever the kernel's axes.

    Args:
        params: Parameters, floating; bfloat16, float16 and float64 are quantised as float32.
            ``jax.ShapeDtypeStruct`` leaves give NF4 of such leaves, for planning. Leaves that
            are NF4 already stay: quantise stacked and single kernels with two calls.
        layers: Full-match pattern over parameter paths (layer names, with ``table``). By default
            every ``kernel``, the head too: exclude it by pattern if its outputs matter.
        stack: Number of leading axes that are a stack; not with ``table``.
        table: ``jk.find_layers(apply_fn, params, inputs)``; shapes suffice for it.
        block: Inputs to a scale, even.
        double: Whether the scales are quantised too: 4.13 bits an element instead of 4.5.

    Returns:
        The tree, each kernel an :class:`NF4` in its place.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.
        ValueError: naming the layer: its axes are ambiguous or its inputs not divisible by
            ``block``, it is not dense, or it holds NaN or infinity.

    Memory:
        One slice in full precision beyond ``params`` and the result. In the step, a scanned stack
        is decoded one slice at a time: temporaries of 1 layer's kernels forward and of 2 with the
        adapters' gradients, at 16 layers. How many kernels of an unrolled model are decoded at
        once is for the compiler to say (on a CPU: all of them).

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
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_encoded)
    leaves = {path_of(path): leaf for path, leaf in found if _is_floating(leaf)}
    axes = axes_of(table, layers, leaves) if table is not None else {}
    if table is None:
        for name in selector(layers, list(leaves)):
            axes[name] = KernelAxes.plain(name, tuple(leaves[name].shape), stack)
    new = {
        path: _quantized(path, leaves[path], own, block=block, double=double)
        for path, own in axes.items()
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
    """A stack of kernels in NF4 from its slices, of which one at a time is alive.

    Args:
        slices: Kernels ``(in, out)`` of one shape and dtype, NumPy or JAX; from a generator that
            reads them from a file, for example.
        length: Their number.
        block: See :func:`quantize`.
        double: See :func:`quantize`.
        inputs: Which axes of a slice are contracted, if not the first alone.

    Raises:
        ValueError: the slices are not ``length`` many or differ in shape or dtype, their inputs
            are not divisible by ``block``, or one holds NaN or infinity.

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
    while (each := next(remaining, None)) is not None:
        shape, dtype = tuple(each.shape), jnp.dtype(each.dtype)
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
        built.write((count,), each)
        count += 1
        del each  # gone before the next one is read
    if built is None or count != length:
        raise ValueError(f"expected {length} slices, got {count}")
    return built.result()


def dequantize(tree: PyTree) -> PyTree:
    """The tree with every NF4 kernel as an array again, in full; one kernel alone is a tree too.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora.nf4 as nf4
        >>> params = {"kernel": jnp.full((64, 2), 3.0)}
        >>> bool((nf4.dequantize(nf4.quantize(params))["kernel"] == 3.0).all())
        True
    """
    return jax.tree.map(lambda x: x.decode() if is_encoded(x) else x, tree, is_leaf=is_encoded)


class _Builder:
    """The arrays of one NF4, written slice by slice."""

    def __init__(self, axes: KernelAxes, dtype: Any, block: int, double: bool) -> None:
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

    def write(self, index: tuple[int, ...], kernel: Any) -> None:
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


def _is_floating(leaf: Any) -> bool:
    return not is_encoded(leaf) and jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating)


def _check_block(block: int) -> None:
    if block < 2 or block % 2:
        raise ValueError(f"block={block}: expected an even number of inputs, as two share a byte")
