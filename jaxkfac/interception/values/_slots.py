"""Slots: extra inputs that are propagated with a parameter, and windows of them.

If a program reads ``c W``, the gradient with respect to ``W`` is ``c`` times the gradient with
respect to ``c W``. A statistic of the gradients of ``c W`` therefore becomes one of ``W`` after
multiplication by a power of ``c``, and only the author of the statistic knows this power. Each
field of a record of statistics declares its power. A field without a declaration is an error,
because a wrong power would silently give a wrong number.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

if TYPE_CHECKING:
    from typing import Self

# ---------------- records of statistics


def entry(power: int | None, *, default: Any = dataclasses.MISSING) -> Any:
    """A field of a record of statistics.

    Args:
        power: The power with which a constant factor of the parameter multiplies the field: 2 for
            second moments, 1 for gradients, 0 for counts and for anything merely passed on.
            ``None`` for records inside, which declare their own.
        default: ``None`` for a field that a record may lack.
    """
    return dataclasses.field(default=default, metadata={"power": power})


@dataclasses.dataclass(frozen=True, eq=False)
class Statistic:
    """Base class of records of statistics, for which see :func:`statistic`.

    Attributes:
        by_example: For a record shaped like the parameter, whether the last axis is the examples.
    """

    by_example: ClassVar[bool] = False

    def only(self, like: "Statistic") -> "Self":
        """The record without the fields that ``like`` lacks."""
        gone = {f.name: None for f in dataclasses.fields(like) if getattr(like, f.name) is None}
        return dataclasses.replace(self, **gone)


AnyStatistic = TypeVar("AnyStatistic", bound=type[Statistic])


@dataclass_transform(frozen_default=True, field_specifiers=(entry,))
def statistic(cls: AnyStatistic) -> AnyStatistic:
    """Make a class a record of statistics: a frozen dataclass, and a pytree.

    Raises:
        ValueError: a field is no :func:`entry`, so that it declares no power.
    """
    record: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    for field in dataclasses.fields(record):
        if not field.metadata.keys() & {"power", "static"}:
            raise ValueError(
                f"{cls.__name__}.{field.name} declares no power: write {field.name}: Any = "
                "entry(power), with the power with which a constant times the parameter "
                "multiplies it"
            )
    return jax.tree_util.register_dataclass(record)


def times_constant(tree: PyTree, c: Shaped[Array, ""]) -> PyTree:
    """The records in a tree, of a parameter that the program reads multiplied by ``c``."""

    def times(value: PyTree, power: int | None) -> PyTree:
        if power is None:
            return times_constant(value, c)
        # Counts, and cotangents of products, do not change with the scale of the parameter.
        if power == 0:
            return value
        return jax.tree.map(lambda x: x * c.astype(x.dtype) ** power, value)

    def of_record(record: Any) -> Any:
        if not isinstance(record, Statistic):
            return record
        multiplied = {
            f.name: times(getattr(record, f.name), f.metadata["power"])
            for f in dataclasses.fields(record)
            if "power" in f.metadata
        }
        return dataclasses.replace(record, **multiplied)

    return jax.tree.map(of_record, tree, is_leaf=lambda x: isinstance(x, Statistic))


# ---------------- slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """What is propagated with a parameter to the handler of its uses.

    Attributes:
        sums: Zeros in the form of the statistics, a :func:`statistic`. The backward rule of a tap
            returns the statistics as their cotangent.
        constants: Arrays that the handler reads. Only fields of a :func:`statistic` in them are
            multiplied by constant factors of the parameter.
        chosen: For each choice of some rows on the way, which rows choose the parameter.
        picked: The entry of a stack that each row picks.
        derivative: If the program reads a function of the parameter, the derivative of that,
            element by element.
    """

    sums: Any = None
    constants: Any = None
    chosen: tuple[Any, ...] = ()
    picked: Any = None
    derivative: Any = None

    def times(self, c: Shaped[Array, ""]) -> "Slot":
        """The slot of the parameter multiplied by a constant."""
        sums, constants = times_constant((self.sums, self.constants), c)
        return dataclasses.replace(self, sums=sums, constants=constants)

    def entry_at(self, index: Int[Array, ""]) -> "Slot":
        """The slot of one entry of a stack."""
        sums, constants = jax.tree.map(
            lambda s: jax.lax.dynamic_index_in_dim(s, index, keepdims=False),
            (self.sums, self.constants),
        )
        return dataclasses.replace(self, sums=sums, constants=constants)


# ---------------- windows: slots for some iterations of a scan
#
# A slot of a scanned parameter has a row for each iteration. A window gathers only some of them, so
# that a budget of bytes suffices. The scan is not split, because slices of its operands would copy
# parameters: it runs in full, and its carry holds a buffer with the rows of the window. For an
# iteration inside the window the backward pass writes the row into the buffer's cotangent; for
# other iterations it computes no statistics. The start of the window is an ordinary value, so one
# compiled program serves every window.


_Place = tuple[Int[Array, ""], Bool[Array, ""]]  # row of the buffer; whether the window has it


@dataclasses.dataclass(frozen=True)
class Window:
    """Iterations ``start`` to ``start + size`` of a scan; rows past the end of the scan are empty.

    Args:
        start: First iteration, an integer or a traced value.
        size: Number of iterations.
    """

    start: int | Int[Array, ""]
    size: int

    def covers(self, iteration: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether the window contains an iteration."""
        return (iteration >= self.start) & (iteration < self.start + self.size)


def row_of(buffer: Slot, window: Window, iteration: Int[Array, ""]) -> tuple[Slot, Slot]:
    """The slot of one iteration, and the buffer for the next iteration.

    The values are zeros and the unchanged buffer. Where the window covers the iteration, the
    cotangent of the slot is written in place into the cotangent of the buffer.
    """
    like = jax.tree.map(lambda b: jax.ShapeDtypeStruct(b.shape[1:], b.dtype), buffer)

    @jax.custom_vjp
    def op(buffer: Slot, row: Int[Array, ""], inside: Bool[Array, ""]) -> tuple[Slot, Slot]:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like), buffer

    def forward(
        buffer: Slot, row: Int[Array, ""], inside: Bool[Array, ""]
    ) -> tuple[tuple[Slot, Slot], _Place]:
        return op(buffer, row, inside), (row, inside)

    def backward(saved: _Place, cotangents: tuple[Slot, Slot]) -> tuple[Slot, None, None]:
        row, inside = saved

        def write(
            rows: Shaped[Array, "size ..."], new: Shaped[Array, "..."]
        ) -> Shaped[Array, "size ..."]:
            old = jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(rows, jnp.where(inside, new, old), row, 0)

        return jax.tree.map(write, cotangents[1], cotangents[0]), None, None

    op.defvjp(forward, backward)
    row = jnp.clip(iteration - window.start, 0, window.size - 1)
    return op(buffer, row, window.covers(iteration))
