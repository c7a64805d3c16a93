"""Figures that follow from the layouts of the models the documents speak of."""

import functools
from typing import Any

import jax
import numpy as np

from benchmarks._documents._bytes import GB
from jaxkfac.planning import preset


@functools.cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """``{path: shape}`` of every parameter."""
    params = preset(name, examples=1, tokens=1).params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.shape for path, x in leaves}


def parameters(name: str) -> int:
    """How many there are."""
    return sum(_size(shape) for shape in shapes(name).values())


def parameter_gb(name: str, *, bytes_each: float = 2) -> float:
    """Of one copy of the parameters, bfloat16 by default, in GB."""
    return parameters(name) * bytes_each / GB


def kernels(name: str) -> list[tuple[int, int, int]]:
    """``(how many, inputs, outputs)`` of the dense kernels, the head among them."""
    found: list[Any] = [shape for path, shape in shapes(name).items() if path.endswith("kernel")]
    return [(_size(shape[:-2]), *shape[-2:]) for shape in found]


def factor_gb(name: str, *, bytes_each: int = 4) -> float:
    """Of A and G of every dense layer, each with factors of its own, in GB."""
    return sum(n * (i * i + o * o) for n, i, o in kernels(name)) * bytes_each / GB


def largest_side(name: str) -> int:
    """Of all factors, the head's among them."""
    return max(max(i, o) for n, i, o in kernels(name))


def four_bit_gb(name: str) -> float:
    """Kernels of the blocks in NF4 with doubly quantised scales, the rest in bfloat16, in GB."""
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    blocks = sum(n * i * o for n, i, o in kernels(name) if n > 1)
    return (blocks * bits / 8 + (parameters(name) - blocks) * 2) / GB


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
