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
    model: PretrainedModel, tensors: Mapping[str, np.ndarray], names: ModuleNames
) -> dict[str, Stack]:
    """The model's layers, or parts of fused ones, that a file adapts.

    Raises:
        CheckpointMismatchError: the file adapts a module that the model does not have.
    """
    present, known, found = adapted_modules(tensors), set[str](), {}
    for path, shape in _shapes(model).items():
        if not path.endswith("/kernel"):
            continue
        for name, outputs in _with_parts(path, shape[-1], model.config.parts):
            lead = shape[:-2]
            modules = [names(name, index) for index in np.ndindex(*lead)]
            known |= set(modules)
            if not set(modules).isdisjoint(present):
                columns = outputs.stop - outputs.start
                found[name] = Stack(lead, shape[-2], columns, modules)
    if unknown := [module for module in present if module not in known]:
        raise CheckpointMismatchError(
            f"the model has no module {unknown[0]!r}, which the file adapts; the nearest are "
            f"{nearest(unknown[0], sorted(known))}"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
    return found


def whole_parameters(
    model: PretrainedModel,
    keys: Sequence[str],
    tensors: Mapping[str, np.ndarray],
    names: ModuleNames,
) -> dict[str, Any]:
    """The model's parameters of which a file holds all or some slices, by path.

    Args:
        model: Gives the slices that the file does not.
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
        # Of a module that it adapts and saves whole, PEFT writes the base layer.
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
        if place.path not in found:
            found[place.path] = np.array(leaves[place.path])
        value = tensors[key].T if place.transposed else tensors[key]
        region = found[place.path][place.index][..., place.outputs]
        if region.shape != value.shape:
            raise CheckpointMismatchError(
                f"the file's {key!r} has shape {tensors[key].shape}, and the model's parameter "
                f"{place.path!r} takes {region.shape} there"
            )
        region[...] = value.astype(region.dtype)
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
