"""Parameters read slice by slice from a source of tensors."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.memory import (
    LeafSharding,
    Target,
    aligned_empty,
    as_sharding,
    check_targets,
    check_values,
)

# ---------------- which stored tensors form each parameter, and a check that all are there


Shape = tuple[int, ...]


class TensorSpec(NamedTuple):
    """Name and shape of a stored tensor; matrices are (out, in)."""

    name: str
    shape: Shape


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
        slices: For each slice of the stack, the tensors that are concatenated along its outputs;
            a single slice for a parameter that is not stacked.
        stacked: Whether the parameter has a leading axis for its slices.
        transposed: Whether the parameter is (in, out).
    """

    slices: tuple[tuple[TensorSpec, ...], ...]
    stacked: bool
    transposed: bool

    @property
    def slice_shape(self) -> Shape:
        """Shape of a slice of the parameter."""
        parts = self.slices[0]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return (len(self.slices), *self.slice_shape) if self.stacked else self.slice_shape


def alone(name: str, shape: Shape, *, transposed: bool = False) -> Leaf:
    """A parameter that consists of one stored tensor."""
    return Leaf(((TensorSpec(name, shape),),), stacked=False, transposed=transposed)


def _check_tensors(
    stored: Mapping[str, Shape],
    leaves: Mapping[str, Leaf],
    where: str,
    *,
    model: str,
    repeats: Callable[[str], bool],
    hint: str,
) -> None:
    """Compare the tensors of a checkpoint with those of the layout.

    Args:
        stored: Stored shapes by name.
        leaves: The layout.
        where: As for :func:`fill`.
        model: As for :func:`fill`.
        repeats: As for :func:`fill`.
        hint: As for :func:`fill`.

    Raises:
        ValueError: tensors are missing, unknown or of the wrong shape; lists all of them.
    """
    wanted = dict(part for leaf in leaves.values() for parts in leaf.slices for part in parts)
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and not repeats(name)]
    shapes = [
        f"{name} is {stored[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"{where} does not hold the {model} that its config describes: missing tensors "
            f"{missing}; unknown tensors {extra}; other shapes: {'; '.join(shapes) or 'none'}"
            + hint
            * bool(missing)
        )


# ---------------- a source of tensors


