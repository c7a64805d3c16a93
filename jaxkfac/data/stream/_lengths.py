"""Batches of rows of about one length."""

import zlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

_Example = TypeVar("_Example")


def length_multiples(longest: int, num_lengths: int) -> tuple[int, ...]:
    """At most ``num_lengths``, multiples of one that is a multiple of 8 where it can be.

    Raises:
        ValueError: ``num_lengths`` is not positive.
    """
    if num_lengths < 1:
        raise ValueError(f"num_lengths must be at least 1, not {num_lengths}")
    unit = -(-longest // num_lengths)
    unit = -(-unit // 8) * 8
    return tuple(range(unit, longest + unit, unit))


def arrange_by_length(
    length_of: Callable[[_Example], int], *, batch_size: int
) -> Callable[[list[_Example], tuple[int, int]], list[tuple[_Example, ...]]]:
    """An ``arrange`` for a stream whose rows hold one example each: batches of about one length.

    They come in a random order; examples that fill no batch are last.
    """

    def arrange(examples: list[_Example], seed: tuple[int, int]) -> list[tuple[_Example, ...]]:
        lengths = np.array([length_of(example) for example in examples])
        whole = len(lengths) // batch_size * batch_size
        batches = np.argsort(lengths[:whole], kind="stable").reshape(-1, batch_size)
        order = group_generator(lengths, seed).permutation(batches).ravel()
        return [(examples[i],) for i in (*order, *range(whole, len(lengths)))]

    return arrange


def group_generator(lengths: np.ndarray, seed: tuple[int, int]) -> np.random.Generator:
    """Another one for each group, although a group does not know its number."""
    return np.random.default_rng([*seed, zlib.crc32(lengths.tobytes())])
