"""Which stored tensors make up each parameter, and whether a checkpoint has them all."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

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