@runtime_checkable
class Source(Protocol):
    """A checkpoint, with Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors."""
        ...

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Read one tensor of a floating dtype, or some of its rows."""
        ...


# ---------------- an embedding and a head that may be one parameter


class HeadTensors(NamedTuple):
    """Names of the tensors that a tied head is stored under.

    Attributes:
        embedding: The table of the tokens.
        head: The matrix before the logits.
        copies: Further names of the table; it is one parameter in every model of the kind.
    """

    embedding: str
    head: str = "lm_head.weight"
    copies: tuple[str, ...] = ()


class StoredHead(NamedTuple):
    """How a checkpoint stores embedding and head.

    Attributes:
        is_tied: Whether they are one parameter.
        embedding: Name of the tensor that holds the embedding.
        hint: What to add to an error about a missing tensor.
    """

    is_tied: bool
    embedding: str
    hint: str


def stored_head(source: Source, names: HeadTensors, *, configured: bool, where: str) -> StoredHead:
    """Whether the head is the embedding: by the tensors if both are there, else by the config.

    This is the rule of transformers 5. Configs are no authority for two stored tensors: files of
    other programs often say ``tie_word_embeddings: true`` beside a head of its own.

    Args:
        source: The checkpoint.
        names: Names of the tensors.
        configured: Whether the config says, or leaves to its default, that the head is tied.
        where: Name of the checkpoint, for messages.

    Raises:
        ValueError: two tensors that are one parameter in every such model differ.

    Warns:
        UserWarning: the tensors are tied otherwise than the config says.

    Memory:
        A few rows of two tensors; both are read to the first difference.
    """
    stored = [name for name in (names.embedding, *names.copies) if name in source.shapes]
    for name in stored[1:]:
        if not _is_equal(source, stored[0], name):
            raise ValueError(
                f"{where}: {name} differs from {stored[0]}, and here they are one parameter: a "
                "model with two embeddings is not supported"
            )
    says = f"its config has tie_word_embeddings: {str(configured).lower()}, or that as its default"
    hint = f"; {names.head} is expected because {says}: set it to true if the head is the embedding"
    hint *= not configured and names.head not in source.shapes
    if not stored or names.head not in source.shapes:
        alone_there = not stored and configured and names.head in source.shapes
        only = names.head if alone_there else next(iter(stored), names.embedding)
        return StoredHead(configured, only, hint)
    is_tied = _is_equal(source, stored[0], names.head)
    if is_tied != configured:
        how = "equals" if is_tied else "differs from"
        then = "they are loaded as one parameter" if is_tied else "the head of the file is used"
        warnings.warn(f"{where}: {names.head} {how} {stored[0]}, and {says}; {then}", stacklevel=4)
    return StoredHead(is_tied, stored[0], hint)


def _is_equal(source: Source, first: str, second: str) -> bool:
    """Whether two stored matrices have the same values; reads to the first difference."""
    shape = source.shapes[first]
    if shape != source.shapes[second]:
        return False
    step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
    pieces = (slice(start, start + step) for start in range(0, shape[0], step))
    return all(np.array_equal(source.read(first, x), source.read(second, x)) for x in pieces)


# ---------------- filling


_CHUNK = 2**20  # elements that are looked at together


def fill(
    source: Source,
    leaves: Mapping[str, Leaf],
    where: str,
    *,
    model: str,
    repeats: Callable[[str], bool],
    hint: str = "",
    dtype: np.dtype,
    sharding: LeafSharding | None,
    quantize: str | None,
) -> dict[str, Any]:
    """Build the tree of parameters, one leaf at a time, once all tensors are as they should be.

    Args:
        source: The checkpoint.
        leaves: The layout.
        where: Name of the checkpoint, for error messages.
        model: Name of the model, for error messages.
        repeats: Whether a tensor is redundant (such as a tied head) and may be present.
        hint: What else to say where a tensor is missing.
        dtype: Dtype of the parameters.
        sharding: As for ``load_decoder``.
        quantize: As for ``load_decoder``.

    Raises:
        ValueError: tensors are missing, unknown or of the wrong shape; lists all of them. Or one
            holds NaN or infinity, or values beyond ``dtype``; named.

    Memory:
        One stored tensor and the stacked leaf that it is part of, in main memory; on a CPU the
        latter becomes the parameter without a copy. With ``quantize`` only one slice of a
        matching kernel.
    """
    _check_tensors(source.shapes, leaves, where, model=model, repeats=repeats, hint=hint)
    chosen, what = _quantized(leaves, quantize), f"loading {where}"
    places = {path: _sharding_of(path, leaf.shape, sharding) for path, leaf in leaves.items()}
    default = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    targets = [
        Target(leaf.shape, dtype, places[path] or default)
        for path, leaf in leaves.items()
        if path not in chosen
    ]
    check_targets(targets, what)
    params: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if path in chosen:
            value = _nf4(path, _slices(source, leaf, dtype, what), len(leaf.slices))
        else:
            value = _read_leaf(source, leaf, dtype, what)
            value = jax.block_until_ready(jax.device_put(value, places[path]))
        _put(params, path, value)
    return params


def fill_shapes(
    leaves: Mapping[str, Leaf], *, dtype: np.dtype, quantize: str | None
) -> dict[str, Any]:
    """The same tree of ``jax.ShapeDtypeStruct``, without reading anything."""
    params: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _put(params, path, jax.ShapeDtypeStruct(leaf.shape, dtype))
    if chosen := _quantized(leaves, quantize):
        from jaxkfac.lslora import nf4

        params = nf4.quantize(params, "|".join(map(re.escape, chosen)), stack=1)
    return params


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the leaf at a path of a nested dictionary."""
    *parents, name = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[name] = value


def _read_leaf(source: Source, leaf: Leaf, dtype: np.dtype, what: str) -> np.ndarray:
    parameter = aligned_empty(leaf.shape, dtype)
    for number, parts in enumerate(leaf.slices):
        out = parameter[number] if leaf.stacked else parameter
        _write(source, parts, out, leaf.transposed, what)
    return parameter


def _nf4(path: str, slices: Iterator[np.ndarray], length: int) -> Any:
    from jaxkfac.lslora.nf4 import quantize_slices

    try:
        return quantize_slices(slices, length=length)
    except ValueError as error:
        raise ValueError(f"quantize: parameter {path!r}: {error}") from error


def _slices(source: Source, leaf: Leaf, dtype: np.dtype, what: str) -> Iterator[np.ndarray]:
    for parts in leaf.slices:
        out = np.empty(leaf.slice_shape, dtype)
        _write(source, parts, out, leaf.transposed, what)
        yield out


def _write(source: Source, parts: Any, out: np.ndarray, transposed: bool, what: str) -> None:
    """Write tensors next to each other along the outputs, the last axis if transposed."""
    out = out.T if transposed else out
    start = 0
    for part in parts:
        stop, tensor = start + part.shape[0], source.read(part.name)
        check_values(tensor, out.dtype, f"{what}: tensor {part.name!r}")
        np.copyto(out[start:stop], tensor, casting="unsafe")
        start = stop


def _sharding_of(path: str, shape: Shape, sharding: LeafSharding | None) -> Any:
    where = sharding(path, shape) if callable(sharding) else sharding
    return None if where is None else as_sharding(where)


def _quantized(leaves: Mapping[str, Leaf], pattern: str | None) -> set[str]:
    """Paths of the stacked kernels that match a pattern."""
    if pattern is None:
        return set()
    kernels = [path for path, leaf in leaves.items() if leaf.stacked and path.endswith("/kernel")]
    chosen = {path for path in kernels if re.fullmatch(pattern, path)}
    if not chosen:
        raise UnknownLayerError(
            f"quantize={pattern!r} matches no stacked kernel; the nearest are "
            f"{nearest(pattern, kernels)}"
        )
    return chosen
