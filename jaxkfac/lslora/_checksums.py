"""Checksums of the two files of an adapter, which neither JSON nor safetensors has.

``adapter_config.json`` holds one of each file, its own taken with zeros in its place. It is written
last, so that files of two different saves do not pass for one adapter. Those of single tensors, in
the header of the other file, say which of them is damaged.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkfac._errors import DamagedFileError
from jaxkfac.files import ZEROS, checksum, is_sealed, sealed

KEY = "checksums"


def tensor_checksum(x: np.ndarray) -> str:
    """Of a tensor's dtype, shape and values."""
    return checksum(f"{x.dtype.name}{x.shape}".encode() + x.tobytes())


def config_text(record: dict[str, Any], own: str, config: str, files: Mapping[str, bytes]) -> bytes:
    """The text of a record, with checksums of other files and of itself in ``record[own]``.

    Args:
        record: What is written.
        own: Its key for what this library adds.
        config: Name of the file.
        files: Content of the others, by name.
    """
    sums = {name: checksum(data) for name, data in files.items()} | {config: ZEROS}
    record = record | {own: record[own] | {KEY: sums}}
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False)
    return sealed(text, config).encode()


def check_config(path: Path, text: str, sums: Mapping[str, str]) -> None:
    """Compare a record's text with its own checksum.

    Raises:
        DamagedFileError: they differ.
    """
    said = sums.get(path.name)
    if not is_sealed(text, path.name, said):
        raise DamagedFileError(
            f"{path} is damaged, or was edited: its checksum is not {said!r}. If you edited it, "
            "pass verify=False"
        )


def check_tensors(
    path: Path, data: bytes, sums: Mapping[str, str], tensors: Mapping[str, np.ndarray], each: Any
) -> None:
    """Compare the other file with its checksum; where they differ, find the tensors.

    Args:
        path: Of the file.
        data: Its content.
        sums: By name of the file.
        tensors: What was read from it.
        each: Checksums of the tensors, by key.

    Raises:
        DamagedFileError: they differ.
    """
    if checksum(data) == sums.get(path.name):
        return
    each = each if isinstance(each, dict) else {}
    wrong = [key for key, x in tensors.items() if key in each and each[key] != tensor_checksum(x)]
    what = "every tensor" if len(wrong) == len(tensors) else ", ".join(wrong) or "its header"
    raise DamagedFileError(
        f"{path} is damaged, or of another save than the config beside it ({what}): its checksum "
        f"is not {sums.get(path.name)!r}. If you changed it, pass verify=False"
    )
