"""An adapter's folder: its files, their keys, and how they are read."""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError, DamagedFileError, installed_by
from jaxkfac.files import ZEROS, checksum, is_sealed, sealed
from jaxkfac.lslora._config import Adapter, EmbeddingAdapter
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import OWN, check_record, completed, nonlinearity_of

# ---------------- checksums of an adapter's two files
#
# Neither JSON nor safetensors has checksums. ``adapter_config.json`` holds one for each file; its
# own is computed with zeros in its place. It is written last, so that files of two different saves
# are not taken for one adapter. Checksums of single tensors, in the header of the other file, tell
# which of them is damaged.


KEY = "checksums"


def tensor_checksum(x: np.ndarray) -> str:
    """Checksum of a tensor's dtype, shape and values."""
    return checksum(f"{x.dtype.name}{x.shape}".encode() + x.tobytes())


def config_text(
    record: dict[str, Any], own_key: str, config: str, files: Mapping[str, bytes]
) -> bytes:
    """The text of a record, with checksums of the other files and of itself in ``record[own_key]``.

    Args:
        record: The record to write.
        own_key: Key of this library's entries.
        config: Name of the file.
        files: Contents of the other files, by name.
    """
    sums = {name: checksum(data) for name, data in files.items()} | {config: ZEROS}
    record = record | {own_key: record[own_key] | {KEY: sums}}
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False)
    return sealed(text, config).encode()


def check_config(path: Path, text: str, sums: Mapping[str, str]) -> None:
    """Compare a record's text with its own checksum.

    Raises:
        DamagedFileError: they differ.
    """
    stored = sums.get(path.name)
    if not is_sealed(text, path.name, stored):
        raise DamagedFileError(
            f"{path} is damaged, or was edited: its checksum is not {stored!r}. If you edited it, "
            "pass verify=False"
        )


def check_tensors(
    path: Path,
    data: bytes,
    sums: Mapping[str, str],
    tensors: Mapping[str, np.ndarray],
    tensor_sums: Any,
) -> None:
    """Compare the tensors' file with its checksum; on a mismatch find the damaged tensors.

    Args:
        path: Path of the file.
        data: Its content.
        sums: Checksums by file name.
        tensors: Tensors read from the file.
        tensor_sums: Checksums of the tensors by key, if the file has any.

    Raises:
        DamagedFileError: they differ.
    """
    if checksum(data) == sums.get(path.name):
        return
    tensor_sums = tensor_sums if isinstance(tensor_sums, dict) else {}
    wrong = [
        key
        for key, x in tensors.items()
        if key in tensor_sums and tensor_sums[key] != tensor_checksum(x)
    ]
    what = "every tensor" if len(wrong) == len(tensors) else ", ".join(wrong) or "its header"
    raise DamagedFileError(
        f"{path} is damaged, or of another save than the config beside it ({what}): its checksum "
        f"is not {sums.get(path.name)!r}. If you changed it, pass verify=False"
    )


# ---------------- Safetensors files as NumPy arrays, including bfloat16


DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


