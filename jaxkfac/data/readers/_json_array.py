"""One JSON array of objects, as many data sets are handed on."""

import codecs
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkfac.data.readers._json_lines import JsonLines, explained, opened
from jaxkfac.data.readers._packages import data_package
from jaxkfac.data.readers._reader import Reader, RowPlace, register_reader

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
                for number, row in enumerate(ijson.items(file, "item", use_float=True), start=1):
                    if number > place.offset:
                        yield RowPlace(number, number), row
        except (ijson.JSONError, EOFError, OSError, UnicodeError, zlib.error) as error:
            raise explained(path, f" behind element {number}", error) from error


def _is_array(path: Path) -> bool:
    try:
        with opened(path) as file:
            return file.read(_BEGIN).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except (EOFError, OSError, zlib.error) as error:
        raise explained(path, "", error) from error
