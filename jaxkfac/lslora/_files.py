"""Adapters on disk, in the layout of PEFT."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora._adapter import Adapter, Adapters, only_adapters
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._folder import (
    CONFIG,
    PREFIX,
    TENSORS,
    adapter_folder,
    read_folder,
    tensor_keys,
)
from jaxkfac.lslora._foreign import stacks_in
from jaxkfac.lslora._names import ModuleNames, module_name, whole_name
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import OWN, Dialect, from_record, nonlinearity_of, to_record
from jaxkfac.lslora._safetensors import write_file, write_tensors
from jaxkfac.lslora._slots import check_names


def save(
    folder: Path | str,
    adapters: Adapters,
    config: Config,
    *,
    name: str = "default",
    dialect: Dialect = "lslora",
    names: ModuleNames = module_name,
) -> None:
    r"""Write one adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Every slice of a stack is a module of its own: ``<module>.lora_A.weight`` (r, in),
    ``.lora_B.weight`` (out, r), ``.fourier_params.weight`` (4,), ``.fourier_params.sigma`` ().
    Another nonlinearity than the Fourier one has its own name there.
    Keys carry no adapter name. ``"default"`` is at the folder's root, others in
    ``folder/name``. Each file appears whole or not at all.

    Args:
        folder: Made if it is missing.
        adapters: What is written, and nothing else.
        config: Its settings; all are saved.
        name: An identifier, and not ``"lora"``.
        dialect: ``peft_type`` of the file: ``"lslora"`` is ``LSLORA``, which only LS-LoRA
            readers know; ``"peft"`` is ``LORA``, for stock PEFT with the plug-in of
            ``torch_ref``. Without the plug-in PEFT would read it as plain LoRA. Plain LoRA
            itself has the dialect ``"peft"``, and needs no plug-in.
        names: ``names(layer, index of a slice) -> module``; by default ``layers/q/kernel`` is
            ``layers.{i}.q``.

    Raises:
        ValueError: a name that cannot be used, two slices with one module name, values that are
            not finite, adapters of another rank or placement than ``config``'s, or plain LoRA in
            the dialect ``"lslora"``.

    Example:
        >>> import tempfile, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([0.0, 1, 0, 0]), jnp.array(1.0))
        >>> config = lslora.Config(rank=2, target="q/kernel")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lslora.save(folder, {"q/kernel": adapter}, config)
        ...     adapters, again = lslora.load(folder)
        >>> again == config, adapters["q/kernel"].a.shape
        (True, (3, 2))
    """
    check_names([name])
    if dialect not in ("lslora", "peft"):
        raise ValueError(f"dialect={dialect!r}: expected 'lslora' or 'peft'")
    for layer, adapter in only_adapters(adapters).items():
        _check_settings(layer, adapter, config)
    modules = {n: _modules(n, x.a.shape[:-2], names) for n, x in only_adapters(adapters).items()}
    whole = {path: whole_name(path) for path in adapters.keys() - modules.keys()}
    tensors = _to_tensors(adapters, modules, whole, tensor_keys(config.phi))
    saved = sorted({key.rpartition(".")[0] for key, _ in whole.values()})
    record = to_record(config, modules, saved, dialect)
    layers = {
        n: [list(x.a.shape), list(x.b.shape), modules[n]]
        for n, x in only_adapters(adapters).items()
    }
    shapes = {path: list(adapters[path].shape) for path in whole}
    metadata = {"format": "pt", OWN: json.dumps({"layers": layers, "whole": shapes})}
    folder = adapter_folder(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False)
    write_tensors(folder / TENSORS, tensors, metadata)
    write_file(folder / CONFIG, text.encode())


def load(
    folder: Path | str,
    *,
    name: str = "default",
    like: Adapters | None = None,
    names: ModuleNames = module_name,
    scanned: str | None = None,
) -> tuple[Adapters, Config]:
    r"""Read one adapter.

    Plain LoRA of stock PEFT comes back with ``fourier_placement="none"`` and computes exactly
    what PEFT computes: a warm start, see :func:`as_fourier`.

    Args:
        folder: That :func:`save` was given, or PEFT's ``save_pretrained``.
        name: Of the adapter.
        like: What :func:`init` returns for the model, or its shapes. Files that were not
            written here do not say what is scanned: they need ``like`` or ``scanned``.
        names: As for :func:`save`, with ``like``.
        scanned: For such files: the component behind which numbers count the slices of one
            stack. With ``"layers"``, ``model.layers.{i}.q_proj`` are slices of
            ``model/layers/q_proj/kernel``.

    Returns:
        ``(adapters, config)``, arrays in the file's dtypes.

    Raises:
        CheckpointMismatchError: keys that are missing, not expected or of another shape, all
            named.
        ValueError: the file is damaged, not finite, or of another ``peft_type``; its nonlinearity
            is not known; or ``like`` is needed.
        FileNotFoundError: there is no such adapter.
    """
    check_names([name])
    record, tensors, metadata = read_folder(adapter_folder(folder, name))
    if like is not None:
        own = only_adapters(like)
        shapes = {n: (x.a.shape, x.b.shape) for n, x in own.items()}
        modules = {n: _modules(n, x.a.shape[:-2], names) for n, x in own.items()}
        whole: dict[str, Any] = {p: x.shape for p, x in like.items() if p not in own}
    elif metadata is not None:
        shapes = {n: (tuple(a), tuple(b)) for n, (a, b, _) in metadata["layers"].items()}
        modules = {n: each for n, (_, _, each) in metadata["layers"].items()}
        whole = metadata["whole"]
    elif scanned is not None:
        (shapes, modules), whole = stacks_in(tensors, scanned), {}
    else:
        raise ValueError(
            f"{folder} was not written here and does not say which modules one layer scans over: "
            'pass like=jk.lslora.init(...), or scanned="layers", say'
        )
    phi = nonlinearity_of(record)
    keys = tensor_keys(phi)
    expected = _expected(shapes, modules, whole, phi)
    if problem := _differences(expected, {k: tuple(x.shape) for k, x in tensors.items()}):
        raise CheckpointMismatchError(f"{folder} does not fit the model: {problem}")
    _check_finite(tensors)
    adapters: dict[str, Any] = {}
    for layer, (a, _) in shapes.items():
        leaves: dict[str, Any] = {"coefficients": None, "sigma": None}
        for part, key in keys.items():
            each = [tensors[f"{PREFIX}{m}.{key}"] for m in modules[layer]]
            each = [x.T for x in each] if part in ("a", "b") else each
            leaves[part] = jnp.asarray(np.stack(each).reshape((*a[:-2], *each[0].shape)))
        adapters[layer] = Adapter(**leaves)
    for path in whole:
        key, transposed = whole_name(path)
        x = tensors[PREFIX + key]
        adapters[path] = jnp.asarray(x.T if transposed else x)
    try:
        return adapters, from_record(record, modules, list(whole))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{adapter_folder(folder, name) / CONFIG}: {error}") from error


def _check_settings(layer: str, adapter: Adapter, config: Config) -> None:
    if adapter.is_linear != (config.phi is None):
        have = "no coefficients" if adapter.is_linear else "coefficients"
        raise ValueError(
            f"layer {layer!r}: the adapter has {have}, and fourier_placement is "
            f"{config.fourier_placement!r}; save it with the config that it was made with"
        )
    if adapter.coefficients is not None and config.phi is not None:
        config.phi.check(adapter.coefficients.shape, f"layer {layer!r}")
    rank, said = adapter.a.shape[-1], config.rank_of(layer)
    if rank != said:
        raise ValueError(
            f"layer {layer!r}: the adapter has rank {rank}, and the config says {said}, which its "
            "scaling is made from; save it with the config that it was made with (one out of a "
            "bank: bank.get(name, config))"
        )


def _modules(layer: str, stack: tuple[int, ...], names: ModuleNames) -> list[str]:
    return [names(layer, index) for index in np.ndindex(*stack)]


def _to_tensors(
    adapters: Adapters,
    modules: dict[str, list[str]],
    whole: dict[str, tuple[str, bool]],
    keys: dict[str, str],
) -> dict[str, np.ndarray]:
    """Every tensor by its key, in PyTorch's orientation, on the host."""
    tensors: dict[str, np.ndarray] = {}

    def put(key: str, x: np.ndarray) -> None:
        if key in tensors:
            raise ValueError(f"two layers would be written as {key!r}: give names=")
        tensors[key] = np.ascontiguousarray(x).reshape(x.shape)  # it makes a scalar a vector

    for layer, adapter in only_adapters(jax.device_get(adapters)).items():
        stack = adapter.a.shape[:-2]
        for module, index in zip(modules[layer], np.ndindex(*stack), strict=True):
            for part, leaf in adapter._asdict().items():
                if leaf is not None:
                    x = np.asarray(leaf[index])
                    put(f"{PREFIX}{module}.{keys[part]}", x.T if part in ("a", "b") else x)
    for path, (key, transposed) in whole.items():
        x = np.asarray(adapters[path])
        if transposed and x.ndim != 2:
            raise ValueError(
                f"modules_to_save: {path!r} has shape {x.shape}; only kernels (in, out) have a "
                "form in PEFT's files"
            )
        put(PREFIX + key, x.T if transposed else x)
    _check_finite(tensors)
    return tensors


