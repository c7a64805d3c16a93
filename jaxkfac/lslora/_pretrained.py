"""A file's modules matched to a pretrained model's parameters and their slices."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._errors import CheckpointMismatchError, nearest
from jaxkfac.interception.values import decoded_shapes, encoded_paths
from jaxkfac.lslora._config import Adapter, EmbeddingAdapter
from jaxkfac.lslora._folder import PREFIX, adapted_modules, tensor_keys
from jaxkfac.lslora._modules import ModuleNames, Parts, Ties, separated, ties_of
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import (
    OWN,
    is_all_linear,
    is_saved_whole,
    is_target,
    nonlinearity_of,
    pattern_value,
)
from jaxkfac.memory import check_values

# ---------------- from the modules of a file to stacked layers


class Stack(NamedTuple):
    """A layer of the model, and the names of its slices in a file.

    Attributes:
        lead: Shape of the stack; ``()`` for a layer without one.
        inputs: Inputs of a slice.
        outputs: Outputs of a slice.
        modules: Name of the module of each slice, in order.
        is_lookup: Whether it is an embedding.
    """

    lead: tuple[int, ...]
    inputs: int
    outputs: int
    modules: list[str]
    is_lookup: bool = False


class ModuleSettings(NamedTuple):
    """The settings for one module."""

    rank: int
    alpha: Any
    scaling: float


Shapes = dict[str, tuple[int, ...]]


def expected_tensors(
    record: Mapping[str, Any], stacks: Mapping[str, Stack], stored: Mapping[str, np.ndarray]
) -> Shapes:
    """Shapes of the tensors that a file must have, by key.

    A module without any tensor in the file is skipped if the file's settings do not target it.
    """
    phi, shapes = nonlinearity_of(record), {}
    for stack in stacks.values():
        keys = tensor_keys(phi, is_lookup=stack.is_lookup)
        for module in stack.modules:
            rank = _slice(record, module).rank
            leaf_shapes: Shapes = {
                "a": (rank, stack.inputs),
                "b": (stack.outputs, rank),
                "sigma": (),
            }
            leaf_shapes["coefficients"] = () if phi is None else (len(phi.initial),)
            names = {leaf_name: f"{PREFIX}{module}.{key}" for leaf_name, key in keys.items()}
            is_stored = any(name in stored for name in names.values())
            if is_stored or OWN in record or is_target(record, module):
                shapes |= {name: leaf_shapes[leaf_name] for leaf_name, name in names.items()}
    return shapes


def untargeted(
    record: Mapping[str, Any], stacks: Mapping[str, Stack], stored: Mapping[str, np.ndarray]
) -> list[str]:
    """Modules that a file has but its settings do not target: PEFT would skip them."""
    present = adapted_modules(stored)
    modules = [m for stack in stacks.values() for m in stack.modules]
    return [m for m in modules if m in present and not is_target(record, m, stored=True)]


def stacked(
    record: Mapping[str, Any], layer: str, stack: Stack, tensors: Mapping[str, np.ndarray]
) -> tuple[Adapter, int, Any]:
    r"""A layer's adapter, its rank and its alpha.

    All slices are padded to the largest rank with zeros in A and B, which add nothing. A slice
    without an adapter has zeros for A and B, and so zero gradients for both. The scaling is that of
    a slice with the largest rank; other scalings are multiplied into B, which is then float32 or
    wider.

    Raises:
        CheckpointMismatchError: no slice has an adapter.
    """
    phi = nonlinearity_of(record)
    keys = tensor_keys(phi, is_lookup=stack.is_lookup)
    module_tensors: list[dict[str, np.ndarray]] = []
    for module in stack.modules:
        names = {leaf_name: f"{PREFIX}{module}.{key}" for leaf_name, key in keys.items()}
        module_tensors.append(
            {leaf_name: tensors[name] for leaf_name, name in names.items() if name in tensors}
        )
    slices = [_slice(record, m) for m in stack.modules]
    present = [s for s, leaf_tensors in zip(slices, module_tensors) if "a" in leaf_tensors]
    if not present:
        raise CheckpointMismatchError(f"the file has no adapter of layer {layer!r}")
    widest = max(present, key=lambda s: s.rank)
    dtype = next(leaf_tensors["a"].dtype for leaf_tensors in module_tensors if "a" in leaf_tensors)
    leaves: dict[str, list[np.ndarray]] = {leaf_name: [] for leaf_name in keys}
    for settings, leaf_tensors in zip(slices, module_tensors):
        if "a" not in leaf_tensors:
            leaf_tensors |= _nothing(stack, widest.rank, dtype, phi)
        extra = widest.rank - leaf_tensors["a"].shape[0]
        leaf_tensors["a"] = np.pad(leaf_tensors["a"], [(0, extra), (0, 0)])
        leaf_tensors["b"] = np.pad(leaf_tensors["b"], [(0, 0), (0, extra)])
        if settings.scaling != widest.scaling:
            wide = np.promote_types(leaf_tensors["b"].dtype, np.float32)
            leaf_tensors["b"] = leaf_tensors["b"].astype(wide) * wide.type(
                settings.scaling / widest.scaling
            )
        for leaf_name, x in leaf_tensors.items():
            leaves[leaf_name].append(x.T if leaf_name in ("a", "b") else x)
    arrays: dict[str, Any] = {"coefficients": None, "sigma": None}
    for leaf_name, slice_arrays in leaves.items():
        x = np.stack(slice_arrays)
        arrays[leaf_name] = jnp.asarray(x.reshape((*stack.lead, *x.shape[1:])))
    form = EmbeddingAdapter if stack.is_lookup else Adapter
    return form(**arrays), widest.rank, widest.alpha


def _slice(record: Mapping[str, Any], module: str) -> ModuleSettings:
    rank = pattern_value(record, "rank_pattern", module, record["r"])
    alpha = pattern_value(record, "alpha_pattern", module, record["lora_alpha"])
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank {rank!r} of {module}: expected at least 1, a whole number")
    return ModuleSettings(
        rank, alpha, alpha / (math.sqrt(rank) if record.get("use_rslora") else rank)
    )


def _nothing(stack: Stack, rank: int, dtype: DTypeLike, phi: Nonlinearity | None) -> dict[str, Any]:
    """The tensors of a slice whose adapter changes nothing."""
    zeros = {
        "a": np.zeros((rank, stack.inputs), dtype),
        "b": np.zeros((stack.outputs, rank), dtype),
    }
    if phi is None:
        return zeros
    return zeros | {"coefficients": phi.first(np.float32), "sigma": np.float32(1)}


# ---------------- what PEFT writes again for a head that stays tied


# For each tensor of a head: that of the embedding, and whether it is transposed.
_TIED = {
    "weight": ("weight", False),
    "base_layer.weight": ("base_layer.weight", False),
    "lora_A.weight": ("lora_embedding_B", True),
    "lora_B.weight": ("lora_embedding_A", True),
}
_HEAD, _EMBEDDINGS = "lm_head/kernel", ("embed_tokens/embedding", "shared/embedding")


def usual_heads(paths: Iterable[str]) -> Ties:
    """The head of the models that PEFT knows, for the embedding among some paths."""
    embeddings = [path for path in paths if path.endswith(_EMBEDDINGS)]
    return {_HEAD: embeddings[0]} if embeddings else {}


def _tied_keys(heads: Ties, names: ModuleNames) -> dict[str, tuple[str, bool]]:
    return {
        f"{PREFIX}{names(head, ())}.{end}": (f"{PREFIX}{names(embedding, ())}.{source}", turned)
        for head, embedding in heads.items()
        for end, (source, turned) in _TIED.items()
    }


def tied_copies(
    tensors: Mapping[str, np.ndarray], heads: Ties, names: ModuleNames
) -> dict[str, np.ndarray]:
    """The tensors that a file with ``ensure_weight_tying`` holds for the head too."""
    return {
        key: np.ascontiguousarray(tensors[source].T if turned else tensors[source])
        for key, (source, turned) in _tied_keys(heads, names).items()
        if source in tensors
    }


def lacks_copies(tensors: Mapping[str, np.ndarray], heads: Ties, names: ModuleNames) -> bool:
    """Whether a trained embedding is not there for its head too.

    PEFT leaves ``ensure_weight_tying`` without effect where its model does not tie the two, such as
    a base with two equal matrices whose config does not tie them.
    """
    keys = tied_copies(tensors, heads, names)
    return any("lora_" not in key and key not in tensors for key in keys)


def without_tied_copies(
    tensors: Mapping[str, np.ndarray], heads: Ties, names: ModuleNames, where: str
) -> dict[str, np.ndarray]:
    """The tensors without those that are written again for a tied head.

    Args:
        tensors: Tensors of a file with ``ensure_weight_tying``, by key.
        heads: The model's tied heads.
        names: Module names, as for the adapters.
        where: Name of the file, for errors.

    Raises:
        ValueError: the head's tensors are not the embedding's; named.
    """
    out, copies = dict(tensors), tied_copies(tensors, heads, names)
    for key, (source, _) in _tied_keys(heads, names).items():
        copy = out.pop(key, None)
        if copy is not None and not (key in copies and np.array_equal(copy, copies[key])):
            raise ValueError(
                f"{where}: {key!r} is not {source!r}, and adapter_config.json has "
                "ensure_weight_tying: true, which makes them one; pass "
                "assume={'ensure_weight_tying': False} to keep both"
            )
    return out


# ---------------- a pretrained model's parameters


# Last component of a path: number of axes after the stack, and PyTorch's name for it.
_KINDS = {"kernel": (2, "weight"), "embedding": (2, "weight"), "scale": (1, "weight")}
_KINDS |= {"bias": (1, "bias")}


@runtime_checkable
class PretrainedModel(Protocol):
    """A model with Hugging Face's names, such as ``jaxkfac.models.load_decoder`` returns."""

    @property
    def config(self) -> Any:
        """Sizes; ``config.parts`` describes the fused kernels, see :func:`split`."""
        ...

    @property
    def params(self) -> ArrayTree:
        """Nested dictionary in which blocks are stacked."""
        ...


