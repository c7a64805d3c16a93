"""Rows of files in several formats, from any place in them; a new format is one class here."""

from jaxkfac.jobs.data.readers._formats import Arrow, JsonArray, JsonLines, Parquet, data_package
from jaxkfac.jobs.data.readers._reader import (
    BadRow,
    FileSplits,
    Reader,
    RowPlace,
    find_files,
    known_suffixes,
    register_reader,
)
from jaxkfac.jobs.data.readers._rows import Bad, FilePlace, FileRows, read_rows, read_splits

__all__ = [
    "Arrow",
    "Bad",
    "BadRow",
    "FilePlace",
    "FileRows",
    "FileSplits",
    "JsonArray",
    "JsonLines",
    "Parquet",
    "Reader",
    "RowPlace",
    "data_package",
    "find_files",
    "known_suffixes",
    "read_rows",
    "read_splits",
    "register_reader",
]
