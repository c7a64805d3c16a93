"""Rows of several files in sequence, and the position of the next one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from jaxkfac.files import checksum_of
from jaxkfac.jobs.data.readers._reader import (
    BadRow,
    Reader,
    RowPlace,
    check_file,
    find_files,
    reader_of,
)

_Parsed = TypeVar("_Parsed")
_HOPELESS = 1000  # give up after this many bad rows
_BLOCK = 1 << 20  # bytes
_BLOCKS, _ALL_BLOCKS = 64, 1024  # number of blocks in a checksum: per file, in total


class FilePlace(NamedTuple):
    """Position among files where the next row starts.

    Attributes:
        file: Index of the file.
        offset: Offset in the file; see :class:`RowPlace`.
        number: Number of lines or rows before it.
    """

    file: int = 0
    offset: int = 0
    number: int = 0


_BEGINNING = FilePlace()


class Bad(NamedTuple):
    """A row that was skipped.

    Attributes:
        where: File and row number, from 1.
        reason: Description of the error.
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class FileRows(Generic[_Parsed]):
    """The rows of files, parsed as they are read and not kept in memory.

    Attributes:
        files: Files with known formats.
        parse: Converts JSON values; raises ``ValueError`` for an invalid row.
        strict: Whether a bad row raises an error; otherwise it is yielded as :class:`Bad`.
    """

    files: tuple[Path, ...]
    parse: Callable[[Any], _Parsed]
    strict: bool = True

    def __post_init__(self) -> None:
        for file in self.files:
            check_file(file)

    def read(
        self, place: FilePlace = _BEGINNING, order: Sequence[int] | None = None
    ) -> Iterator[tuple[FilePlace, _Parsed | Bad]]:
        """Rows from ``place`` on, each with the place after it.

        Args:
            place: Place of the first row.
            order: Order of the files, as indices; ``place.file`` is an index in it.

        Raises:
            ValueError: a file is damaged, or with ``strict`` a row is bad; names its number.
        """
        order = range(len(self.files)) if order is None else order
        for index in range(place.file, len(order)):
            path = self.files[order[index]]
            start = RowPlace(place.offset, place.number) if index == place.file else RowPlace()
            for (offset, number), row in _reader(path).read(path, start):
                behind = FilePlace(index, offset, number)
                yield behind, self._parsed(row, self.where(behind, order))

    def peek(self, count: int = 1) -> list[_Parsed]:
        """The first good rows, at most ``count``.

        Raises:
            ValueError: there is none, or none among the first thousand; describes the first bad
                row.
        """
        good: list[_Parsed] = []
        bad: list[Bad] = []
        for _, row in self.read():
            if isinstance(row, Bad):
                bad.append(row)
            else:
                good.append(row)
            if len(good) == count or len(bad) + len(good) >= max(count, _HOPELESS):
                break
        if not good:
            files = ", ".join(map(str, self.files))
            raise ValueError(
                f"none of the first {len(bad)} rows can be used: {bad[0]}"
                if bad
                else f"{files} holds no row"
            )
        return good

    def where(self, place: FilePlace, order: Sequence[int] | None = None) -> str:
        """File and number of the row before ``place``."""
        index = place.file if order is None else order[place.file]
        return f"{self.files[index]}:{place.number}"

    def count(self) -> int:
        """Number of rows, including bad ones; lines are counted without parsing."""
        return sum(_reader(path).count(path) for path in self.files)

    def checksum(self) -> str:
        """CRC-32 of names, sizes and contents; of large files up to 64 MiB each, 1 GiB in total."""
        return checksum_of(part for path in self.files for part in self._blocks(path))

    def _blocks(self, path: Path) -> Iterator[bytes]:
        blocks, size = max(2, min(_BLOCKS, _ALL_BLOCKS // len(self.files))), path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as file:
            for block in range(blocks):
                file.seek(max(block * _BLOCK, block * (size - _BLOCK) // (blocks - 1)))
                yield file.read(_BLOCK)

    @property
    def nbytes(self) -> int:
        """Size of all files on disk."""
        return sum(path.stat().st_size for path in self.files)

    def _parsed(self, row: Any, where: str) -> _Parsed | Bad:
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.reason)
            return self.parse(row)
        except ValueError as error:
            if self.strict:
                raise ValueError(f"{where}: {error}") from error
            return Bad(where, str(error))


def read_rows(path: Path | str, parse: Callable[[Any], _Parsed]) -> list[_Parsed]:
    """Read all rows of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is invalid (names file and number), there is no row, or the file is
            damaged or has an unknown format.
    """
    rows = FileRows((Path(path),), parse)
    parsed = [row for _, row in rows.read() if not isinstance(row, Bad)]
    if not parsed:
        raise ValueError(f"{path} holds no {_reader(Path(path)).unit}")
    return parsed


def read_splits(
    path: Path | str, parse: Callable[[Any], _Parsed]
) -> tuple[list[_Parsed], list[_Parsed]]:
    """Read all rows for training and for validation.

    Args:
        path: A file, or a folder as for :func:`find_files`.
        parse: See :class:`FileRows`.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it.
        ValueError: see :func:`read_rows`.
    """
    train, validation = find_files(path)
    read = [[row for file in files for row in read_rows(file, parse)]
            for files in (train, validation)]  # fmt: skip
    return read[0], read[1]


def _reader(path: Path) -> Reader:
    reader = reader_of(path)
    assert reader is not None  # files are checked in the constructor
    return reader
