"""JSON Lines, plain or compressed."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkfac.data.readers._packages import pyarrow
from jaxkfac.data.readers._reader import (
    TOO_DEEP,
    BadRow,
    Reader,
    RowPlace,
    damaged,
    is_too_deep,
    register_reader,
)

_CHUNK = 1 << 20  # bytes


@register_reader
class JsonLines(Reader):
    """One JSON object a line, UTF-8; empty lines are no rows.

    Offsets count bytes of the text. Compressed text is read from the start to get to one.
    """

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
    unit = "line"

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        offset, number = place
        try:
            with opened(path) as file:
                _skip(file, offset)
                # Lines end with a line feed: a string may hold others that Python splits at.
                for line in file:
                    offset, number = offset + len(line), number + 1
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield RowPlace(offset, number), _row(line)
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(path, f" behind line {number}", error) from error

    def count(self, path: Path) -> int:
        """Lines that are not empty, unparsed."""
        try:
            with opened(path) as file:
                return sum(1 for line in file if not line.isspace())
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(path, "", error) from error


def opened(path: Path) -> io.BufferedReader:
    """The bytes of a text, unpacked as its name says."""
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
        if b"\\u" in line:  # half of a pair of surrogates is JSON, and no text
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        return TOO_DEEP if is_too_deep(row) else row
    except UnicodeError as error:
        return BadRow(f"not UTF-8 ({error})")
    except json.JSONDecodeError as error:
        return BadRow(
            f"not JSON ({error.msg} at column {error.colno}); expected one whole object on each "
            "line"
        )
    except ValueError as error:  # a number of thousands of digits
        return BadRow(f"not JSON that can be read ({error})")
    except RecursionError:
        return TOO_DEEP
