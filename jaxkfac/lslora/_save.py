"""Adapters to disk, in the layout of PEFT."""

import json
from pathlib import Path

import jax
import numpy as np

from jaxkfac.files import write_together
from jaxkfac.lslora._adapter import Adapter, Adapters, only_adapters
from jaxkfac.lslora._checksums import KEY, config_text, tensor_checksum
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._folder import (
    CONFIG,
    PREFIX,
    TENSORS,
    adapter_folder,
    check_finite,
    tensor_keys,
)
from jaxkfac.lslora._names import ModuleNames, module_name, whole_name
from jaxkfac.lslora._record import OWN, Dialect, to_record
from jaxkfac.lslora._safetensors import rendered
from jaxkfac.lslora._slots import check_names


def save(
    folder: Path | str,
    adapters: Adapters,
    config: Config,
    *,
    name: str = "default",
    dialect: Dialect = "lslora",
    names: ModuleNames = module_name,
    base_model: Path | str | None = None,
    task_type: str | None = None,
) -> None:
    r"""Write one adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Every slice of a stack is a module of its own: ``<module>.lora_A.weight`` (r, in),
    ``.lora_B.weight`` (out, r), ``.fourier_params.weight`` (4,), ``.fourier_params.sigma`` ().
    Another nonlinearity than the Fourier one has its own name there.
    Keys carry no adapter name. ``"default"`` is at the folder's root, others in
    ``folder/name``. Neither file takes its name before both are on the disk, and each has a
    checksum that :func:`load` compares.

    Args:
        folder: Made if it is missing.
        adapters: What is written, and nothing else.
        config: Its settings; all are saved.
        name: An identifier, and not ``"lora"``.
        dialect: ``peft_type`` of the file: ``"lslora"`` is ``LSLORA``, which only LS-LoRA
            readers know; ``"peft"`` is ``LORA``, for PEFT with the plug-in
            ``torch_ref.lslora.peft_plugin`` of the extra ``peft``. Without the plug-in PEFT
            refuses it. Plain LoRA itself has the dialect ``"peft"``, and needs no plug-in.
        names: ``names(layer, index of a slice) -> module``; by default ``layers/q/kernel`` is
            ``layers.{i}.q``.
        base_model: Where PEFT finds the base model, ``pretrained.path`` say. With ``task_type``
            its ``AutoPeftModelForCausalLM`` opens the folder; of a model whose PyTorch form keeps
            fused projections apart, write what :func:`split` returns.
        task_type: PEFT's word for what the model does: ``"CAUSAL_LM"``.

    Raises:
        ValueError: a name that cannot be used, two slices with one module name, values that are
            not finite, adapters of another rank or placement than ``config``'s, or plain LoRA in
            the dialect ``"lslora"``.
        OSError: the files cannot be written; what is in the folder then is said.

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
    base = None if base_model is None else str(base_model)
    record = to_record(config, modules, saved, dialect, base, task_type)
    layers = {
        n: [list(x.a.shape), list(x.b.shape), modules[n]]
        for n, x in only_adapters(adapters).items()
    }
    shapes = {path: list(adapters[path].shape) for path in whole}
    sums = {key: tensor_checksum(x) for key, x in tensors.items()}
    own = json.dumps({"layers": layers, "whole": shapes, KEY: sums})
    data = rendered(tensors, {"format": "pt", OWN: own})
    folder = adapter_folder(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    text = config_text(record, OWN, CONFIG, {TENSORS: data})
    write_together({folder / TENSORS: data, folder / CONFIG: text}, "the adapter")


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
    check_finite(tensors)
    return tensors
