"""Slots: what is propagated with a parameter, and what a view of the parameter makes of it.

Where a program reads ``c W``, the gradient with respect to ``W`` is ``c`` times that with respect
to ``c W``. So a statistic of the gradients of ``c W`` is one of ``W`` once it is multiplied by a
power of ``c``, which only whoever defines the statistic knows. Each entry of a slot declares its
power, and one that declares none is an error: a wrong power would be a wrong number in silence.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Union

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

Slot = dict[str, PyTree]  # arrays, or their shapes, by entry

# Beside the entries of a slot, which rows a view of its parameter is for: those that it is chosen
# for, and which entry of a stack each of them picks.
CHOSEN, PICKED = "chosen", "picked"


class SlotEntry(NamedTuple):
    """How one entry of a slot follows its parameter.

    Attributes:
        power: With which power a constant that multiplies the parameter multiplies the entry: 2
            for second moments, 1 for gradients, 0 for counts and for what is only handed on.
        by_example: In a slot shaped like the parameter: whether the examples lie last.
    """

    power: int
    by_example: bool = False


# An entry that is itself a dictionary may declare what lies inside it.
Entries = Mapping[str, Union[SlotEntry, "Entries"]]


def check_entries(slots: Mapping[str, Slot], entries: Entries) -> None:
    """Refuse slots that hold what is declared nowhere.

    Raises:
        ValueError: naming the layer and the entry.
    """
    for layer, slot in slots.items():
        for key, value in slot.items():
            if key not in entries:
                raise ValueError(
                    f"the slot of layer {layer!r} holds {key!r}, which declares no SlotEntry: say "
                    "in entries= with which power a constant times the parameter multiplies it; "
                    f"declared are {sorted(entries)}"
                )
            inside = entries[key]
            if not isinstance(inside, SlotEntry):
                check_entries({layer: value}, inside)


# ---------------- windows: slots of a few iterations of a scan, so that a budget of bytes bounds
# them
#
# A slot of a scanned parameter has a row for each iteration. To gather some of them only, the
# scan is not split, because slices of its operands would be copies of parameters: it runs whole,
# and a buffer of the window's rows is in its carry. The backward pass writes the row of an
# iteration inside the window into the buffer's cotangent; statistics of other iterations are not
# computed. The window's start is an ordinary value, so one compiled program serves every window.


_Place = tuple[Int[Array, ""], Bool[Array, ""]]  # a row of the buffer; whether the window has it


@dataclasses.dataclass(frozen=True)
class Window:
    """Iterations ``start`` to ``start + size`` of a scan; those beyond its end are empty.

    Args:
        start: First iteration, an integer or a traced one.
        size: Their number.
    """

    start: int | Int[Array, ""]
    size: int

    def covers(self, iteration: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether the window holds an iteration."""
        return (iteration >= self.start) & (iteration < self.start + self.size)


def row_of(buffer: Slot, window: Window, iteration: Int[Array, ""]) -> tuple[Slot, Slot]:
    """The slot of one iteration, and the buffer for the next one.

    The values are zeros and the buffer itself. The cotangent of the slot is written into that
    of the buffer, in place, where the window covers the iteration.
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
