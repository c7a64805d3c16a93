"""What was compiled for one objective, kept as long as the objective itself."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Program = TypeVar("Program")

MOST = 64  # kinds of programs of one objective; each has its own shapes in jax.jit


class KeptPrograms:
    """Programs by what they depend on beside shapes, the most recently used ``MOST`` of them.

    An objective holds its programs, and no table of this module does: where the objective goes,
    they go, with whatever its function closed over. So they must close over no array of a call.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """The program of this key; made where there is none yet."""
        if key not in self._kept:
            self._kept[key] = make()
        self._kept.move_to_end(key)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
        return self._kept[key]
