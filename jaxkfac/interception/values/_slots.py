"""Slots: extra inputs that are propagated with a parameter, and windows of them.

If a program reads ``c W``, the gradient with respect to ``W`` is ``c`` times the gradient with
respect to ``c W``. A statistic of the gradients of ``c W`` therefore becomes one of ``W`` after
multiplication by a power of ``c``, and only the author of the statistic knows this power. Each
entry of a slot declares its power. An entry without a declaration is an error, because a wrong
power would silently give a wrong number.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Union

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

Slot = dict[str, PyTree]  # arrays, or their shapes, by entry

# Two keys that stand in a slot beside its declared entries: masks of the rows that choose the view,
# and the entry of a stack that each row picks.
CHOSEN, PICKED = "chosen", "picked"


class SlotEntry(NamedTuple):
    """How one entry of a slot is propagated with its parameter.

    Attributes:
        power: The power with which a constant factor of the parameter multiplies the entry: 2 for
            second moments, 1 for gradients, 0 for counts and for anything merely passed on.
        by_example: For a slot shaped like the parameter, whether its last axis is the examples.
    """

    power: int
    by_example: bool = False


# An entry that is a dictionary may declare its own entries.
Entries = Mapping[str, Union[SlotEntry, "Entries"]]


def check_entries(slots: Mapping[str, Slot], entries: Entries) -> None:
    """Refuse slots with an entry that is not declared.

    Raises:
        ValueError: an entry is not declared; the message names the layer and the entry.
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
