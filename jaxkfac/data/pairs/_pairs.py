"""Pairs of texts: a source, and the target that is learnt."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkfac.data.readers import FileRows, find_files, read_splits

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
        plain: An object with two strings. Other keys are ignored, but where no keys are given
            what is asked is part of the source: Alpaca's ``instruction`` before its ``input``,
            and the ``context`` of a question, as T5 was given it.
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
    if source is None and target is None:
        plain = _with_task(plain)
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


def pair_files(
    path: Path | str,
    *,
    source: str | None = None,
    target: str | None = None,
    prefix: str = "",
    strict: bool = False,
) -> tuple[FileRows[Pair], FileRows[Pair] | None]:
    """Pairs to train on and to validate with, to be read as they are needed.

    Args:
        path: As in :func:`read_pairs`.
        source: Key of the sources; see :func:`parse_pair`.
        target: Key of the targets.
        prefix: What stands before each source, such as ``"summarize: "``.
        strict: Whether a bad row is an error.

    Returns:
        ``(train, validation)``; the second may be ``None``.

    Raises:
        FileNotFoundError: there is no such path, or nothing to train on in it.
        ValueError: a file of an unknown format.
    """

    def parse(plain: Any) -> Pair:
        pair = parse_pair(plain, source=source, target=target)
        return pair._replace(source=prefix + pair.source)

    train, validation = find_files(path)
    held = FileRows(validation, parse, strict) if validation else None
    return FileRows(train, parse, strict), held


def _with_task(plain: dict[str, Any]) -> dict[str, Any]:
    """Rows whose source is in two columns."""
    texts = {key: value for key, value in plain.items() if isinstance(value, str)}
    if "instruction" in texts and "output" in texts:
        parts = texts["instruction"], texts.get("input", "")
        return plain | {"input": "\n".join(part for part in parts if part)}
    if {"question", "context", "answer"} <= texts.keys():
        asked = f"question: {texts['question']} context: {texts['context']}"
        return plain | {"question": asked}
    return plain


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
