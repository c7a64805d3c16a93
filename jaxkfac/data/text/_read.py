"""Records from files."""

from pathlib import Path

from jaxkfac.data.readers import FileRows, find_files, read_rows, read_splits
from jaxkfac.data.text._records import Record
from jaxkfac.data.text.formats import parse_record


def read_records(path: Path | str) -> list[Record]:
    """The records of one file, in its order.

    Args:
        path: A file of rows that :func:`parse_record` knows; see :mod:`jaxkfac.data.readers` for
            its formats. Empty lines are passed over.

    Returns:
        At least one record.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is no JSON, no UTF-8 or no record, named with file and number; there
            is no record at all; or the file is damaged or of an unknown format.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.jsonl")
        ...     _ = path.write_text('{"text": "Fe is iron"}')
        ...     read_records(path)
        [Completion(prompt='', completion='Fe is iron')]
    """
    return read_rows(path, parse_record)


def record_files(path: Path | str, *, strict: bool = False) -> tuple[FileRows, FileRows | None]:
    """Records to train on and to validate with, to be read as they are needed.

    Args:
        path: A file or a folder; :func:`jaxkfac.data.readers.find_files` says which files of a
            folder are for what.
        strict: Whether a bad row is an error.

    Returns:
        ``(train, validation)``; the second may be ``None``.

    Raises:
        FileNotFoundError: there is no such path, or nothing to train on in it.
        ValueError: a file of an unknown format.
    """
    train, validation = find_files(path)
    held = FileRows(validation, parse_record, strict) if validation else None
    return FileRows(train, parse_record, strict), held


def read_folder(path: Path | str) -> tuple[list[Record], list[Record]]:
    """All records to train on and to validate with.

    Args:
        path: As in :func:`record_files`.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or nothing to train on in it; what the folder
            holds is said.
        ValueError: as in :func:`read_records`.
    """
    return read_splits(path, parse_record)
