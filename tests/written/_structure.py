"""The structure of written files: names, shapes and dtypes, without the numbers."""

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np

# A name of a field, a layer or a choice; digests, dates and versions are other text.
_WORD = re.compile(r"[A-Za-z][A-Za-z_./'@ -]*")
_DIGEST = re.compile(r"[0-9a-f]{8,}")


def structure_of(folder: Path) -> dict[str, Any]:
    """``{path of a file: its structure}`` for all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _of_file(path) for path in files}


def _of_file(path: Path) -> Any:
    data = path.read_bytes()
    if zipfile.is_zipfile(path):
        return _of_archive(path)
    match path.suffix:
        case ".msgpack":
            return _of_plain(flax.serialization.msgpack_restore(data))
        case ".json":
            return _of_plain(json.loads(data))
        case ".npy":
            return _of_plain(np.load(path))
        case ".safetensors":
            length = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8 : 8 + length])
            about = {
                k: json.loads(v) if v[:1] == "{" else v
                for k, v in header.pop("__metadata__").items()
            }
            tensors = {name: [x["dtype"], x["shape"]] for name, x in header.items()}
            return {"tensors": tensors, "about": _of_plain(about)}
    return f"{len(data)} bytes"


def _of_archive(path: Path) -> Any:
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                content = np.load(member) if name.endswith(".npy") else json.load(member)
            found[name] = _of_plain(content)
    return found


def _of_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _of_plain(x) for name, x in sorted(value.items())}
    if isinstance(value, list):
        return [_of_plain(x) for x in value]
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    is_word = isinstance(value, str) and _WORD.fullmatch(value) and not _DIGEST.fullmatch(value)
    return value if is_word else type(value).__name__
