"""A file's modules against a pretrained model's parameters: what is a slice of what."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxkfac._errors import CheckpointMismatchError, nearest
from jaxkfac.interception import decoded_shapes, encoded_paths, leaves_by_path
from jaxkfac.lslora._folder import PREFIX, adapted_modules
from jaxkfac.lslora._fused import Parts
from jaxkfac.lslora._names import ModuleNames
from jaxkfac.lslora._settings import is_saved_whole, is_target
from jaxkfac.lslora._stacks import Stack

# Last component of a path: axes of its own after the stack, and PyTorch's word for it.
_KINDS = {"kernel": (2, "weight"), "embedding": (2, "weight"), "scale": (1, "weight")}
_KINDS |= {"bias": (1, "bias")}


@runtime_checkable
class PretrainedModel(Protocol):
    """A model with Hugging Face's names, such as ``jaxkfac.models.load_decoder`` returns."""

    @property
    def config(self) -> Any:
        """Sizes; ``config.parts`` is what fused kernels are made of, see :func:`split`."""
        ...

    @property
    def params(self) -> PyTree:
        """Nested dictionary; blocks are stacked."""
        ...


class _Place(NamedTuple):
    """Where a stored tensor lies in a parameter."""

    path: str
    index: tuple[int, ...]
    outputs: slice
    transposed: bool


def stacks_of(
    model: PretrainedModel,
    record: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    names: ModuleNames,
) -> dict[str, Stack]:
    """The model's layers that a file adapts; of a fused one its parts, if it has those.

    Raises:
        CheckpointMismatchError: the file adapts a module that the model does not have.
    """
    present, known, found = set(adapted_modules(tensors)), set[str](), {}
    for path, shape in _shapes(model).items():
        if not path.endswith("/kernel"):
            continue
        stacks = {}
        for name, outputs in _with_parts(path, shape[-1], model.config.parts):
            modules = [names(name, index) for index in np.ndindex(*shape[:-2])]
            known |= set(modules)
            stacks[name] = Stack(shape[:-2], shape[-2], outputs.stop - outputs.start, modules)
        whole = {path: stacks.pop(path)}
        # A pattern such as `.*_proj` names the whole and its parts; the file has one of the two.
        forms = [form for form in (whole, stacks) if not present.isdisjoint(_modules(form))]
        for form in forms or (whole, stacks):
            chosen = {
                name: stack
                for name, stack in form.items()
                if any(m in present or is_target(record, m) for m in stack.modules)
            }
            if chosen:
                found |= chosen
                break
    if unknown := [m for m in adapted_modules(tensors) if m not in known]:
        raise CheckpointMismatchError(
            f"the model has no module {unknown[0]!r}, which the file adapts; the nearest are "
            f"{nearest(unknown[0], sorted(known))}"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
    return found


def _modules(stacks: Mapping[str, Stack]) -> set[str]:
    return {module for stack in stacks.values() for module in stack.modules}


def whole_parameters(
    model: PretrainedModel,
    record: Mapping[str, Any],
    keys: Sequence[str],
    tensors: Mapping[str, np.ndarray],
    names: ModuleNames,
) -> dict[str, Any]:
    """The model's parameters of which a file holds all or some slices, by path.

    PEFT also writes what nobody trained: embeddings, and the base layer of an adapted head. These
    are left out where they are the model's own.

    Args:
        model: Gives the slices that the file does not.
        record: The file's settings.
        keys: Of the tensors that belong to no adapter.
        tensors: By key.
        names: As for the adapters.

    Raises:
        CheckpointMismatchError: a tensor that the model does not have, or of another shape.
        ValueError: the parameter is quantised.
    """
    leaves, found = leaves_by_path(decoded_shapes(model.params)), {}
    places = _places(model, names) if keys else {}
    quantised = encoded_paths(model.params)
    for key in keys:
        own = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        if own not in places:
            raise CheckpointMismatchError(
                f"the file has {key!r}, which is no tensor of an adapter, and the model has no "
                f"parameter for it; the nearest are {nearest(own, places)}"
            )
        place = places[own]
        if place.path in quantised:
            raise ValueError(
                f"the file saves {key!r} whole, and {place.path!r} is quantised: load the model "
                "with a narrower quantize="
            )
        value = tensors[key].T if place.transposed else tensors[key]
        held = np.asarray(leaves[place.path])[place.index][..., place.outputs]
        if held.shape != value.shape:
            raise CheckpointMismatchError(
                f"the file's {key!r} has shape {tensors[key].shape}, and the model's parameter "
                f"{place.path!r} takes {held.shape} there"
            )
        value = value.astype(held.dtype)
        if not is_saved_whole(record, own) and np.array_equal(value, held):
            continue
        if ".base_layer." in key:
            raise CheckpointMismatchError(
                f"the file's {key!r} is not the model's {place.path!r}: the adapter belongs to "
                "another base model"
            )
        if place.path not in found:
            found[place.path] = np.array(leaves[place.path])
        found[place.path][place.index][..., place.outputs] = value
    return {path: jnp.asarray(x) for path, x in found.items()}


def _places(model: PretrainedModel, names: ModuleNames) -> dict[str, _Place]:
    """Where each tensor of the PyTorch model lies here, by its name."""
    places = {}
    for path, shape in _shapes(model).items():
        axes, word = _KINDS[path.rpartition("/")[2]]
        kernel = path.endswith("/kernel")
        for name, outputs in _with_parts(path, shape[-1], model.config.parts):
            for index in np.ndindex(*shape[:-axes]):
                places[f"{names(name, index)}.{word}"] = _Place(path, index, outputs, kernel)
    return places


def _shapes(model: PretrainedModel) -> dict[str, tuple[int, ...]]:
    leaves = leaves_by_path(decoded_shapes(model.params))
    return {p: tuple(x.shape) for p, x in leaves.items() if p.rpartition("/")[2] in _KINDS}


def _with_parts(path: str, outputs: int, parts: Parts) -> Iterator[tuple[str, slice]]:
    """A parameter's path and, of a fused one, those of its parts, with their outputs."""
    yield path, slice(0, outputs)
    components = path.split("/")
    for whole in parts.keys() & set(components):
        start = 0
        for part, width in parts[whole].items():
            name = "/".join(part if each == whole else each for each in components)
            yield name, slice(start, start + width)
            start += width
