"""Files that are written atomically, and verified when they are read."""

from jaxkfac.files._archive import Archive, write_archive
from jaxkfac.files._whole import (
    PARTIAL,
    ZEROS,
    check_sha256,
    checksum,
    checksum_of,
    is_sealed,
    probe_folder,
    read_json,
    sealed,
    whole_file,
    write_json,
    write_text,
    write_together,
)

__all__ = [
    "PARTIAL",
    "ZEROS",
    "Archive",
    "check_sha256",
    "checksum",
    "checksum_of",
    "is_sealed",
    "probe_folder",
    "read_json",
    "sealed",
    "whole_file",
    "write_archive",
    "write_json",
    "write_text",
    "write_together",
]
