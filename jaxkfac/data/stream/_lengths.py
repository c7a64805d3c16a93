"""Batches of rows of about one length."""

import zlib

import numpy as np


def length_multiples(longest: int, count: int) -> tuple[int, ...]:
    """At most ``count`` lengths, multiples of one that is a multiple of 8 where it can be."""
    unit = -(-longest // count)
    unit = -(-unit // 8) * 8
    return tuple(range(unit, longest + unit, unit))


def order_by_length(lengths: np.ndarray, seed: tuple[int, int], *, batch_size: int) -> np.ndarray:
    """Indices of batches of about one length, in a random order; those that fill none last."""
    whole = len(lengths) // batch_size * batch_size
    batches = np.argsort(lengths[:whole], kind="stable").reshape(-1, batch_size)
    order = group_generator(lengths, seed).permutation(batches).ravel()
    return np.concatenate([order, np.arange(whole, len(lengths))])


def group_generator(lengths: np.ndarray, seed: tuple[int, int]) -> np.random.Generator:
    """Another one for each group, although a group does not know its number."""
    return np.random.default_rng([*seed, zlib.crc32(lengths.tobytes())])
