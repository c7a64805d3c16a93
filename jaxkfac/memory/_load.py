"""Load a checkpoint in its target dtype and place, one tensor at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxkfac.memory._aligned import aligned_empty
from jaxkfac.memory._cast import checked_dtype, convert
from jaxkfac.memory._checkpoint_files import StoredTensor, stored_tensors
from jaxkfac.memory._leaves import Target, check_targets, release
from jaxkfac.memory._place import as_sharding

LeafSharding = Sharding | jax.Device | Callable[[str, tuple[int, ...]], Any]


def load_safetensors(
    path: str | Path, *, dtype: DTypeLike | None = None, sharding: LeafSharding | None = None
) -> dict[str, jax.Array]:
    """Load a safetensors checkpoint, of one file or of shards, tensor by tensor.

    Every header is checked, and room asked for, before the first tensor is read. A tensor is
    read into memory of its own (a mapped file would count as resident next to its arrays),
    placed, converted there, and its stored form deleted before the next one.

    Args:
        path: A ``.safetensors`` file, an index (``model.safetensors.index.json``), or a folder
            with ``model.safetensors.index.json``, ``model.safetensors``, or one file of another
            name.
        dtype: What floating tensors become; others keep theirs. ``None`` keeps all.
        sharding: A ``jax.sharding.Sharding`` or a device for all tensors, or a function of name
            and shape that gives one. ``None``: the default device, uncommitted.

    Returns:
        ``{name: array}``, flat, names as they are in the file
        (``model.layers.0.mlp.up_proj.weight``), in the order of the files. Shapes are as stored:
        a PyTorch ``Linear`` weight is (out, in). While x64 is off, 64-bit integers become 32-bit
        ones.

    Raises:
        FileNotFoundError: no checkpoint there, or a shard of the index is missing, by name.
        ValueError: a file that is truncated or no safetensors file; an index that does not fit
            its shards, each tensor named; a stored dtype that JAX does not have, or that is
            64 bits wide and cannot be kept (a float without ``dtype=``, an integer that does
            not fit 32 bits).
        MemoryBudgetError: before anything is read, if it would not fit.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        The checkpoint in its target dtype, and one stored tensor, on the device and in main
        memory alike; without conversion, on the CPU nothing beyond the arrays.

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
    wanted = None if dtype is None else checked_dtype(dtype)
    tensors = stored_tensors(path)
    targets = [_target(tensor, wanted, sharding) for tensor in tensors]
    default = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    check_targets(
        [Target(t.shape, t.dtype, t.sharding or default) for t in targets], f"loading {path}"
    )
    return {
        tensor.name: _load(tensor, target) for tensor, target in zip(tensors, targets, strict=True)
    }


def _target(tensor: StoredTensor, wanted: Any, sharding: LeafSharding | None) -> Target:
    where = sharding
    if callable(sharding):
        where = sharding(tensor.name, tensor.shape)
    dtype = tensor.dtype
    if wanted is not None and jnp.issubdtype(dtype, jnp.floating):
        dtype = wanted
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if tensor.dtype == np.float64 and dtype == np.float32 and wanted is None:
        raise ValueError(
            f"tensor {tensor.name!r} in {tensor.file} is float64: give dtype=, or enable x64"
        )
    return Target(tensor.shape, dtype, None if where is None else as_sharding(where))


def _load(tensor: StoredTensor, target: Target) -> jax.Array:
    stored = _read(tensor)
    if tensor.dtype.itemsize == 8 and target.dtype != tensor.dtype:  # JAX has no such array now
        if tensor.dtype.kind in "iu":
            _check_range(tensor, stored, target.dtype)
        stored = stored.astype(target.dtype)
    placed = jax.device_put(stored, target.sharding)  # on the CPU it takes the memory over
    del stored
    if placed.dtype == target.dtype:
        return jax.block_until_ready(placed)
    converted = jax.block_until_ready(convert(placed, target.dtype))
    release(placed)
    return converted


def _read(tensor: StoredTensor) -> np.ndarray:
    """The tensor in aligned memory that nobody else holds."""
    stored = aligned_empty(tensor.shape, tensor.dtype)
    view: Any = stored.reshape(-1).view(np.uint8)
    nbytes = stored.nbytes
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        done = 0
        while done < nbytes:  # one call reads 2 GiB at the most
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