def ties_of_model(model: PretrainedModel) -> Ties:
    """The parameters that the model's function takes beside the matrix they are tied to."""
    return ties_of(getattr(model, "apply_fn", None))


def _leaves(model: PretrainedModel) -> dict[str, Any]:
    """The model's parameters by path, each tied one among them."""
    return leaves_by_path(decoded_shapes(separated(model.params, ties_of_model(model))))


class _Place(NamedTuple):
    """The place of a stored tensor in a parameter."""

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
    """The model's layers that a file adapts; for a fused layer its parts, if the file has those.

    Raises:
        CheckpointMismatchError: the file adapts a module that the model does not have.
    """
    lookups, all_modules, result = adapted_modules(tensors), set[str](), {}
    present = {module for module, is_lookup in lookups.items() if not is_lookup}
    targets = record["target_modules"]
    for path, shape in _shapes(model).items():
        if path.endswith("/embedding"):
            modules = [names(path, index) for index in np.ndindex(*shape[:-2])]
            all_modules |= set(modules)
            if any(lookups.get(m) or (targets and is_target(record, m)) for m in modules):
                result[path] = Stack(shape[:-2], shape[-2], shape[-1], modules, is_lookup=True)
        if not path.endswith("/kernel"):
            continue
        stacks = {}
        for name, outputs in _with_parts(path, shape[-1], model.config.parts):
            modules = [names(name, index) for index in np.ndindex(*shape[:-2])]
            all_modules |= set(modules)
            stacks[name] = Stack(shape[:-2], shape[-2], outputs.stop - outputs.start, modules)
        fused = {path: stacks.pop(path)}
        # A pattern such as `.*_proj` matches the fused layer and its parts; the file has only one.
        forms = [form for form in (fused, stacks) if not present.isdisjoint(_modules(form))]
        names_of_both = _modules(fused) | _modules(stacks)
        if (
            not forms
            and is_all_linear(record)
            and not all(is_target(record, module) for module in names_of_both)
        ):
            continue  # the settings exclude it by the names that it has in the file
        for form in forms or (fused, stacks):
            chosen = {
                name: stack
                for name, stack in form.items()
                if any(m in present or is_target(record, m) for m in stack.modules)
            }
            if chosen:
                result |= chosen
                break
    if unknown := [m for m in lookups if m not in all_modules]:
        raise CheckpointMismatchError(
            f"the model has no module {unknown[0]!r}, which the file adapts; the nearest are "
            f"{nearest(unknown[0], sorted(all_modules))}"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
    return result


def _modules(stacks: Mapping[str, Stack]) -> set[str]:
    return {module for stack in stacks.values() for module in stack.modules}


def whole_parameters(
    model: PretrainedModel,
    record: Mapping[str, Any],
    keys: Sequence[str],
    tensors: Mapping[str, np.ndarray],
    names: ModuleNames,
    where: str,
) -> dict[str, Any]:
    """The parameters of the model that a file holds in full or in some slices, by path.

    PEFT also writes untrained tensors: embeddings, and the base layer of an adapted head. They are
    ignored if they equal the model's.

    Args:
        model: Provides the slices that the file does not have.
        record: The file's settings.
        keys: Keys of the tensors that belong to no adapter.
        tensors: Tensors by key.
        names: Module names, as for the adapters.
        where: Name of the file, for errors.

    Raises:
        CheckpointMismatchError: the model does not have a tensor, or has it with another shape.
        ValueError: the parameter is quantized, or a value is beyond its dtype.
    """
    leaves, parameters = _leaves(model), {}
    places = _places(model, names) if keys else {}
    quantised = encoded_paths(model.params)
    for key in keys:
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        if name not in places:
            raise CheckpointMismatchError(
                f"the file has {key!r}, which is no tensor of an adapter, and the model has no "
                f"parameter for it; the nearest are {nearest(name, places)}"
            )
        place = places[name]
        if place.path in quantised:
            raise ValueError(
                f"the file saves {key!r} whole, and {place.path!r} is quantised: load the model "
                "with a narrower quantize="
            )
        value = tensors[key].T if place.transposed else tensors[key]
        model_slice = np.asarray(leaves[place.path])[place.index][..., place.outputs]
        if model_slice.shape != value.shape:
            raise CheckpointMismatchError(
                f"the file's {key!r} has shape {tensors[key].shape}, and the model's parameter "
                f"{place.path!r} takes {model_slice.shape} there"
            )
        check_values(value, model_slice.dtype, f"{where}: {key!r}", may_be_infinite=True)
        value = value.astype(model_slice.dtype)
        if not is_saved_whole(record, name) and np.array_equal(value, model_slice):
            continue
        if ".base_layer." in key:
            raise CheckpointMismatchError(
                f"the file's {key!r} is not the model's {place.path!r}: the adapter belongs to "
                "another base model"
            )
        if place.path not in parameters:
            parameters[place.path] = np.array(leaves[place.path])
        parameters[place.path][place.index][..., place.outputs] = value
    return {path: jnp.asarray(x) for path, x in parameters.items()}


def _places(model: PretrainedModel, names: ModuleNames) -> dict[str, _Place]:
    """The place of each of the PyTorch model's tensors here, by name."""
    places = {}
    for path, shape in _shapes(model).items():
        axes, torch_leaf = _KINDS[path.rpartition("/")[2]]
        kernel = path.endswith("/kernel")
        for name, outputs in _with_parts(path, shape[-1], model.config.parts):
            for index in np.ndindex(*shape[:-axes]):
                places[f"{names(name, index)}.{torch_leaf}"] = _Place(path, index, outputs, kernel)
    return places


def _shapes(model: PretrainedModel) -> dict[str, tuple[int, ...]]:
    leaves = _leaves(model)
    return {p: tuple(x.shape) for p, x in leaves.items() if p.rpartition("/")[2] in _KINDS}


def _with_parts(path: str, outputs: int, parts: Parts) -> Iterator[tuple[str, slice]]:
    """A parameter's path and those of its parts if it is fused, with their outputs."""
    yield path, slice(0, outputs)
    components = path.split("/")
    for fused_name in parts.keys() & set(components):
        start = 0
        for part, width in parts[fused_name].items():
            name = "/".join(
                part if component == fused_name else component for component in components
            )
            yield name, slice(start, start + width)
            start += width
