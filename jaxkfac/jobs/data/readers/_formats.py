"""The file formats: JSON Lines, one JSON array, Parquet and Arrow."""

import codecs
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkfac._errors import installed_by
from jaxkfac.jobs.data.readers._reader import (
    DEEPEST,
    TOO_DEEP,
    BadRow,
    Reader,
    RowPlace,
    damaged,
    is_too_deep,
    register_reader,
)

# ---------------- packages that only some formats need


def pyarrow(module: str) -> Any:
    """``pyarrow`` or one of its modules, or an error that says how to install it."""
    return data_package(f"pyarrow.{module}" if module else "pyarrow")


def data_package(name: str) -> Any:
    """A package of the extra ``data``.

    Raises:
        ModuleNotFoundError: the package is not installed; says how to install it.
    """
    with installed_by("data"):
        return importlib.import_module(name)


# ---------------- JSON Lines, plain or compressed


_CHUNK = 1 << 20  # bytes


@register_reader
class JsonLines(Reader):
    """One JSON object per line, UTF-8; empty lines are ignored.

    Offsets are bytes of the uncompressed text. Compressed text is read from the start to reach
    an offset.
    """

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
    unit = "line"

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        offset, number = place
        try:
            with opened(path) as file:
                _skip(file, offset)
                # Lines end with a line feed: strings may contain others that Python splits at.
                for line in file:
                    offset, number = offset + len(line), number + 1
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield RowPlace(offset, number), _row(line)
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(path, f" behind line {number}", error) from error

    def count(self, path: Path) -> int:
        """Number of lines that are not empty, without parsing them."""
        try:
            with opened(path) as file:
                return sum(1 for line in file if not line.isspace())
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(path, "", error) from error


def opened(path: Path) -> io.BufferedReader:
    """The bytes of a text, decompressed according to its name."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path), _CHUNK)
    if name.endswith(".zst"):
        raw = pyarrow("").input_stream(str(path), compression="zstd")
        return io.BufferedReader(raw, _CHUNK)
    return io.BufferedReader(io.FileIO(path), _CHUNK)


def _skip(file: io.BufferedIOBase, offset: int) -> None:
    if file.seekable():
        file.seek(offset)
        return
    while offset and (read := len(file.read(min(offset, _CHUNK)))):
        offset -= read


def _row(line: bytes) -> Any:
    try:
        row = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # a single surrogate is valid JSON, but not valid text
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        return TOO_DEEP if is_too_deep(row) else row
    except UnicodeError as error:
        return BadRow(f"not UTF-8 ({error})")
    except json.JSONDecodeError as error:
        return BadRow(
            f"not JSON ({error.msg} at column {error.colno}); expected one whole object on each "
            "line"
        )
    except ValueError as error:  # a number with thousands of digits
        return BadRow(f"not JSON that can be read ({error})")
    except RecursionError:
        return TOO_DEEP


# ---------------- one JSON array of objects, a common format of data sets


_BEGIN = 1 << 12  # bytes; assumed to contain more than white space


@register_reader
class JsonArray(Reader):
    """An array, read element by element; offsets count elements.

    Files with these names that contain lines are read as :class:`JsonLines`.
    """

    suffixes = (".json", ".json.gz", ".json.zst")

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        return self._elements(path, place) if _is_array(path) else JsonLines().read(path, place)

    def count(self, path: Path) -> int:
        """Number of elements, each of which is parsed; for lines see :class:`JsonLines`."""
        return super().count(path) if _is_array(path) else JsonLines().count(path)

    def _elements(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        ijson, number = data_package("ijson"), 0
        try:
            with opened(path) as file:
                if file.peek(3).startswith(codecs.BOM_UTF8):
                    file.read(3)
                text = _Shallow(file)
                for number, row in enumerate(ijson.items(text, "item", use_float=True), 1):
                    if number > place.offset:
                        yield RowPlace(number, number), _unmarked(row) if text.has_marks else row
        except Exception as error:  # an integer with thousands of digits is a plain ValueError
            raise damaged(path, f" behind element {number}", error) from error


class _Shallow:
    """A JSON text that stops with an error if it is deeply nested.

    The package stores a path for every level, whose lengths add up: 100,000 levels in a file of
    200 kB took 19 GB. It also refuses ``NaN``, ``Infinity`` and numbers beyond float64, which
    Python's ``json`` writes and reads, as lines are read. They become strings with a mark here,
    and numbers again in :func:`_unmarked`.

    Attributes:
        has_marks: Whether there was such a number.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._depth, self._open, self._word = file, 0, b"", b""
        self.has_marks = False

    def read(self, size: int = -1) -> bytes:
        """Read like a file.

        Raises:
            ValueError: the text is nested too deeply.
        """
        while True:
            chunk = self._file.read(size)
            text = self._next(chunk)
            if text or not chunk:  # an empty text would be the end of the file
                return text

    def _next(self, chunk: bytes) -> bytes:
        """The chunk, behind the word that the last one ended in, and without its own."""
        opened, text = self._open, self._open + self._word + chunk
        self._open = self._word = b""
        self._count_levels(text)
        if chunk and not self._open and (word := _LAST_WORD.search(text)):
            self._word, text = word[0], text[: word.start()]
        if _BEYOND.search(text):
            text = _STRING_OR_BEYOND.sub(self._with_mark, text)
        return text[len(opened) :]

    def _with_mark(self, match: re.Match[bytes]) -> bytes:
        if match["beyond"] is None:
            return match[0]
        self.has_marks = True
        return b'"%s%s"' % (_MARK.encode(), match[0])

    def _count_levels(self, text: bytes) -> None:
        levels = np.frombuffer(_STRING.sub(self._without, text), np.uint8)
        steps = np.isin(levels, _OPEN).astype(np.int64) - np.isin(levels, _CLOSE)
        depths = self._depth + np.cumsum(steps)
        if depths.max(initial=0) > DEEPEST + 1:  # the array itself is one level
            raise ValueError(TOO_DEEP.reason)
        self._depth = int(depths[-1]) if len(depths) else self._depth

    def _without(self, match: re.Match[bytes]) -> bytes:
        if not match["end"]:  # continues in the next chunk, maybe after half of an escape
            self._open = b'"' + (match["escape"] or b"")
        return b""


