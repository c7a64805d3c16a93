"""Sizes as people write them: 80GB, 74.5GiB, 80e9."""

import math
import re
from typing import SupportsIndex

ByteSize = int | float | str | SupportsIndex

_SIZE = re.compile(r"\s*([+-]?[\d_.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("kmgtp", start=1)}
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{letter}b": 1000**power for letter, power in _POWERS.items()}
_UNITS |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}

ACCEPTED = 'a positive number of bytes, as 80e9, or a size with a unit, as "80GB" or "74.5GiB"'


def parse_bytes(size: ByteSize, *, name: str = "size") -> int:
    """The bytes of a size as a person writes it.

    Every argument of this library that asks for bytes takes what this function takes.

    Args:
        size: A number of bytes, or a string of a number and a unit: ``B``, ``kB``, ``MB``,
            ``GB``, ``TB``, ``PB`` are powers of 1000; ``KiB``, ``MiB``, ``GiB``, ``TiB``,
            ``PiB`` powers of 1024. Case and spaces do not matter.
        name: Of the argument, for the error.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ValueError: no such unit, or not at least one byte; what is accepted is said.

    Example:
        >>> import jaxkfac as jk
        >>> [jk.memory.parse_bytes(size) for size in ("80GB", "74.5 gib", 8e9)]
        [80000000000, 79993765888, 8000000000]
    """
    number, unit = size, 1
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        if found is None or found[2].lower() not in _UNITS:
            raise ValueError(f"{name}={size!r}: expected {ACCEPTED}")
        number, unit = found[1], _UNITS[found[2].lower()]
    try:
        # Whole numbers stay exact: a float has no room for every count of bytes.
        exact = number if isinstance(number, SupportsIndex) else float(number)
        nbytes = exact.__index__() * unit if isinstance(exact, SupportsIndex) else exact * unit
    except (TypeError, ValueError):
        raise ValueError(f"{name}={size!r}: expected {ACCEPTED}") from None
    if isinstance(size, bool) or not math.isfinite(nbytes) or nbytes < 1:
        raise ValueError(f"{name}={size!r}: expected {ACCEPTED}")
    return int(nbytes)
