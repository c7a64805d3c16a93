"""Bytes of one pass of an analysis: of its program, its factors and their sums."""

from typing import NamedTuple

import numpy as np

from jaxkfac.factors import PLAIN_TERMS, Pass
from jaxkfac.memory import bytes_text


class PassBytes(NamedTuple):
    """What one pass holds at once, beside the model.

    Attributes:
        temporaries: Of its program, with its batch.
        factors: That the program returns.
        sums: In main memory, triangles folded.
    """

    temporaries: int
    factors: int
    sums: int

    @property
    def total(self) -> int:
        return sum(self)


def check_room(found: PassBytes, room: int, held: int) -> None:
    """Refuse a room that the least budget does not fit into."""
    if found.total > room:
        raise ValueError(
            f"--device-bytes {bytes_text(room + held)}: the smallest with which this analysis "
            f"can do is {bytes_text(found.total + held)}: {bytes_text(held)} for the model "
            f"and this process, {bytes_text(found.temporaries)} for activations and "
            f"temporaries, {bytes_text(found.factors + found.sums)} for factors; a "
            "smaller --batch-size, --max-length or --max-dense needs less"
        )


def sums_dtype(batches: int) -> np.dtype:
    """That of sums of so many batches; of very many a float32 would lose digits."""
    return np.dtype(np.float64 if batches > PLAIN_TERMS else np.float32)


def sums_bytes(factors: int, batches: int = 1) -> int:
    """Of what a pass returns, triangles folded; one block is folded before its array is let go."""
    return factors // 2 * sums_dtype(batches).itemsize // 4 + factors // 16


def with_sums(one: Pass, batches: int = 1) -> int:
    """Of the factors of a pass and their sums, as it was planned."""
    return one.nbytes + sums_bytes(one.results, batches)
