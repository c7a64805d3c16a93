"""4-bit weights of bitsandbytes' checkpoints, without loss in either direction."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import nearest
from jaxkfac.lslora.nf4._tensor import LEVELS, NESTED_BLOCK, NF4, Nested

_STATE = "quant_state.bitsandbytes__nf4"
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that bitsandbytes knows
_DTYPES = ("float32", "bfloat16", "float16")


def from_bitsandbytes(tensors: Mapping[str, Any], name: str) -> NF4:
    """One 4-bit weight of a bitsandbytes checkpoint as a kernel ``(in, out)``.

    Nothing is decoded: codes, scales and the second level's own code book are taken over, and
    :func:`dequantize` gives what ``bitsandbytes.functional.dequantize_4bit`` gives, transposed.
    Kernels of one shape are stacked for a scan by ``jax.tree.map(lambda *x: jnp.stack(x),
    *kernels)``.

    Args:
        tensors: Of a safetensors file, NumPy arrays.
        name: Key of the weight; ``name + ".absmax"`` and the like hold the rest.

    Raises:
        ValueError: tensors are missing or do not fit, the weight is FP4, not a matrix, or not
            made of whole blocks by output.

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
    # Some checkpoints store the bytes as another dtype, for the sake of sharding.
    codes = np.ascontiguousarray(_tensor(tensors, name)).reshape(-1).view(np.uint8)
    blocks = outs * ins // block
    absmax, nested = _tensor(tensors, f"{name}.absmax"), None
    if f"{name}.nested_absmax" in tensors:
        if state.get("nested_blocksize") != NESTED_BLOCK:
            raise ValueError(
                f"{name}: expected nested blocks of {NESTED_BLOCK}, got "
                f"{state.get('nested_blocksize')}"
            )
        found = _tensor(tensors, f"{name}.nested_absmax").reshape(-1)
        levels = _tensor(tensors, f"{name}.nested_quant_map").reshape(-1)
        _check_size(f"{name}.nested_absmax", found, -(-blocks // NESTED_BLOCK))
        _check_size(f"{name}.nested_quant_map", levels, 256)
        offset = jnp.asarray(state.get("nested_offset", 0.0), jnp.float32)
        nested = Nested(jnp.asarray(found, jnp.float32), jnp.asarray(levels, jnp.float32), offset)
    _check_size(name, codes, outs * ins // 2)
    _check_size(f"{name}.absmax", absmax, blocks)
    return NF4(
        jnp.asarray(codes.reshape(outs, ins // 2)),
        jnp.asarray(absmax.reshape(outs, -1), jnp.uint8 if nested else jnp.float32),
        nested,
        (ins, outs),
        (0,),
        jnp.dtype(dtype),
        block,
    )


def to_bitsandbytes(kernel: NF4, name: str) -> dict[str, np.ndarray]:
    """The tensors of one kernel as bitsandbytes' checkpoints have them, for ``save_file``.

    The weight is ``(out, in)``; several input or output axes are flattened.

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


def _check_size(key: str, found: np.ndarray, expected: int) -> None:
    if found.size != expected:
        raise ValueError(f"{key}: expected {expected} elements, got {found.size}")
