"""Parameters read slice by slice from a source of tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.memory import LeafSharding, Target, aligned_empty, as_sharding, check_targets

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


def check_tensors(
    stored: Mapping[str, Shape],
    leaves: Mapping[str, Leaf],
    where: str,
    *,
    what: str,
    repeats: Callable[[str], bool],
) -> None:
    """Compare the tensors of a checkpoint with those of the layout.

    Args:
        stored: Stored shapes by name.
        leaves: The layout.
        where: Name of the checkpoint, for error messages.
        what: Name of the model, for error messages.
        repeats: Whether a tensor is redundant (such as a tied head) and may be present.

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
            f"{where} does not hold the {what} that its config describes: missing tensors "
            f"{missing}; unknown tensors {extra}; other shapes: {'; '.join(shapes) or 'none'}"
        )


# ---------------- reading slice by slice


@runtime_checkable
class Source(Protocol):
    """A checkpoint, with Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, of a floating dtype."""
        ...


def fill(
    source: Source,
    leaves: Mapping[str, Leaf],
    *,
    dtype: np.dtype,
    sharding: LeafSharding | None,
    quantize: str | None,
    what: str,
) -> dict[str, Any]:
    """Build the tree of parameters, one leaf at a time.

    Memory:
        One stored tensor and the stacked leaf that it is part of, in main memory; on a CPU the
        latter becomes the parameter without a copy. With ``quantize`` only one slice of a
        matching kernel.
    """
    chosen = _quantized(leaves, quantize)
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
            value = _nf4(path, _slices(source, leaf, dtype), len(leaf.slices))
        else:
            value = _read_leaf(source, leaf, dtype)
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


def _read_leaf(source: Source, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    parameter = aligned_empty(leaf.shape, dtype)
    for number, parts in enumerate(leaf.slices):
        _write(source, parts, parameter[number] if leaf.stacked else parameter, leaf.transposed)
    return parameter


def _nf4(path: str, slices: Iterator[np.ndarray], length: int) -> Any:
    from jaxkfac.lslora.nf4 import quantize_slices

    try:
        return quantize_slices(slices, length=length)
    except ValueError as error:
        raise ValueError(f"quantize: parameter {path!r}: {error}") from error


def _slices(source: Source, leaf: Leaf, dtype: np.dtype) -> Iterator[np.ndarray]:
    for parts in leaf.slices:
        out = np.empty(leaf.slice_shape, dtype)
        _write(source, parts, out, leaf.transposed)
        yield out


def _write(source: Source, parts: Any, out: np.ndarray, transposed: bool) -> None:
    """Write tensors next to each other along the outputs, the last axis if transposed."""
    out = out.T if transposed else out
    start = 0
    for part in parts:
        stop = start + part.shape[0]
        with np.errstate(over="ignore"):  # infinity, as on any device
            np.copyto(out[start:stop], source.read(part.name), casting="unsafe")
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
