"""What a file format is asked for, and the formats by their suffix."""

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RowPlace(NamedTuple):
    """Where in a file the next row begins.

    Attributes:
        offset: As the format counts: bytes of text, or rows.
        number: Lines or rows before it.
    """

    offset: int = 0
    number: int = 0


class BadRow(NamedTuple):
    """A row that is none.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


class Reader(abc.ABC):
    """A file format; one of these for each, in a file of its own.

    Attributes:
        suffixes: Of file names, in small letters, such as ``(".jsonl", ".jsonl.gz")``.
        unit: What its rows are called in messages.
    """

    suffixes: ClassVar[tuple[str, ...]]
    unit: ClassVar[str] = "row"

    @abc.abstractmethod
    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on, each with the place behind it, holding few of them at a time.

        Args:
            path: The file.
            place: Of the first row; ``RowPlace()`` is the beginning.

        Returns:
            ``(place, row)``: what JSON would give for the row, or a :class:`BadRow`.

        Raises:
            ValueError: the file is damaged, or not of this format.
        """

    def count(self, path: Path) -> int:
        """How many rows the file has, bad ones with them."""
        return sum(1 for _ in self.read(path, RowPlace()))


DEEPEST = 100  # lists and objects of JSON in one another


def damaged(path: Path, where: str, error: Exception) -> Exception:
    """What to raise where a file cannot be read on: one sentence with the file and the place.

    Args:
        path: The file.
        where: Words such as ``" behind row 3"``.
        error: Of whatever kind the package that reads it has raised.
    """
    if isinstance(error, OSError) and error.errno is not None:  # of the system, with the file
        return error
    (what, *_) = str(error).splitlines() or [type(error).__name__]
    return ValueError(f"{path} is damaged or cut short{where} ({what}): get it again")


def is_too_deep(row: Any, limit: int = DEEPEST) -> bool:
    """Whether lists and dictionaries are nested deeper, so that what looks into them may fail."""
    level = [row]
    for _ in range(limit):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


TOO_DEEP = BadRow("JSON that is nested too deeply")


_READERS: dict[str, Reader] = {}


def register_reader(reader: type[Reader]) -> type[Reader]:
    """Make a format known by its suffixes; to be used as a decorator."""
    found = reader()
    _READERS.update(dict.fromkeys(reader.suffixes, found))
    return reader


def known_suffixes() -> tuple[str, ...]:
    """Suffixes of all formats."""
    return tuple(_READERS)


def reader_of(path: Path) -> Reader | None:
    """The format of a file by its name, or ``None``."""
    name = path.name.lower()
    return next((r for suffix, r in _READERS.items() if name.endswith(suffix)), None)
