"""Adapters from disk, in the layout of PEFT."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError, JaxkfacError
from jaxkfac.lslora._adapter import Adapters, only_adapters
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._folder import (
    CONFIG,
    PREFIX,
    TENSORS,
    adapter_folder,
    check_finite,
    read_folder,
)
from jaxkfac.lslora._foreign import stacks_in
from jaxkfac.lslora._fused import fuse
from jaxkfac.lslora._names import ModuleNames, module_name, whole_name
from jaxkfac.lslora._pretrained import PretrainedModel, stacks_of, whole_parameters
from jaxkfac.lslora._record import OWN, from_record
from jaxkfac.lslora._slots import check_names
from jaxkfac.lslora._stacks import Stack, expected_tensors, stacked, untargeted


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

    Plain LoRA of PEFT comes back with ``fourier_placement="none"`` and computes what PEFT
    computes: a warm start, see :func:`as_fourier`. Where PEFT adapts some slices of a stack only,
    or gives them other ranks, the others' rows and columns are zero.

    Args:
        folder: That :func:`save` was given, or PEFT's ``save_pretrained``.
        name: Of the adapter.
        model: What ``load_decoder`` returned. All that it is made of is known then: its blocks,
            and the projections that are apart in the file and fused in the model.
        like: What :func:`init` returns for any other model, or its shapes. Files that were not
            written here do not say what is scanned: they need ``model``, ``like`` or
            ``scanned``.
        names: As for :func:`save`, with ``model`` or ``like``.
        scanned: For such files: the component behind which numbers count the slices of one
            stack. With ``"layers"``, ``model.layers.{i}.q_proj`` are slices of
            ``model/layers/q_proj/kernel``.
        assume: Settings by their names in ``adapter_config.json``, in place of what a file of
            another writer says or leaves out: ``{"init_sigma": 1.0}``. Files of the original
            LS-LoRA do not say ``fourier_placement``, and it is ``"output"``.
        verify: Whether files that were written here must have the checksums that they had.

    Returns:
        ``(adapters, config)``, arrays in the file's dtypes (``b`` in float32, where slices have
        different scalings).

    Raises:
        CheckpointMismatchError: keys that are missing, not expected or of another shape, all
            named.
        DamagedFileError: a file is damaged, or of another save than the one beside it.
        ValueError: the file is not finite, of another ``peft_type``, or has a setting
            that makes another model; its nonlinearity is not known; ``model`` is needed; or
            ``modules_to_save`` replaces one part of a kernel of ``model`` and another is adapted.
        FileNotFoundError: there is no such adapter.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: no adapter in nowhere: it has no adapter_config.json
    """
    check_names([name])
    if model is not None and like is not None:
        raise ValueError("load: model= and like= both say what the layers are; pass one")
    where = adapter_folder(folder, name)
    record, tensors, own = read_folder(where, assume=assume, verify=verify)
    if model is None and like is None and own is None and scanned is None:
        raise ValueError(
            f"{folder} was not written here and does not say which modules one layer scans over: "
            'pass model=, like=jk.lslora.init(...), or scanned="layers", say'
        )
    with _settings_of(where / CONFIG):
        if model is not None:
            stacks = stacks_of(model, record, tensors, names)
        elif like is not None:
            shapes = {n: (x.a.shape, x.b.shape) for n, x in only_adapters(like).items()}
            stacks = {n: _stack(n, a, b, names) for n, (a, b) in shapes.items()}
        elif own is not None:
            held = own["layers"].items()
            stacks = {n: Stack(tuple(a[:-2]), a[-2], b[-1], each) for n, (a, b, each) in held}
        else:
            stacks = stacks_in(tensors, str(scanned))
        expected = expected_tensors(record, stacks, tensors)
        left_out = [] if OWN in record else untargeted(record, stacks, tensors)
    whole: dict[str, Any] = {}
    if model is None and like is not None:
        whole = {path: x.shape for path, x in like.items() if path not in stacks}
    elif model is None and own is not None:
        whole = own["whole"]
    expected |= {
        PREFIX + whole_name(path)[0]: _stored(path, shape) for path, shape in whole.items()
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
    for path in whole:
        key, transposed = whole_name(path)
        x = tensors[PREFIX + key]
        adapters[path] = jnp.asarray(x.T if transposed else x)
    replaced: dict[str, Any] = {}
    if model is not None:
        replaced = whole_parameters(model, record, beside, tensors, names)
    with _settings_of(where / CONFIG):
        config = from_record(record, layers, [*whole, *replaced])
    if model is None:
        return adapters, config
    fused, config = fuse(adapters, config, model.config.parts)
    if both := sorted(fused.keys() & replaced.keys()):
        other = {"modules_to_save": None, "exclude_modules": record.get("modules_to_save")}
        raise ValueError(
            f"{where / CONFIG}: modules_to_save replaces some slices or a part of {both}, and the "
            "file adapts others of them; here a kernel is replaced or adapted, not both. Write "
            f"these modules into the base model, and load the adapter onto that with assume={other}"
        )
    return {**fused, **replaced}, config


@contextlib.contextmanager
def _settings_of(path: Path) -> Iterator[None]:
    """Say which file has settings that are not what they should be."""
    try:
        yield
    except JaxkfacError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, re.error) as error:
        raise ValueError(f"{path}: {error}") from error


def _stack(layer: str, a: tuple[int, ...], b: tuple[int, ...], names: ModuleNames) -> Stack:
    modules = [names(layer, index) for index in np.ndindex(*a[:-2])]
    return Stack(a[:-2], a[-2], b[-1], modules)


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
