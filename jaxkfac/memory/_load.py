"""Load a checkpoint into its target dtype and sharding, one tensor at a time."""

import json
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxkfac.memory._leaves import (
    Target,
    aligned_empty,
    check_targets,
    check_values,
    release,
)
from jaxkfac.memory._place import as_sharding, checked_dtype, convert

# ---------------- the files of a safetensors checkpoint, all checked before a tensor is read


# Names of dtypes in the format. Packed sub-byte formats are missing: JAX has no such arrays.
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
    """The place of one tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    start: int  # offset in bytes from the beginning of the file


def stored_tensors(path: Path) -> list[StoredTensor]:
    """All tensors of a checkpoint, in the order of its files and of their bytes.

    Raises:
        FileNotFoundError: the path does not exist, the folder is empty, or a shard is missing.
        ValueError: the contents of the files contradict their headers or the index.
    """
    index, files = _files_of(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path}: the index names {len(files)} shards, and {missing} are not beside it; "
            "download the checkpoint again"
        )
    tensors_by_file = {file: _tensors_in(file) for file in files}
    if index is not None:
        _check_index(path, index, tensors_by_file)
    return [tensor for tensors in tensors_by_file.values() for tensor in tensors]


def _files_of(path: Path) -> tuple[dict[str, Path] | None, list[Path]]:
    """``{name: file}`` of an index, or ``None`` without one, and the files in order."""
    if path.is_dir():
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if single.is_file() and index.is_file():
            warnings.warn(
                f"{path} holds {single.name} and an index of shards: {single.name} is read, as "
                "transformers does; delete the form that is out of date",
                stacklevel=4,
            )
        for file in (single, index):
            if file.is_file():
                return _files_of(file)
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
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        hint = (
            f"; {pickles[0]} is a pickle, which is not read: save it as safetensors"
            if pickles
            else ""
        )
        raise FileNotFoundError(
            f"no *.safetensors in {path}, which holds {names or 'nothing'}{hint}"
        )
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
        # The library checks the header, and that the tensors cover the file without gaps.
        # It maps the file, and mapped pages count as resident once touched, so the tensors are
        # read separately.
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
    stored = [_tensor(file, name, header[name], 8 + length) for name in names]
    return sorted(stored, key=lambda tensor: tensor.start)


def _tensor(file: Path, name: str, entry: dict[str, Any], data: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"tensor {name!r} in {file} has dtype {entry['dtype']}, which JAX has no array for; "
            f"there are {', '.join(_DTYPES)}"
        )
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    return StoredTensor(name, tuple(entry["shape"]), dtype, file, data + entry["data_offsets"][0])


def _check_index(
    path: Path, index: dict[str, Path], tensors_by_file: dict[Path, list[StoredTensor]]
) -> None:
    files_by_name: dict[str, list[Path]] = defaultdict(list)
    for file, tensors in tensors_by_file.items():
        for tensor in tensors:
            files_by_name[tensor.name].append(file)
    absent = [name for name, file in index.items() if file not in files_by_name.get(name, [])]
    extra = [name for name, files in files_by_name.items() if [index.get(name)] != files]
    if absent or extra:
        raise ValueError(
            f"{path} does not fit its shards: they lack {absent} where the index has them, and "
            f"hold {extra} which it does not know there; download the checkpoint again"
        )


# ---------------- loading


LeafSharding = Sharding | jax.Device | Callable[[str, tuple[int, ...]], Any]


def load_safetensors(
    path: str | Path, *, dtype: DTypeLike | None = None, sharding: LeafSharding | None = None
) -> dict[str, jax.Array]:
    """Load a safetensors checkpoint, one file or shards, tensor by tensor.

    Every header and the free memory are checked before the first tensor is read. A tensor is
    read into its own memory (a mapped file would count as resident next to its arrays), placed,
    converted there, and its stored form is deleted before the next one.

    Args:
        path: A ``.safetensors`` file, an index (``model.safetensors.index.json``), or a folder
            with ``model.safetensors``, else ``model.safetensors.index.json``, else a single file
            of another name.
        dtype: Dtype for floating tensors; others keep theirs. ``None`` keeps all dtypes.
        sharding: A ``jax.sharding.Sharding`` or a device for all tensors, or a function of name
            and shape that returns one. ``None`` means the default device, uncommitted.

    Returns:
        ``{name: array}``, flat, with the names of the file
        (``model.layers.0.mlp.up_proj.weight``), in the order of the files. Shapes are as stored:
        a PyTorch ``Linear`` weight is (out, in). With x64 off, 64-bit integers become 32-bit
        integers.

    Raises:
        FileNotFoundError: there is no checkpoint, or a shard of the index is missing; named.
        ValueError: a file is truncated or no safetensors file; an index does not fit its shards,
            with each tensor named; or a stored dtype does not exist in JAX or is a 64-bit type
            that cannot be kept (a float without ``dtype=``, an integer that does not fit 32 bits);
            or a finite value is beyond ``dtype``.
        MemoryBudgetError: it would not fit; raised before anything is read.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Warns:
        UserWarning: a folder has both ``model.safetensors``, which is read, and an index.

    Memory:
        The checkpoint in its target dtype and one stored tensor, both on the device and in main
        memory; without conversion, on the CPU nothing beyond the arrays.

    Example:
        >>> import tempfile, numpy as np, safetensors.numpy, jax.numpy as jnp, jaxkfac as jk
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = folder.name + "/model.safetensors"
        >>> safetensors.numpy.save_file({"up.weight": np.ones((3, 2), np.float32)}, file)
        >>> params = jk.load_safetensors(folder.name, dtype=jnp.bfloat16)
        >>> params["up.weight"].shape, params["up.weight"].dtype
        ((3, 2), dtype(bfloat16))
        >>> folder.cleanup()
    """
    path = Path(path)
    float_dtype = None if dtype is None else checked_dtype(dtype)
    tensors = stored_tensors(path)
    targets = [_target(tensor, float_dtype, sharding) for tensor in tensors]
    default = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    check_targets(
        [Target(t.shape, t.dtype, t.sharding or default) for t in targets], f"loading {path}"
    )
    return {
        tensor.name: _load(tensor, target) for tensor, target in zip(tensors, targets, strict=True)
    }


def _target(tensor: StoredTensor, float_dtype: Any, sharding: LeafSharding | None) -> Target:
    where = sharding
    if callable(sharding):
        where = sharding(tensor.name, tensor.shape)
    dtype = tensor.dtype
    if float_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        dtype = float_dtype
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if tensor.dtype == np.float64 and dtype == np.float32 and float_dtype is None:
        raise ValueError(
            f"tensor {tensor.name!r} in {tensor.file} is float64: give dtype=, or enable x64"
        )
    return Target(tensor.shape, dtype, None if where is None else as_sharding(where))


def _load(tensor: StoredTensor, target: Target) -> jax.Array:
    stored = _read(tensor)
    if jnp.issubdtype(tensor.dtype, jnp.floating) and target.dtype != tensor.dtype:
        where = f"tensor {tensor.name!r} in {tensor.file}"
        check_values(stored, target.dtype, where, may_be_infinite=True)
    if tensor.dtype.itemsize == 8 and target.dtype != tensor.dtype:  # x64 is off
        if tensor.dtype.kind in "iu":
            _check_range(tensor, stored, target.dtype)
        stored = stored.astype(target.dtype)
    placed = jax.device_put(stored, target.sharding)  # on the CPU this takes over the memory
    del stored
    if placed.dtype == target.dtype:
        return jax.block_until_ready(placed)
    converted = jax.block_until_ready(convert(placed, target.dtype))
    release(placed)
    return converted


def _read(tensor: StoredTensor) -> np.ndarray:
    """The tensor in aligned memory that nothing else references."""
    stored = aligned_empty(tensor.shape, tensor.dtype)
    view: Any = stored.reshape(-1).view(np.uint8)
    nbytes = stored.nbytes
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        done = 0
        while done < nbytes:  # one call reads at most 2 GiB
            count = file.readinto(memoryview(view)[done:])
            if not count:
                raise ValueError(
                    f"{tensor.file} ended inside tensor {tensor.name!r}: it has been changed "
                    "while it was read"
                )
            done += count
    return stored


def _check_range(tensor: StoredTensor, stored: np.ndarray, dtype: Any) -> None:
    limits = np.iinfo(dtype)
    if stored.size and (stored.min() < limits.min or stored.max() > limits.max):
        raise ValueError(
            f"tensor {tensor.name!r} in {tensor.file} has {tensor.dtype} values beyond {dtype}: "
            "enable x64"
        )
