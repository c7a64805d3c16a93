"""An adapter's folder: where its files lie, what their keys are, and how they are read."""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError, DamagedFileError
from jaxkfac.files import ZEROS, checksum, is_sealed, sealed
from jaxkfac.lslora._config import Adapter
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import OWN, check_record, completed, nonlinearity_of

# ---------------- checksums of the two files of an adapter, which neither JSON nor safetensors has
#
# ``adapter_config.json`` holds one of each file, its own taken with zeros in its place. It is
# written last, so that files of two different saves do not pass for one adapter. Those of single
# tensors, in the header of the other file, say which of them is damaged.


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


# ---------------- safetensors files as NumPy arrays, bfloat16 included


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


# ----------------


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


class SavedModules(NamedTuple):
    """What is in an adapter's files, without a model.

    Attributes:
        record: Of ``adapter_config.json``.
        modules: ``{module: Adapter}``, in order of name, with the numbers in them as numbers.
        nonlinearity: Of the adapters, or ``None`` for plain LoRA.
    """

    record: dict[str, Any]
    modules: dict[str, Adapter]
    nonlinearity: Nonlinearity | None


def tensor_keys(phi: Nonlinearity | None) -> dict[str, str]:
    """How the key of each leaf of an adapter ends, behind its module's name."""
    return {"a": "lora_A.weight", "b": "lora_B.weight"} | ({} if phi is None else phi.tensors)


def adapted_modules(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the modules that a file has an A of, in its order."""
    end = "." + tensor_keys(None)["a"]
    return [key.removeprefix(PREFIX).removesuffix(end) for key in tensors if key.endswith(end)]


def read_folder(
    folder: Path, *, assume: Mapping[str, Any] | None = None, verify: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """``(record, tensors, what was added here)`` of a folder, checked.

    Raises:
        FileNotFoundError: there is no adapter, or one of its files is missing.
        DamagedFileError: one of its files is damaged; named.
        ValueError: one of its files is of something else; named.
    """
    for path in (folder / CONFIG, folder / TENSORS):
        if not path.is_file():
            raise FileNotFoundError(f"no adapter in {folder}: it has no {path.name}")
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
    own = _own_part(folder / TENSORS, metadata)
    if sums is not None:
        each = None if own is None else own.get(KEY)
        check_tensors(folder / TENSORS, data, sums, tensors, each)
    return record, tensors, own


def _checksums(record: Any) -> Any:
    own = record.get(OWN) if isinstance(record, dict) else None
    sums = own.get(KEY) if isinstance(own, dict) else None
    return sums if isinstance(sums, dict) else None


def _own_part(path: Path, metadata: Mapping[str, str]) -> Any:
    """What was added here to the header: layers, parameters saved whole, checksums."""
    if OWN not in metadata:
        return None
    try:
        own = json.loads(metadata[OWN])
        for layer, (a, b, modules) in own["layers"].items():
            if min(len(a), len(b)) < 2 or math.prod(a[:-2]) != len(modules):
                raise ValueError(f"layer {layer!r} has shapes {a}, {b} and modules {modules}")
        return own | {"whole": dict(own["whole"])}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedFileError(f"{path} is damaged: metadata {OWN!r}: {reason}") from error


def adapter_folder(folder: Path | str, name: str) -> Path:
    """Where PEFT puts an adapter: ``"default"`` at the root, others one level down."""
    return Path(folder) if name == "default" else Path(folder) / name


def check_finite(tensors: Mapping[str, np.ndarray], where: str = "") -> None:
    """Refuse tensors that are not finite.

    Raises:
        ValueError: naming them, behind the words of ``where``.
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
    """What the files of an adapter hold; :func:`load` fits it to a model.

    Args:
        folder: That :func:`save` was given, or PEFT's ``save_pretrained``.
        name: Of the adapter.
        assume: As for :func:`load`.
        verify: As for :func:`load`.

    Raises:
        CheckpointMismatchError: a module lacks one of its tensors.
        DamagedFileError: one of the files is damaged.
        FileNotFoundError: there is no such adapter.
        ValueError: the files are of something else than LoRA or LS-LoRA.
    """
    record, tensors, _ = read_folder(adapter_folder(folder, name), assume=assume, verify=verify)
    phi = nonlinearity_of(record)
    parts = tensor_keys(phi)
    ends = tuple(f".{key}" for key in parts.values())
    names = [key.removeprefix(PREFIX) for key in tensors]
    modules = sorted(
        {n.removesuffix(e) for n in names for e in ends if n.endswith(e)}, key=_counted
    )
    wanted = [f"{PREFIX}{m}.{key}" for m in modules for key in parts.values()]
    if missing := [key for key in wanted if key not in tensors]:
        raise CheckpointMismatchError(f"{folder} lacks {missing}")
    found = {}
    for module in modules:
        own = {part: jnp.asarray(tensors[f"{PREFIX}{module}.{key}"]) for part, key in parts.items()}
        own = {"coefficients": None, "sigma": None, **own}
        found[module] = Adapter(**(own | {"a": own["a"].T, "b": own["b"].T}))
    return SavedModules(record, found, phi)


def _counted(module: str) -> list[tuple[int, str]]:
    """A key that puts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]
