"""Saving and loading adapters in PEFT's layout."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError, JaxkfacError
from jaxkfac.files import write_together
from jaxkfac.lslora._attach import check_rank
from jaxkfac.lslora._bank import check_names
from jaxkfac.lslora._config import Adapter, Adapters, Config, EmbeddingAdapter, only_adapters
from jaxkfac.lslora._folder import (
    CONFIG,
    DTYPES,
    KEY,
    PREFIX,
    TENSORS,
    adapted_modules,
    adapter_folder,
    check_finite,
    config_text,
    read_folder,
    rendered,
    tensor_checksum,
    tensor_keys,
)
from jaxkfac.lslora._modules import ModuleNames, fuse, layer_name, module_name, whole_name
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._pretrained import (
    PretrainedModel,
    Stack,
    expected_tensors,
    lacks_copies,
    stacked,
    stacks_of,
    tied_copies,
    ties_of_model,
    untargeted,
    usual_heads,
    whole_parameters,
    without_tied_copies,
)
from jaxkfac.lslora._record import OWN, Dialect, from_record, to_record

# ---------------- stacks of layers in a file that does not say what is scanned


def stacks_in(tensors: Mapping[str, np.ndarray], scanned: str) -> dict[str, Stack]:
    """The layers that a file adapts, as stacks.

    Args:
        tensors: Tensors by key.
        scanned: The component after which a number is the index of a slice.

    Raises:
        CheckpointMismatchError: slices are missing, or a module has no ``b``; named.
    """
    modules_by_layer: dict[str, dict[int | None, str]] = {}
    lookups = adapted_modules(tensors)
    for module, is_lookup in lookups.items():
        layer, index = layer_name(module, scanned)
        layer = layer.removesuffix("kernel") + ("embedding" if is_lookup else "kernel")
        modules_by_layer.setdefault(layer, {})[index] = module
    stacks = {}
    for layer, slices in modules_by_layer.items():
        indices = sorted(slices, key=lambda i: -1 if i is None else i)
        if indices not in ([None], list(range(len(indices)))):
            raise CheckpointMismatchError(
                f"layer {layer!r} has adapters of the slices {indices} only, and the file does not "
                "say how many there are: pass model=, or like= of a model"
            )
        modules = [slices[i] for i in indices]
        lead = () if indices == [None] else (len(indices),)
        is_lookup = lookups[modules[0]]
        keys = tensor_keys(None, is_lookup=is_lookup)
        a, b = (_tensor(tensors, f"{PREFIX}{modules[0]}.{key}") for key in keys.values())
        stacks[layer] = Stack(lead, a.shape[-1], b.shape[0], modules, is_lookup)
    return stacks


def _tensor(tensors: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    if key not in tensors:
        raise CheckpointMismatchError(f"the file lacks {key!r}")
    return tensors[key]


# ---------------- loading


def load(
    folder: Path | str,
    *,
    name: str = "default",
    model: PretrainedModel | None = None,
    like: Adapters | None = None,
    names: ModuleNames = module_name,
    scanned: str | None = None,
    assume: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> tuple[Adapters, Config]:
    r"""Read one adapter.

    Plain LoRA of PEFT loads with ``fourier_placement="none"`` and computes what PEFT computes; to
    start LS-LoRA from it, see :func:`as_fourier`. Where PEFT adapts only some slices of a stack, or
    gives them different ranks, the missing rows and columns are zero. With ``model``, an embedding
    and a head that the model ties are separate parameters, as in PEFT, unless the file has
    ``ensure_weight_tying``; see :class:`Config`.

    Args:
        folder: Folder given to :func:`save`, or to PEFT's ``save_pretrained``.
        name: Name of the adapter.
        model: Result of ``load_decoder``. It determines everything about the layers: the blocks,
            and which projections are separate in the file and fused in the model.
        like: Result of :func:`init` for any other model, or its shapes. Files written by other
            libraries do not say what is scanned: they need ``model``, ``like`` or ``scanned``.
        names: As for :func:`save`; used with ``model`` or ``like``.
        scanned: For such files: the component after which numbers count the slices of one
            stack. With ``"layers"``, ``model.layers.{i}.q_proj`` are slices of
            ``model/layers/q_proj/kernel``.
        assume: Settings by their names in ``adapter_config.json``, for a file of another
            library; they replace its settings or add to them: ``{"init_sigma": 1.0}``. Files
            of the original LS-LoRA do not state ``fourier_placement``, which is ``"output"``.
        verify: Whether to check the checksums of files that this library wrote.

    Returns:
        ``(adapters, config)``, with arrays in the file's dtypes, with three exceptions: ``b`` is in
        float32 if slices or parts have different scalings; parameters of ``model`` that the file
        replaces are in the model's dtype; and float64 becomes float32 with x64 off.

    Raises:
        CheckpointMismatchError: keys are missing, unexpected or of another shape; all are named.
        DamagedFileError: a file is damaged, or belongs to another save than the one next to it.
        ValueError: a tensor is not finite; a setting is no number; tensors of a tied head differ
            from the embedding's; the ``peft_type`` differs, or a setting makes another model; the
            nonlinearity is unknown; ``model`` is needed; or ``modules_to_save`` replaces one part
            of a kernel of ``model`` while another part is adapted.
        FileNotFoundError: there is no such adapter.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: no adapter in nowhere, which does not exist: give its folder
    """
    check_names([name])
    if model is not None and like is not None:
        raise ValueError("load: model= and like= both say what the layers are; pass one")
    where = adapter_folder(folder, name)
    record, tensors, metadata = read_folder(where, assume=assume, verify=verify)
    if record.get("ensure_weight_tying"):
        in_file: Any = like or ({} if metadata is None else metadata["layers"] | metadata["whole"])
        in_file = in_file or [f"{m.replace('.', '/')}/embedding" for m in adapted_modules(tensors)]
        heads = usual_heads(in_file) if model is None else ties_of_model(model)
        if OWN not in record and lacks_copies(tensors, heads, names):
            record = record | {"ensure_weight_tying": False}  # PEFT tied nothing
        tensors = without_tied_copies(tensors, heads, names, str(where / TENSORS))
    if model is None and like is None and metadata is None and scanned is None:
        raise ValueError(
            f"{folder} was not written here and does not say which modules one layer scans over: "
            'pass model=, like=jk.lslora.init(...), or scanned="layers", say'
        )
    with _settings_of(where / CONFIG):
        if model is not None:
            stacks = stacks_of(model, record, tensors, names)
        elif like is not None:
            stacks = {n: _stack(n, adapter, names) for n, adapter in only_adapters(like).items()}
        elif metadata is not None:
            lookups, stored_layers = adapted_modules(tensors), metadata["layers"].items()
            stacks = {
                n: Stack(tuple(a[:-2]), a[-2], b[-1], modules, lookups.get(modules[0], False))
                for n, (a, b, modules) in stored_layers
            }
        else:
            stacks = stacks_in(tensors, str(scanned))
        expected = expected_tensors(record, stacks, tensors)
        left_out = [] if OWN in record else untargeted(record, stacks, tensors)
    full_shapes: dict[str, Any] = {}
    if model is None and like is not None:
        full_shapes = {path: x.shape for path, x in like.items() if path not in stacks}
    elif model is None and metadata is not None:
        full_shapes = metadata["whole"]
    expected |= {
        PREFIX + whole_name(path)[0]: _stored(path, shape) for path, shape in full_shapes.items()
    }
    beside = [] if model is None else [key for key in tensors if key not in expected]
    stored = {key: tuple(x.shape) for key, x in tensors.items() if key not in beside}
    if problem := _differences(expected, stored):
        raise CheckpointMismatchError(f"{folder} does not fit the model: {problem}")
    if left_out:
        raise CheckpointMismatchError(f"{where / CONFIG} does not name {left_out}, of the file")
    check_finite(tensors, f"{where / TENSORS}: ")
    adapters: dict[str, Any] = {}
    layers: dict[str, tuple[int, Any]] = {}
    for layer, stack in stacks.items():
        adapters[layer], rank, alpha = stacked(record, layer, stack, tensors)
        layers[layer] = rank, alpha
    if like is not None:
        _check_ranks(adapters, like, str(folder))
    for path in full_shapes:
        key, transposed = whole_name(path)
        x = tensors[PREFIX + key]
        adapters[path] = jnp.asarray(x.T if transposed else x)
    replaced: dict[str, Any] = {}
    if model is not None:
        where_from = str(where / TENSORS)
        replaced = whole_parameters(model, record, beside, tensors, names, where_from)
    with _settings_of(where / CONFIG):
        config = from_record(record, layers, [*full_shapes, *replaced])
    if model is None:
        return adapters, config
    fused, config = fuse(adapters, config, model.config.parts)
    if both := sorted(fused.keys() & replaced.keys()):
        remedy = {"modules_to_save": None, "exclude_modules": record.get("modules_to_save")}
        raise ValueError(
            f"{where / CONFIG}: modules_to_save replaces some slices or a part of {both}, and the "
            "file adapts others of them; here a kernel is replaced or adapted, not both. Write "
            "these modules into the base model, and load the adapter onto that with "
            f"assume={remedy}"
        )
    return {**fused, **replaced}, config


@contextlib.contextmanager
def _settings_of(path: Path) -> Iterator[None]:
    """Add the name of the settings file to errors about its values."""
    try:
        yield
    except JaxkfacError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, re.error) as error:
        raise ValueError(f"{path}: {error}") from error


def _stack(layer: str, adapter: Adapter, names: ModuleNames) -> Stack:
    a, b = adapter.a.shape, adapter.b.shape
    modules = [names(layer, index) for index in np.ndindex(*a[:-2])]
    return Stack(a[:-2], a[-2], b[-1], modules, isinstance(adapter, EmbeddingAdapter))


def _stored(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape)[::-1] if whole_name(path)[1] else tuple(shape)


def _check_ranks(adapters: Adapters, like: Adapters, folder: str) -> None:
    wrong = [
        f"{layer} has rank {adapter.a.shape[-1]}, expected {like[layer].a.shape[-1]}"
        for layer, adapter in only_adapters(adapters).items()
        if adapter.a.shape[-1] != like[layer].a.shape[-1]
    ]
    if wrong:
        raise CheckpointMismatchError(f"{folder} does not fit the model: {'; '.join(wrong)}")


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


# ---------------- saving


_SHARED = "shared/embedding"  # of T5


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

    Every slice of a stack is a separate module: ``<module>.lora_A.weight`` (r, in),
    ``.lora_B.weight`` (out, r), ``.fourier_params.weight`` (4,), ``.fourier_params.sigma`` ().
    A nonlinearity other than the Fourier one puts its own name there. An embedding has
    ``<module>.lora_embedding_A`` (r, rows) and ``.lora_embedding_B`` (out, r). With
    ``ensure_weight_tying``, the tensors of a tied head are written too, as PEFT needs them.
    Keys carry no adapter name. ``"default"`` is saved at the folder's root, other names in
    ``folder/name``. Both files are complete on disk before either takes its name, and each has a
    checksum that :func:`load` compares.

    Args:
        folder: Created if missing.
        adapters: The adapters to write.
        config: Their settings; all are saved.
        name: An identifier other than ``"lora"``.
        dialect: ``peft_type`` of the file: ``"lslora"`` writes ``LSLORA``, which only LS-LoRA
            readers know; ``"peft"`` writes ``LORA``, for PEFT with the plug-in
            ``torch_ref.lslora.peft_plugin`` of the extra ``peft``. PEFT without the plug-in
            refuses the file. Plain LoRA must use ``"peft"``, and needs no plug-in.
        names: ``names(layer, index of a slice) -> module``; by default ``layers/q/kernel`` is
            ``layers.{i}.q``.
        base_model: Where PEFT finds the base model, such as ``pretrained.path``. Together with
            ``task_type`` it lets ``AutoPeftModelForCausalLM`` open the folder. If the PyTorch model
            keeps fused projections apart, write the result of :func:`split`.
        task_type: PEFT's name for the task, such as ``"CAUSAL_LM"``.

    Raises:
        ValueError: a name cannot be used, two slices have one module name, values are not
            finite or not of a dtype that :func:`load` reads, the adapters' rank or placement
            differs from ``config``'s, or plain LoRA has the dialect ``"lslora"``.
        OSError: the files cannot be written; the message says what the folder then holds.

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
        if dialect == "peft" and isinstance(adapter, EmbeddingAdapter) and not adapter.is_linear:
            raise ValueError(
                f"layer {layer!r}: PEFT's plug-in has no nonlinear adapter of an embedding; save "
                "it with dialect='lslora'"
            )
    modules = {n: _modules(n, x.a.shape[:-2], names) for n, x in only_adapters(adapters).items()}
    full_names = {path: whole_name(path) for path in adapters.keys() - modules.keys()}
    if dialect == "peft" and config.ensure_weight_tying and _SHARED in full_names:
        raise ValueError(
            f"{_SHARED}: PEFT does not read a trained 'shared' of T5, whose encoder and decoder "
            "have embeddings of their own; train encoder/embed_tokens/embedding and "
            "decoder/embed_tokens/embedding for it"
        )
    tensors = _to_tensors(adapters, modules, full_names, config.phi)
    if config.ensure_weight_tying:
        tensors |= tied_copies(tensors, usual_heads(adapters), names)
    saved = sorted({key.rpartition(".")[0] for key, _ in full_names.values()})
    base = None if base_model is None else str(base_model)
    record = to_record(config, modules, saved, dialect, base, task_type)
    layers = {
        n: [list(x.a.shape), list(x.b.shape), modules[n]]
        for n, x in only_adapters(adapters).items()
    }
    shapes = {path: list(adapters[path].shape) for path in full_names}
    sums = {key: tensor_checksum(x) for key, x in tensors.items()}
    metadata = json.dumps({"layers": layers, "whole": shapes, KEY: sums})
    data = rendered(tensors, {"format": "pt", OWN: metadata})
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
    remedy = (
        "; save it with the config that it was made with (one out of a bank: "
        "bank.get(name, config))"
    )
    check_rank(layer, adapter, config, remedy)


def _modules(layer: str, stack: tuple[int, ...], names: ModuleNames) -> list[str]:
    return [names(layer, index) for index in np.ndindex(*stack)]


def _to_tensors(
    adapters: Adapters,
    modules: dict[str, list[str]],
    full_names: dict[str, tuple[str, bool]],
    phi: Nonlinearity | None,
) -> dict[str, np.ndarray]:
    """Every tensor by its key, in PyTorch's orientation, on the host."""
    tensors: dict[str, np.ndarray] = {}

    def put(key: str, x: np.ndarray) -> None:
        if key in tensors:
            raise ValueError(f"two layers would be written as {key!r}: give names=")
        if x.dtype not in DTYPES.values():
            raise ValueError(
                f"{key!r} would have dtype {x.dtype}, and load reads only "
                f"{', '.join(str(dtype) for dtype in DTYPES.values())}"
            )
        tensors[key] = np.ascontiguousarray(x).reshape(x.shape)  # which turns a scalar into (1,)

    for layer, adapter in only_adapters(jax.device_get(adapters)).items():
        stack = adapter.a.shape[:-2]
        keys = tensor_keys(phi, is_lookup=isinstance(adapter, EmbeddingAdapter))
        for module, index in zip(modules[layer], np.ndindex(*stack), strict=True):
            for leaf_name, leaf in adapter._asdict().items():
                if leaf is not None:
                    x = np.asarray(leaf[index])
                    put(
                        f"{PREFIX}{module}.{keys[leaf_name]}", x.T if leaf_name in ("a", "b") else x
                    )
    for path, (key, transposed) in full_names.items():
        x = np.asarray(adapters[path])
        if transposed and x.ndim != 2:
            raise ValueError(
                f"modules_to_save: {path!r} has shape {x.shape}; only kernels (in, out) have a "
                "form in PEFT's files"
            )
        put(PREFIX + key, x.T if transposed else x)
    check_finite(tensors)
    return tensors
