"""Safetensors files as NumPy arrays, bfloat16 included."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import DamagedFileError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


def parsed(path: Path, data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """``(tensors, metadata)`` of a file's content.

    Raises:
        DamagedFileError: it is no whole safetensors file.
        ValueError: it holds a dtype that no adapter has.
    """
    safetensors = _package("safetensors")
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise DamagedFileError(f"{path} is damaged, or no safetensors file: {error}") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {}
    for key, value in found:
        if value["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {key} has dtype {value['dtype']}, expected floating")
        flat = np.frombuffer(value["data"], _DTYPES[value["dtype"]])
        tensors[key] = flat.reshape(value["shape"])
    return tensors, header.get("__metadata__", {})


def rendered(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """The content of a file: the same bytes for the same values.

    The package writes metadata in the order of a hash table whose seed differs from process to
    process. Tensors, which it sorts, keep their places behind the header.
    """
    data = _package("safetensors.numpy").save(tensors, metadata)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'safetensors is not installed: pip install "jaxkfac[pretrained]"', name=error.name
        ) from None