def _check_finite(tensors: dict[str, np.ndarray]) -> None:
    bad = [key for key, x in tensors.items() if not np.isfinite(x.astype(np.float32)).all()]
    if bad:
        raise ValueError(f"NaN or infinity in {', '.join(bad)}")


def _expected(
    shapes: dict[str, Any],
    modules: dict[str, list[str]],
    whole: dict[str, Any],
    phi: Nonlinearity | None,
) -> dict[str, tuple[int, ...]]:
    found = {}
    for layer, (a, b) in shapes.items():
        own: dict[str, tuple[int, ...]] = {"a": (a[-1], a[-2]), "b": (b[-1], b[-2]), "sigma": ()}
        own["coefficients"] = () if phi is None else (len(phi.initial),)
        keys = tensor_keys(phi)
        for module in modules[layer]:
            found |= {f"{PREFIX}{module}.{key}": own[part] for part, key in keys.items()}
    for path, shape in whole.items():
        key, transposed = whole_name(path)
        found[PREFIX + key] = tuple(shape)[::-1] if transposed else tuple(shape)
    return found


def _differences(expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> str:
    problems = []
    if missing := sorted(expected.keys() - stored.keys()):
        problems.append(f"it lacks {missing}")
    if extra := sorted(stored.keys() - expected.keys()):
        problems.append(f"it has {extra}, which the model does not know")
    problems += [
        f"{key} has shape {stored[key]}, expected {shape}"
        for key, shape in expected.items()
        if key in stored and stored[key] != shape
    ]
    return "; ".join(problems)
