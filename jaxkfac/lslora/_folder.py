"""An adapter's folder: where its files lie, what their keys are, and how they are read."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora._adapter import Adapter
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import OWN, check_record, nonlinearity_of
from jaxkfac.lslora._safetensors import read_tensors

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


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """``(record, tensors, what was added here)`` of a folder, checked.

    Raises:
        FileNotFoundError: there is no adapter.
        ValueError: one of its files is damaged, or of something else; named.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no adapter in {folder}: it has no {CONFIG}")
    try:
        record = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is damaged: {error}") from None
    check_record(record, str(folder / CONFIG))
    tensors, metadata = read_tensors(folder / TENSORS)
    if OWN not in metadata:
        return record, tensors, None
    try:
        own = json.loads(metadata[OWN])
        for layer, (a, b, modules) in own["layers"].items():
            if min(len(a), len(b)) < 2 or math.prod(a[:-2]) != len(modules):
                raise ValueError(f"layer {layer!r} has shapes {a}, {b} and modules {modules}")
        return record, tensors, {"layers": own["layers"], "whole": dict(own["whole"])}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / TENSORS} is damaged: metadata {OWN!r}: {reason}") from error


def adapter_folder(folder: Path | str, name: str) -> Path:
    """Where PEFT puts an adapter: ``"default"`` at the root, others one level down."""
    return Path(folder) if name == "default" else Path(folder) / name


def read_modules(folder: Path | str, name: str = "default") -> SavedModules:
    """What the files of an adapter hold; :func:`load` fits it to a model.

    Args:
        folder: That :func:`save` was given, or PEFT's ``save_pretrained``.
        name: Of the adapter.

    Raises:
        CheckpointMismatchError: a module lacks one of its tensors.
        FileNotFoundError: there is no such adapter.
        ValueError: the files are damaged, or of something else than LoRA or LS-LoRA.
    """
    record, tensors, _ = read_folder(adapter_folder(folder, name))
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
