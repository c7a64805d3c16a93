"""Files that are written whole or not at all, and checked when they are read."""

from jaxkfac.files._archive import Archive, write_archive
from jaxkfac.files._whole import PARTIAL, whole_file, write_text, write_together

__all__ = ["PARTIAL", "Archive", "whole_file", "write_archive", "write_text", "write_together"]
