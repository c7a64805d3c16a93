"""One JSON array of objects, as many data sets are handed on."""

import codecs
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkfac.data.readers._json_lines import JsonLines, opened
from jaxkfac.data.readers._packages import data_package
from jaxkfac.data.readers._reader import (
    DEEPEST,
    TOO_DEEP,
    Reader,
    RowPlace,
    damaged,
    register_reader,
)

_BEGIN = 1 << 12  # bytes, in which there is more than white space


@register_reader
class JsonArray(Reader):
    """An array, an element at a time; offsets count elements.

    Files of this name that hold lines are read as :class:`JsonLines`.
    """

    suffixes = (".json", ".json.gz", ".json.zst")

    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on; see :class:`Reader`."""
        return self._elements(path, place) if _is_array(path) else JsonLines().read(path, place)

    def count(self, path: Path) -> int:
        """The elements, each parsed; lines are not."""
        return super().count(path) if _is_array(path) else JsonLines().count(path)

    def _elements(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        ijson, number = data_package("ijson"), 0
        try:
            with opened(path) as file:
                if file.peek(3).startswith(codecs.BOM_UTF8):
                    file.read(3)
                for number, row in enumerate(
                    ijson.items(_Shallow(file), "item", use_float=True), 1
                ):
                    if number > place.offset:
                        yield RowPlace(number, number), row
        except Exception as error:  # an integer of thousands of digits is a bare ValueError
            raise damaged(path, f" behind element {number}", error) from error


class _Shallow:
    """A text of JSON, read on as long as it is not nested deeply.

    The package keeps a path for every level, whose lengths add up: 100,000 levels of a file of
    200 kB took 19 GB.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._depth, self._open = file, 0, b""

    def read(self, size: int = -1) -> bytes:
        """As of a file.

        Raises:
            ValueError: it is nested too deeply.
        """
        chunk = self._file.read(size)
        text = self._open + chunk
        self._open = b""
        levels = np.frombuffer(_STRING.sub(self._without, text), np.uint8)
        steps = np.isin(levels, _OPEN).astype(np.int64) - np.isin(levels, _CLOSE)
        depths = self._depth + np.cumsum(steps)
        if depths.max(initial=0) > DEEPEST + 1:  # the array is one
            raise ValueError(TOO_DEEP.reason)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        return chunk

    def _without(self, match: re.Match[bytes]) -> bytes:
        if not match["end"]:  # goes on in the next chunk, perhaps behind half of an escape
            self._open = b'"' + (match["escape"] or b"")
        return b""


_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*(?:(?P<end>")|(?P<escape>\\)?\Z)', re.DOTALL)
_OPEN, _CLOSE = np.frombuffer(b"[{", np.uint8), np.frombuffer(b"]}", np.uint8)


def _is_array(path: Path) -> bool:
    try:
        with opened(path) as file:
            return file.read(_BEGIN).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, "", error) from error
