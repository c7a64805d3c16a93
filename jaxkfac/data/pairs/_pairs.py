"""Pairs of texts: a source, and the target that is learnt."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkfac.data.readers import read_splits

PAIR_KEYS = (
    ("source", "target"),
    ("input", "output"),
    ("prompt", "completion"),
    ("document", "summary"),
    ("article", "highlights"),
    ("text", "summary"),
    ("question", "answer"),
)
"""Keys of a source and its target, as public data sets name them; the first that are there."""


class Pair(NamedTuple):
    """Two texts, neither of them empty."""

    source: str
    target: str


def parse_pair(plain: Any, *, source: str | None = None, target: str | None = None) -> Pair:
    """A pair from what JSON gives.

    Args:
        plain: An object with two strings. Other keys are ignored.
        source: Key of the source; ``None``: as in ``PAIR_KEYS``, beside ``target`` if that is
            given.
        target: Key of the target, likewise.

    Raises:
        ValueError: a key is not there, its value is no string, or a side is empty.

    Example:
        >>> parse_pair({"document": "It rains.", "summary": "Rain."})
        Pair(source='It rains.', target='Rain.')
    """
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object with keys, got {type(plain).__name__}")
    keys = _keys(plain, source, target)
    for side, key in zip(Pair._fields, keys, strict=True):
        if not isinstance(plain[key], str):
            raise ValueError(f"expected {key!r} to be a string, got {type(plain[key]).__name__}")
        if not plain[key].strip():
            raise ValueError(f"the {side} ({key!r}) is empty")
    return Pair(*(plain[key] for key in keys))


def read_pairs(
    path: Path | str, *, source: str | None = None, target: str | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and to validate with.

    Args:
        path: A file, all of it to train on; or a folder, in which
            :func:`jaxkfac.data.readers.find_files` says which files are for what.
        source: Key of the sources; see :func:`parse_pair`.
        target: Key of the targets.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or nothing to train on in it.
        ValueError: a row is no JSON or no pair, or has an empty side, named with file and number.
    """
    parse = functools.partial(parse_pair, source=source, target=target)
    return read_splits(path, parse)


def _keys(plain: dict[str, Any], source: str | None, target: str | None) -> Sequence[str]:
    fitting = [
        (source or ours, target or theirs)
        for ours, theirs in PAIR_KEYS
        if (source or ours) in plain and (target or theirs) in plain
    ]
    if fitting:
        return fitting[0]
    known = ", ".join(f"{ours!r} and {theirs!r}" for ours, theirs in PAIR_KEYS)
    wanted = known if source is None and target is None else f"{source!r} and {target!r}"
    raise ValueError(f"expected the keys {wanted}; got {sorted(plain)}; name others as options")
