"""Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkfac.data.readers._packages import pyarrow
from jaxkfac.data.readers._reader import Reader, RowPlace, damaged, register_reader

_ROWS = 512  # that are Python objects at one time


@register_reader
class Parquet(Reader):
    """A row group after the other; offsets count rows."""

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
        """From the file's footer."""
        with _opened(pyarrow("parquet"), path) as file:
            return file.metadata.num_rows


def _opened(parquet: Any, path: Path) -> Any:
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # OSError without a number and UnicodeDecodeError are among them
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
