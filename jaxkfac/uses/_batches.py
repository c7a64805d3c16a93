"""One batch, or a stream of them."""

from collections.abc import Iterable, Iterator
from typing import Any


def batches_of(train: Any) -> Iterator[Any]:
    """A tuple is one batch; any other iterable is read once.

    Raises:
        TypeError: neither.
        ValueError: there is no batch.
    """
    if isinstance(train, tuple):
        yield train
        return
    if not isinstance(train, Iterable) or isinstance(train, str | dict) or hasattr(train, "shape"):
        raise TypeError(
            "train: expected (inputs, targets), (inputs, targets, mask), or an iterable of such "
            f"tuples, got {type(train).__name__}"
        )
    empty = True
    for batch in train:
        empty = False
        yield batch
    if empty:
        raise ValueError("train: the iterable is empty, there are no examples")