_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*(?:(?P<end>")|(?P<escape>\\)?\Z)', re.DOTALL)
_OPEN, _CLOSE = np.frombuffer(b"[{", np.uint8), np.frombuffer(b"]}", np.uint8)
_MARK = "\ufdd2"  # a Unicode noncharacter, which no text contains
_BEYOND = re.compile(rb"NaN|-?Infinity|-?\d[\d.]*[eE]\+?\d{3,}")
_STRING_OR_BEYOND = re.compile(
    rb'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)|(?P<beyond>' + _BEYOND.pattern + rb")", re.DOTALL
)
_LAST_WORD = re.compile(rb"(?<![-+.\w])[-+.\w]{1,64}\Z")  # may go on in the next chunk


def _unmarked(value: Any) -> Any:
    """Numbers in place of the strings that stand for them."""
    if isinstance(value, str):
        return float(value[1:]) if value.startswith(_MARK) else value
    if isinstance(value, dict):
        return {key: _unmarked(inner) for key, inner in value.items()}
    return [_unmarked(inner) for inner in value] if isinstance(value, list) else value


def _is_array(path: Path) -> bool:
    try:
        with opened(path) as file:
            return file.read(_BEGIN).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, "", error) from error


# ---------------- Parquet


_ROWS = 512  # number of rows that are Python objects at a time


@register_reader
class Parquet(Reader):
    """Parquet, read by row groups; offsets count rows."""

    suffixes = (".parquet",)

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        parquet, start, before = pyarrow("parquet"), place.offset, 0
        with _opened(parquet, path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if before + rows > start:
                    yield from _group(path, file, group, before, start)
                before += rows

    def count(self, path: Path) -> int:
        """Number of rows, from the footer of the file."""
        with _opened(pyarrow("parquet"), path) as file:
            return file.metadata.num_rows


def _opened(parquet: Any, path: Path) -> Any:
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # for example OSError without errno, or UnicodeDecodeError
        raise damaged(path, "", error) from error


def _group(
    path: Path, file: Any, group: int, before: int, start: int
) -> Iterator[tuple[RowPlace, Any]]:
    number = before
    try:
        for batch in file.iter_batches(_ROWS, row_groups=[group]):
            batch.validate(full=True)
            skipped = min(max(start - number, 0), len(batch))
            number += skipped
            for row in batch.slice(skipped).to_pylist():
                number += 1
                yield RowPlace(number, number), row
    except Exception as error:
        raise damaged(path, f" behind row {number}", error) from error


# ---------------- Arrow, as written by the datasets library and Feather


class _FirstFeatherError(Exception):
    pass


@register_reader
class Arrow(Reader):
    """Record batches of a stream or a file, from mapped memory; offsets count rows."""

    suffixes = (".arrow", ".feather")

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        number = 0
        for batch in _batches(path):
            skipped = min(max(place.offset - number, 0), len(batch))
            number += skipped
            for start in range(skipped, len(batch), _ROWS):
                for row in _values(path, batch.slice(start, _ROWS), number):
                    number += 1
                    yield RowPlace(number, number), row

    def count(self, path: Path) -> int:
        """The sum over record batches, without reading values."""
        return sum(len(batch) for batch in _batches(path, values=False))


def _values(path: Path, batch: Any, number: int) -> list[Any]:
    try:
        return batch.to_pylist()
    except Exception as error:
        raise damaged(path, f" behind row {number}", error) from error


def _batches(path: Path, *, values: bool = True) -> Iterator[Any]:
    """Record batches, each validated before it is used.

    Arrow trusts the offsets in a file: a single changed bit can end the process with SIGBUS.
    """
    package, ipc, read = pyarrow(""), pyarrow("ipc"), 0
    try:
        with package.memory_map(str(path)) as mapped:
            begin = mapped.read(6)
            if begin.startswith(b"FEA1"):
                raise _FirstFeatherError
            if begin == b"ARROW1":
                with ipc.open_file(mapped) as file:
                    for number in range(file.num_record_batches):
                        batch = file.get_batch(number)
                        batch.validate(full=values)
                        yield batch
                        read += len(batch)
                return
            mapped.seek(0)
            with ipc.open_stream(mapped) as stream:
                for batch in stream:
                    batch.validate(full=values)
                    yield batch
                    read += len(batch)
    except _FirstFeatherError:
        raise ValueError(
            f"{path} has the first version of Feather, which has no record batches: "
            "write it again with pyarrow.feather.write_feather(table, path)"
        ) from None
    except Exception as error:  # for example UnicodeDecodeError or SystemError
        raise damaged(path, f" behind row {read}", error) from error
