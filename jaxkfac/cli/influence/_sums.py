"""Sums over batches that are right to 1e-5, however many batches there are."""

from typing import Any

import jax
import numpy as np

from jaxkfac.factors import PLAIN_TERMS, Factors, LongSum


class HostSum:
    """A sum of arrays in host memory; ``sum + new`` adds to it in place.

    Args:
        first: Its first term.
        wide: Whether it is kept in float64.
    """

    def __init__(self, first: Any, *, wide: bool) -> None:
        self._sum = jax.tree.map(lambda x: np.array(x, np.float64 if wide else x.dtype), first)
        self._dtypes = jax.tree.map(lambda x: x.dtype, first)

    def __add__(self, new: Any) -> "HostSum":
        jax.tree.map(lambda total, x: np.add(total, x, out=total), self._sum, new)
        return self

    @property
    def total(self) -> Any:
        """In the dtypes of its terms."""
        return jax.tree.map(lambda x, dtype: x.astype(dtype, copy=False), self._sum, self._dtypes)


def summed_from(first: Factors, number: int, *, on_host: bool) -> Factors | LongSum | HostSum:
    """What further factors are added to.

    Args:
        first: Of the first batch.
        number: How many batches there are. Up to 256 a plain sum keeps its digits, and takes half
            of the bytes.
        on_host: Whether factors are NumPy arrays.
    """
    if on_host:
        return HostSum(first, wide=number > PLAIN_TERMS)
    return first if number <= PLAIN_TERMS else LongSum.zeros(first) + first


def total_of(summed: Any) -> Factors:
    """The sum."""
    return summed if isinstance(summed, Factors) else summed.total