def parsed(path: Path, data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """``(tensors, metadata)`` of a file's content.

    Raises:
        DamagedFileError: it is not a complete safetensors file.
        ValueError: it holds a dtype that no adapter has.
    """
    safetensors = _package("safetensors")
    try:
        entries = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise DamagedFileError(f"{path} is damaged, or no safetensors file: {error}") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {}
    for key, value in entries:
        if value["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {key} has dtype {value['dtype']}, expected floating")
        flat = np.frombuffer(value["data"], DTYPES[value["dtype"]])
        tensors[key] = flat.reshape(value["shape"])
    return tensors, header.get("__metadata__", {})


def rendered(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """The content of a file, with the same bytes for the same values.

    The package writes metadata in the order of a hash table whose seed differs between processes,
    so the header is sorted here. The sorted tensors keep their places after the header.
    """
    data = _package("safetensors.numpy").save(tensors, metadata)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _package(name: str) -> Any:
    with installed_by("pretrained"):
        return importlib.import_module(name)


# ---------------- reading a folder


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


class SavedModules(NamedTuple):
    """Contents of an adapter's files, without a model.

    Attributes:
        record: Content of ``adapter_config.json``.
        modules: ``{module: Adapter}``, sorted by name, with numbers in names compared as numbers.
        nonlinearity: Nonlinearity of the adapters, or ``None`` for plain LoRA.
    """

    record: dict[str, Any]
    modules: dict[str, Adapter]
    nonlinearity: Nonlinearity | None


_PRODUCTS = {"a": "lora_A.weight", "b": "lora_B.weight"}
_LOOKUPS = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def tensor_keys(phi: Nonlinearity | None, *, is_lookup: bool = False) -> dict[str, str]:
    """The ends of the keys of an adapter's leaves, after the module's name.

    Args:
        phi: The nonlinearity.
        is_lookup: Whether the module is an embedding, which PEFT's files tell by these names.
    """
    return (_LOOKUPS if is_lookup else _PRODUCTS) | ({} if phi is None else phi.tensors)


def adapted_modules(tensors: Mapping[str, np.ndarray]) -> dict[str, bool]:
    """The modules for which a file has an A, in its order: whether each is an embedding."""
    modules = {}
    for key in tensors:
        for keys, is_lookup in ((_PRODUCTS, False), (_LOOKUPS, True)):
            if key.endswith(end := "." + keys["a"]):
                modules[key.removeprefix(PREFIX).removesuffix(end)] = is_lookup
    return modules


def read_folder(
    folder: Path, *, assume: Mapping[str, Any] | None = None, verify: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """Read a folder as ``(record, tensors, this library's metadata)``, and check it.

    Raises:
        FileNotFoundError: there is no adapter, or one of its files is missing.
        DamagedFileError: one of its files is damaged; named.
        ValueError: one of its files is not an adapter's; named.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"no adapter in {folder}, which {what}: give its folder")
    for path in (folder / CONFIG, folder / TENSORS):
        if not path.is_file():
            raise FileNotFoundError(
                f"no adapter in {folder}: it has no {path.name}{_advice(folder)}"
            )
    try:
        text = (folder / CONFIG).read_bytes().decode()
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{folder / CONFIG} is damaged: {error}") from None
    sums = _checksums(record) if verify else None
    if sums is not None:
        check_config(folder / CONFIG, text, sums)
    record = completed(record, assume)
    check_record(record, str(folder / CONFIG))
    data = (folder / TENSORS).read_bytes()
    tensors, metadata = parsed(folder / TENSORS, data)
    own_metadata = _own_metadata(folder / TENSORS, metadata)
    if sums is not None:
        tensor_sums = None if own_metadata is None else own_metadata.get(KEY)
        check_tensors(folder / TENSORS, data, sums, tensors, tensor_sums)
    return record, tensors, own_metadata


def _advice(folder: Path) -> str:
    """What to do where the weights are in PyTorch's own format, which runs code when it is read."""
    if not (folder / (old := "adapter_model.bin")).is_file():
        return ""
    return (
        f"; {old} is a pickle, which is not read here: convert it with python -c "
        f"\"import torch, safetensors.torch as s; s.save_file(torch.load('{folder / old}', "
        f"weights_only=True), '{folder / TENSORS}')\""
    )


def _checksums(record: object) -> Any:
    own_settings = record.get(OWN) if isinstance(record, dict) else None
    sums = own_settings.get(KEY) if isinstance(own_settings, dict) else None
    return sums if isinstance(sums, dict) else None


def _own_metadata(path: Path, metadata: Mapping[str, str]) -> Any:
    """This library's entries of the header: layers, parameters saved in full, checksums."""
    if OWN not in metadata:
        return None
    try:
        entries = json.loads(metadata[OWN])
        for layer, (a, b, modules) in entries["layers"].items():
            if min(len(a), len(b)) < 2 or math.prod(a[:-2]) != len(modules):
                raise ValueError(f"layer {layer!r} has shapes {a}, {b} and modules {modules}")
        return entries | {"whole": dict(entries["whole"])}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedFileError(f"{path} is damaged: metadata {OWN!r}: {reason}") from error


def adapter_folder(folder: Path | str, name: str) -> Path:
    """PEFT's folder of an adapter: ``"default"`` at the root, other names one level down."""
    return Path(folder) if name == "default" else Path(folder) / name


def check_finite(tensors: Mapping[str, np.ndarray], where: str = "") -> None:
    """Refuse tensors with NaN or infinity.

    Raises:
        ValueError: names them, after the prefix ``where``.
    """
    bad = [key for key, x in tensors.items() if not np.isfinite(x.astype(np.float32)).all()]
    if bad:
        raise ValueError(f"{where}NaN or infinity in {', '.join(bad)}")


def read_modules(
    folder: Path | str,
    name: str = "default",
    *,
    assume: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> SavedModules:
    """Read the files of an adapter without a model; :func:`load` fits them to one.

    Args:
        folder: Folder given to :func:`save`, or to PEFT's ``save_pretrained``.
        name: Name of the adapter.
        assume: As for :func:`load`.
        verify: As for :func:`load`.

    Raises:
        CheckpointMismatchError: a module lacks one of its tensors.
        DamagedFileError: one of the files is damaged.
        FileNotFoundError: there is no such adapter.
        ValueError: the files hold something other than LoRA or LS-LoRA.
    """
    record, tensors, _ = read_folder(adapter_folder(folder, name), assume=assume, verify=verify)
    phi = nonlinearity_of(record)
    names = [key.removeprefix(PREFIX) for key in tensors]
    lookups = {m for m, is_lookup in adapted_modules(tensors).items() if is_lookup}
    ends = {f".{key}" for x in (False, True) for key in tensor_keys(phi, is_lookup=x).values()}
    modules = sorted(
        {n.removesuffix(e) for n in names for e in ends if n.endswith(e)}, key=_counted
    )
    keys_of = {m: tensor_keys(phi, is_lookup=m in lookups) for m in modules}
    expected = [f"{PREFIX}{m}.{key}" for m, keys in keys_of.items() for key in keys.values()]
    if missing := [key for key in expected if key not in tensors]:
        raise CheckpointMismatchError(f"{folder} lacks {missing}")
    adapters = {}
    for module in modules:
        leaves = {
            leaf_name: jnp.asarray(tensors[f"{PREFIX}{module}.{key}"])
            for leaf_name, key in keys_of[module].items()
        }
        leaves = {"coefficients": None, "sigma": None, **leaves}
        form = EmbeddingAdapter if module in lookups else Adapter
        adapters[module] = form(**(leaves | {"a": leaves["a"].T, "b": leaves["b"].T}))
    return SavedModules(record, adapters, phi)


def _counted(module: str) -> list[tuple[int, str]]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    return [
        (int(component), "") if component.isdecimal() else (-1, component)
        for component in module.split(".")
    ]
