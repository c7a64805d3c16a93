"""Parameters filled slice by slice from a source of tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.memory import LeafSharding, Target, aligned_empty, as_sharding, check_targets

# ---------------- which stored tensors make up each parameter, and whether a checkpoint has them
# all


Shape = tuple[int, ...]


class TensorSpec(NamedTuple):
    """A stored tensor, (out, in) if it is a matrix."""

    name: str
    shape: Shape


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
        slices: For each slice of the stack, the parts that lie side by side along its outputs;
            one slice where there is no stack.
        stacked: Whether the parameter has an axis for its slices.
        transposed: Whether it is (in, out).
    """

    slices: tuple[tuple[TensorSpec, ...], ...]
    stacked: bool
    transposed: bool

    @property
    def slice_shape(self) -> Shape:
        """Shape of a slice, as a parameter."""
        parts = self.slices[0]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return (len(self.slices), *self.slice_shape) if self.stacked else self.slice_shape


def alone(name: str, shape: Shape, *, transposed: bool = False) -> Leaf:
    """A parameter that is one stored tensor."""
    return Leaf(((TensorSpec(name, shape),),), stacked=False, transposed=transposed)


def check_tensors(
    stored: Mapping[str, Shape],
    leaves: Mapping[str, Leaf],
    where: str,
    *,
    what: str,
    repeats: Callable[[str], bool],
) -> None:
    """Compare a checkpoint's tensors with those of the layout.

    Args:
        stored: Shapes by name.
        leaves: Of the layout.
        where: Name of the checkpoint, for the error.
        what: Name of the model, for the error.
        repeats: Whether a tensor says nothing new (a tied head), so that it may be there.

    Raises:
        ValueError: tensors that are missing, not known or of another shape; every one by name.
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


# ----------------


@runtime_checkable
class Source(Protocol):
    """A checkpoint, in Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, floating."""
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
    """The tree of parameters, one leaf at a time.

    Memory:
        In main memory one stored tensor and the stacked leaf that it goes into, which on the
        CPU becomes the parameter as it is. With ``quantize`` one slice of a matching kernel.
    """
    chosen = _quantized(leaves, quantize)
    places = {path: _place(path, leaf.shape, sharding) for path, leaf in leaves.items()}
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
            value = _whole(source, leaf, dtype)
            value = jax.block_until_ready(jax.device_put(value, places[path]))
        _put(params, path, value)
    return params


def fill_shapes(
    leaves: Mapping[str, Leaf], *, dtype: np.dtype, quantize: str | None
) -> dict[str, Any]:
    """The same tree of ``jax.ShapeDtypeStruct``; nothing is read."""
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


def _whole(source: Source, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    whole = aligned_empty(leaf.shape, dtype)
    for number, parts in enumerate(leaf.slices):
        _write(source, parts, whole[number] if leaf.stacked else whole, leaf.transposed)
    return whole


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
    """Parts side by side along the outputs, which are the last axis if transposed."""
    out = out.T if transposed else out
    start = 0
    for part in parts:
        stop = start + part.shape[0]
        with np.errstate(over="ignore"):  # infinity, as on any device
            np.copyto(out[start:stop], source.read(part.name), casting="unsafe")
        start = stop


def _place(path: str, shape: Shape, sharding: LeafSharding | None) -> Any:
    where = sharding(path, shape) if callable(sharding) else sharding
    return None if where is None else as_sharding(where)


def _quantized(leaves: Mapping[str, Leaf], pattern: str | None) -> set[str]:
    """Paths of the stacked kernels that a pattern names."""
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
