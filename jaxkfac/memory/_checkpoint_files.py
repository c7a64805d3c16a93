"""The files of a safetensors checkpoint, checked whole before a byte of a tensor is read."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# What the format calls a dtype. Sub-byte formats are packed, and JAX has no array like that.
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
}


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    start: int  # bytes from the beginning of the file


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint, in the order of its files and of their bytes.

    Raises:
        FileNotFoundError: no such path, nothing in the folder, or a shard is missing.
        ValueError: what the files hold is not what their headers or the index say.
    """
    index, files = _files_of(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path}: the index names {len(files)} shards, and {missing} are not beside it; "
            "download the checkpoint again"
        )
    found = {file: _tensors_in(file) for file in files}
    if index is not None:
        _check_index(path, index, found)
    return [tensor for tensors in found.values() for tensor in tensors]


def _files_of(path: Path) -> tuple[dict[str, Path] | None, list[Path]]:
    """``{name: file}`` of an index, if there is one, and the files in order."""
    if path.is_dir():
        for pattern in ("model.safetensors.index.json", "model.safetensors"):
            if (path / pattern).is_file():
                return _files_of(path / pattern)
        for pattern in ("*.safetensors.index.json", "*.safetensors"):
            candidates = sorted(path.glob(pattern))
            if len(candidates) == 1:
                return _files_of(candidates[0])
            if candidates:
                names = [file.name for file in candidates]
                raise ValueError(
                    f"{path} holds {names}: give one of them, or put the index "
                    "(model.safetensors.index.json) beside its shards"
                )
        names = sorted(file.name for file in path.iterdir())
        raise FileNotFoundError(f"no *.safetensors in {path}, which holds {names or 'nothing'}")
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}, which does not exist")
    if path.suffix != ".json":
        return None, [path]
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no index of shards: expected JSON with a 'weight_map' ({error!r})"
        ) from error
    if not weight_map:
        raise ValueError(f"{path} names no tensor: its 'weight_map' is empty")
    outside = [
        x for x in weight_map.values() if not isinstance(x, str) or Path(x).name != x or not x
    ]
    if outside:
        raise ValueError(f"{path}: shards are names of files beside the index, got {outside}")
    index = {name: path.with_name(shard) for name, shard in weight_map.items()}
    return index, sorted(set(index.values()))


def _tensors_in(file: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks the header, and that offsets leave no hole and end with the file.
        # It maps the file, and mapped pages count as resident once touched: tensors are
        # therefore read, not taken from here.
        with safe_open(file, framework="numpy") as opened:
            names = opened.keys()
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is no whole safetensors file: {error}; "
            "download it again"
        ) from error
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    found = [_tensor(file, name, header[name], 8 + length) for name in names]
    return sorted(found, key=lambda tensor: tensor.start)


def _tensor(file: Path, name: str, entry: dict[str, Any], data: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"tensor {name!r} in {file} has dtype {entry['dtype']}, which JAX has no array for; "
            f"there are {', '.join(_DTYPES)}"
        )
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    return StoredTensor(name, tuple(entry["shape"]), dtype, file, data + entry["data_offsets"][0])


def _check_index(path: Path, index: dict[str, Path], found: dict[Path, list[StoredTensor]]) -> None:
    held: dict[str, list[Path]] = defaultdict(list)
    for file, tensors in found.items():
        for tensor in tensors:
            held[tensor.name].append(file)
    absent = [name for name, file in index.items() if file not in held.get(name, [])]
    extra = [name for name, files in held.items() if [index.get(name)] != files]
    if absent or extra:
        raise ValueError(
            f"{path} does not fit its shards: they lack {absent} where the index has them, and "
            f"hold {extra} which it does not know there; download the checkpoint again"
        )
