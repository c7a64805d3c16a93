"""Rows of files of several formats, from any place in them; a new format is one file here."""

from jaxkfac.data.readers._arrow import Arrow
from jaxkfac.data.readers._json_array import JsonArray
from jaxkfac.data.readers._json_lines import JsonLines
from jaxkfac.data.readers._packages import data_package
from jaxkfac.data.readers._parquet import Parquet
from jaxkfac.data.readers._reader import (
    BadRow,
    Reader,
    RowPlace,
    known_suffixes,
    register_reader,
)
from jaxkfac.data.readers._rows import Bad, FilePlace, FileRows, read_rows, read_splits
from jaxkfac.data.readers._splits import FileSplits, find_files

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
