"""The NF4 format: encoding, decoding, and conversion to and from bitsandbytes."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkfac._errors import nearest
from jaxkfac.interception.values import EncodedParameter

# ---------------- code books: 16 levels for weights, 256 for the scales of their blocks


# QLoRA (Dettmers, Pagnoni, Holtzman, Zettlemoyer, 2023), appendix E: quantiles of the normal
# distribution, scaled to [-1, 1], with an exact zero. These are the float32 values that
# bitsandbytes writes into its files.
LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)

# A value gets the upper level if it is larger than the midpoint, rounded to float32.
MIDPOINTS = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)

NESTED_BLOCK = 256  # number of scales that share a scale of the second level


@functools.cache
def nested_levels() -> np.ndarray:
    """The dynamic 8-bit levels: seven decades, each with twice the resolution of the previous one.

    8-bit Approximations for Parallelism in Deep Learning (Dettmers, 2016). Decade ``e`` holds
    the centres of ``2**e`` equal parts of [0.1, 1], with both signs. The ends of the parts are
    counted from the nearer end of the interval and rounded once, which is how PyTorch's
    ``linspace`` arrives at the numbers in bitsandbytes' files.
    """
    low, high = np.float32(0.1), np.float32(1)
    levels = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        count = 2**decade
        step = np.float64((high - low) / np.float32(count))
        i = np.arange(count + 1)
        ends = np.where(i < (count + 1) // 2, low + step * i, high - step * (count - i))
        ends = ends.astype(np.float32)
        centres = np.float32(10.0 ** (decade - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        levels += [centres, -centres]
    return np.sort(np.concatenate(levels))


@functools.cache
def nested_codes() -> np.ndarray:
    """The code of each of 65536 equidistant values in [-1, 1].

    bitsandbytes on the CPU rounds a scale to this grid first and then to the nearest level, the
    lower one of two. Below 3e-5 the grid is coarser than the levels, and zero is no grid point:
    a scale equal to the mean gets code 131, 2e-6 of its block's largest deviation.
    """
    levels = nested_levels()
    grid = np.float32(-1) + np.float32(2) * np.arange(65536, dtype=np.float32) / np.float32(65535)
    above = np.searchsorted(levels, grid, side="left")
    right = np.clip(above, 1, 255)
    nearer = np.abs(levels[right] - grid) < np.abs(grid - levels[right - 1])
    return np.where(above == 0, 0, np.where(nearer, right, right - 1)).astype(np.uint8)


# ---------------- encoding one matrix, on the host
#
# This uses NumPy because the codes must equal those of bitsandbytes exactly: XLA on a CPU flushes
# denormal numbers to zero, and may fuse operations after a division and round differently. qwix has
# the same levels and blocks (a test compares its codes and scales), but neither the second level of
# scales nor two codes in a byte, so it is not used here.


_AT_ONCE = 2**20  # elements per step, so that temporaries stay in the cache
_SMALLEST = np.float32(1e-38)  # bitsandbytes divides by no smaller scale


def encode(matrix: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix ``(out, in)``, with ``block`` inputs per scale.

    Returns:
        ``(codes (out, in / 2) uint8, scales (out, in / block) float32)``. The first of the two
        codes in a byte is in the upper half.

    Raises:
        ValueError: a value is NaN or infinite as float32.
    """
    outs, ins = matrix.shape
    codes = np.empty((outs, ins // 2), np.uint8)
    scales = np.empty((outs, ins // block), np.float32)
    rows = max(1, _AT_ONCE // max(1, ins))
    for start in range(0, outs, rows):
        row_slice = slice(start, start + rows)
        with np.errstate(over="ignore"):  # values too large for float32 raise below
            groups = np.asarray(matrix[row_slice], np.float32).reshape(-1, ins // block, block)
        scales[row_slice] = np.abs(groups).max(-1)
        if not np.isfinite(scales[row_slice]).all():
            raise ValueError("NaN or infinite values (as float32)")
        inverse = np.float32(1) / np.maximum(scales[row_slice], _SMALLEST)
        levels = _nearest(np.clip(groups * inverse[..., None], -1, 1)).reshape(-1, ins)
        codes[row_slice] = levels[:, 0::2] << 4 | levels[:, 1::2]
    return codes, scales


def encode_scales(
    scales: np.ndarray, offset: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """The second level: scales minus their mean, in 8 bits, with one nested scale per 256.

    Args:
        scales: Float32, of any shape; blocks run through the flattened array.
        offset: Mean of the scales. By default it is computed exactly and rounded once; PyTorch's
            sum depends on its threads and vectors, and differs in the last bits.

    Returns:
        ``(codes like scales, uint8; nested scales; offset)``.
    """
    if offset is None:
        offset = np.float32(scales.mean(dtype=np.float64))
    flat = scales.reshape(-1) - offset
    blocks = np.pad(flat, (0, -flat.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    nested = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a block of equal scales
        scaled = np.clip(blocks * (np.float32(1) / nested)[:, None], -1, 1)
    grid = (scaled + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)
    codes = nested_codes()[np.nan_to_num(grid).astype(np.int32)]
    codes = np.where(nested[:, None] == 0, np.uint8(0), codes)
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), nested, offset


@functools.cache
def _cells() -> tuple[np.ndarray, np.ndarray]:
    """For each of 64 equal cells of [-1, 1]: the code at its lower end, and the midpoint in it."""
    low = np.arange(65) / 32 - 1
    code = np.searchsorted(MIDPOINTS, low - 1e-3)
    padded = np.append(MIDPOINTS, np.float32(np.inf))
    inside = padded[code] <= low + 1 / 32 + 1e-3
    return code.astype(np.uint8), np.where(inside, padded[code], np.float32(np.inf))


def _nearest(x: np.ndarray) -> np.ndarray:
    """Number of midpoints below each value; a cell holds at most one, so it takes one compare."""
    codes, midpoints = _cells()
    cell = ((x + np.float32(1)) * np.float32(32)).astype(np.uint8)
    return codes[cell] + (x > midpoints[cell])


# ---------------- a kernel in NF4


class Nested(NamedTuple):
    """The second level: ``scale = levels[code] * absmax + offset``.

    Attributes:
        absmax: Scale of each block of 256 scales of a slice, ``(stack..., blocks)`` float32.
        levels: Values of the 256 codes, ``(stack..., 256)`` float32.
        offset: Mean of the slice's scales, ``(stack...,)`` float32.
    """

    absmax: Any
    levels: Any
    offset: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NF4(EncodedParameter):
    """A kernel, or a stack of them, in four bits: a pytree in place of the array.

    It passes through ``jit`` as an argument; ``lax.scan``, ``jax.tree.map(lambda x: x[i], ...)``
    and ``jnp.stack`` act on its stacked axes. Only :func:`dequantize` and the function that
    ``jk.lslora.attach`` returns read it. It takes 4.13 bits per element with nested scales, else
    4.5.

    Blocks run along the inputs of one output, as in PyTorch's flattened ``(out, in)`` weight,
    whatever the order of the kernel's axes.

    Attributes:
        codes: ``(stack..., out, in / 2)`` uint8: two codes per byte, the first in the upper half.
        absmax: Scale of each block, ``(stack..., out, in / block)``: float32, or the uint8 codes
            of the second level.
        nested: The second level, or ``None``.
        features: Shape of one slice.
        inputs: Contracted axes of a slice.
        dtype: Dtype of the decoded kernel.
        block: Inputs per scale.
    """

    codes: Any
    absmax: Any
    nested: Nested | None
    features: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.codes.shape[:-2])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, *self.features)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def __repr__(self) -> str:
        double = ", double" if self.nested is not None else ""
        return f"NF4({self.shape}, {self.dtype}, block={self.block}{double})"

    def scales(self) -> Float[Array, "*stack out blocks"]:
        """The scale of each block, in float32.

        Raises:
            TypeError: a cast of the whole tree has rounded the scales.
        """
        floats = [self.absmax] if self.nested is None else [*self.nested]
        if other := sorted({str(x.dtype) for x in floats} - {"float32"}):
            raise TypeError(
                f"the scales of an NF4 kernel {self.shape} are {', '.join(other)}, and float32 is "
                "expected: a cast of the tree has rounded them; cast before quantize, or only the "
                "other leaves"
            )
        if self.nested is None:
            return self.absmax
        flat = self.absmax.reshape(*self.stack, -1)
        levels = jnp.take_along_axis(
            self.nested.levels, flat.astype(jnp.int32), -1, mode="promise_in_bounds"
        )
        absmax = jnp.repeat(self.nested.absmax, NESTED_BLOCK, axis=-1)[..., : flat.shape[-1]]
        product = levels * absmax
        # Round before the offset is added, as bitsandbytes does. A compiler that fuses the two
        # would keep the product's last bits. XLA's barriers do not stop LLVM from fusing; a select
        # does.
        product = jnp.where(product == product, product, jnp.nan)
        return (product + self.nested.offset[..., None]).reshape(self.absmax.shape)

    def decode(self) -> Float[Array, "..."]:
        """Decode to an array of ``dtype`` and ``shape``; the computation is in float32."""
        levels = jnp.asarray(LEVELS)
        # Two look-ups among 16 entries are faster on a CPU than one among 256 pairs.
        halves = [_look_up(levels, self.codes >> 4), _look_up(levels, self.codes & 15)]
        blocks = jnp.stack(halves, -1).reshape(*self.absmax.shape, self.block)
        values = (blocks * self.scales()[..., None]).astype(self.dtype)
        order = [d for d in range(len(self.features)) if d not in self.inputs]
        order += self.inputs
        n = len(self.stack)
        own_order = sorted(range(len(order)), key=order.__getitem__)
        values = values.reshape(*self.stack, *(self.features[d] for d in order))
        return values.transpose(*range(n), *(n + d for d in own_order))


def _look_up(levels: Array, codes: Array) -> Array:
    return levels.at[codes].get(mode="promise_in_bounds")


# ---------------- 4-bit weights of bitsandbytes' checkpoints, lossless in both directions


_STATE = "quant_state.bitsandbytes__nf4"
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # block sizes that bitsandbytes accepts
_DTYPES = ("float32", "bfloat16", "float16")


def from_bitsandbytes(tensors: Mapping[str, Any], name: str) -> NF4:
    """Convert one 4-bit weight of a bitsandbytes checkpoint to a kernel ``(in, out)``.

    Nothing is decoded: codes, scales and the second level's code book are copied, and
    :func:`dequantize` gives what ``bitsandbytes.functional.dequantize_4bit`` gives, transposed.
    To stack kernels of one shape for a scan, use ``jax.tree.map(lambda *x: jnp.stack(x),
    *kernels)``.

    Args:
        tensors: Tensors of a safetensors file, as NumPy arrays.
        name: Key of the weight; the other tensors have keys such as ``name + ".absmax"``.

    Raises:
        ValueError: tensors are missing or do not fit, or the weight is FP4, not a matrix, or not
            made of blocks within one output.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora.nf4 as nf4
        >>> kernel = nf4.quantize({"kernel": jnp.ones((64, 2))})["kernel"]
        >>> tensors = nf4.to_bitsandbytes(kernel, "proj.weight")
        >>> nf4.from_bitsandbytes(tensors, "proj.weight")
        NF4((64, 2), float32, block=64, double)
    """
    state = _state(tensors, name)
    shape, block, dtype = state.get("shape"), state.get("blocksize"), state.get("dtype")
    if not isinstance(shape, list) or len(shape) != 2 or not isinstance(block, int):
        raise ValueError(f"{name}: expected a matrix in blocks, got shape {shape}, block {block}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name}: expected a dtype of {_DTYPES}, got {dtype!r}")
    outs, ins = shape
    if block < 1 or ins % block:
        raise ValueError(
            f"{name}: {ins} inputs are not divisible by its blocks of {block}, which run from one "
            "output into the next: read this weight in full precision"
        )
    if not np.array_equal(_tensor(tensors, f"{name}.quant_map"), LEVELS):
        raise ValueError(f"{name}.quant_map: expected the 16 levels of NF4, got others")
    # Some checkpoints store the bytes under another dtype, for sharding.
    codes = np.ascontiguousarray(_tensor(tensors, name)).reshape(-1).view(np.uint8)
    blocks = outs * ins // block
    absmax, nested = _tensor(tensors, f"{name}.absmax"), None
    if f"{name}.nested_absmax" in tensors:
        if state.get("nested_blocksize") != NESTED_BLOCK:
            raise ValueError(
                f"{name}: expected nested blocks of {NESTED_BLOCK}, got "
                f"{state.get('nested_blocksize')}"
            )
        nested_absmax = _tensor(tensors, f"{name}.nested_absmax").reshape(-1)
        levels = _tensor(tensors, f"{name}.nested_quant_map").reshape(-1)
        _check_size(f"{name}.nested_absmax", nested_absmax, -(-blocks // NESTED_BLOCK))
        _check_size(f"{name}.nested_quant_map", levels, 256)
        if not isinstance(state.get("nested_offset"), float | int):
            raise ValueError(f"{name}: expected a nested_offset, the mean of the scales, got none")
        offset = jnp.asarray(state["nested_offset"], jnp.float32)
        nested = Nested(
            jnp.asarray(nested_absmax, jnp.float32), jnp.asarray(levels, jnp.float32), offset
        )
    kind = np.dtype(np.float32 if nested is None else np.uint8)
    if absmax.dtype != kind:
        level = "no second level" if nested is None else "a second level"
        raise ValueError(f"{name}.absmax: expected {kind} beside {level}, got {absmax.dtype}")
    _check_size(name, codes, outs * ins // 2)
    _check_size(f"{name}.absmax", absmax, blocks)
    return NF4(
        jnp.asarray(codes.reshape(outs, ins // 2)),
        jnp.asarray(absmax.reshape(outs, ins // block)),
        nested,
        (ins, outs),
        (0,),
        jnp.dtype(dtype),
        block,
    )


def to_bitsandbytes(kernel: NF4, name: str) -> dict[str, np.ndarray]:
    """Convert one kernel to the tensors of a bitsandbytes checkpoint, for ``save_file``.

    The weight is ``(out, in)``, with several input or output axes flattened.

    Raises:
        ValueError: the kernel is a stack (take a slice with ``jax.tree.map(lambda x: x[i],
            kernel)``), or has a block or dtype that bitsandbytes does not know.
    """
    if kernel.stack:
        raise ValueError(f"{name}: expected one kernel, got a stack {kernel.stack} of them")
    dtype = str(kernel.dtype)
    if kernel.block not in _BLOCKS or dtype not in _DTYPES:
        raise ValueError(
            f"{name}: bitsandbytes knows blocks of {_BLOCKS} and {_DTYPES}, and this is "
            f"{kernel.block}, {dtype}"
        )
    outs, half = kernel.codes.shape
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": kernel.block,
        "dtype": dtype,
        "shape": [outs, 2 * half],
    }
    tensors = {
        name: np.asarray(kernel.codes).reshape(-1, 1),
        f"{name}.absmax": np.asarray(kernel.absmax).reshape(-1),
        f"{name}.quant_map": LEVELS,
    }
    if kernel.nested is not None:
        tensors[f"{name}.nested_absmax"] = np.asarray(kernel.nested.absmax)
        tensors[f"{name}.nested_quant_map"] = np.asarray(kernel.nested.levels)
        state["nested_blocksize"] = NESTED_BLOCK
        state["nested_dtype"] = "float32"
        state["nested_offset"] = float(kernel.nested.offset)
    tensors[f"{name}.{_STATE}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors


def _state(tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
    key = f"{name}.{_STATE}"
    if key not in tensors:
        if f"{name}.quant_state.bitsandbytes__fp4" in tensors:
            raise ValueError(f"{name} is FP4, and only NF4 can be read")
        weights = [k.removesuffix(f".{_STATE}") for k in tensors if k.endswith(_STATE)]
        raise ValueError(
            f"expected {key!r}, which no 4-bit weight is without; the nearest of "
            f"{len(weights)} are {nearest(name, weights) if weights else 'none'}"
        )
    try:
        return json.loads(bytes(np.asarray(tensors[key], np.uint8)))
    except ValueError as error:
        raise ValueError(f"{key}: expected JSON: {error}") from None


def _tensor(tensors: Mapping[str, Any], key: str) -> np.ndarray:
    if key not in tensors:
        raise ValueError(f"expected {key!r} beside the weight, and the file has none")
    return np.asarray(tensors[key])


def _check_size(key: str, array: np.ndarray, expected: int) -> None:
    if array.size != expected:
        raise ValueError(f"{key}: expected {expected} elements, got {array.size}")
