"""Arrow, as the datasets library and Feather write it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkfac.data.readers._packages import pyarrow
from jaxkfac.data.readers._reader import Reader, RowPlace, damaged, register_reader

_ROWS = 512  # that are Python objects at one time


class _FirstFeatherError(Exception):
    pass


@register_reader
class Arrow(Reader):
    """Record batches of a stream or of a file, from mapped memory; offsets count rows."""

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
        """The sum over record batches, of which no values are read."""
        return sum(len(batch) for batch in _batches(path, values=False))


def _values(path: Path, batch: Any, number: int) -> list[Any]:
    try:
        return batch.to_pylist()
    except Exception as error:
        raise damaged(path, f" behind row {number}", error) from error


def _batches(path: Path, *, values: bool = True) -> Iterator[Any]:
    """Record batches, each checked before it is used.

    Arrow trusts the offsets of a file: one changed bit in them ends the process, by SIGBUS.
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
            f"{path} is of the first version of Feather, which has no record batches: "
            "write it again with pyarrow.feather.write_feather(table, path)"
        ) from None
    except Exception as error:  # UnicodeDecodeError and SystemError are among them
        raise damaged(path, f" behind row {read}", error) from error
