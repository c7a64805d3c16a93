"""Windows: slots of a few iterations of a scan, so that a budget of bytes bounds them.

A slot of a scanned parameter has a row for each iteration. To gather some of them only, the
scan is not split, because slices of its operands would be copies of parameters: it runs whole,
and a buffer of the window's rows is in its carry. The backward pass writes the row of an
iteration inside the window into the buffer's cotangent; statistics of other iterations are not
computed. The window's start is an ordinary value, so one compiled program serves every window.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxkfac.interception._slots import Slot
from jaxkfac.interception._values import Use

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


def scanned_by(uses: list[Use]) -> tuple[str, int] | None:
    """The one scan over the leading stacked axis of a layer, if there is one."""
    if any(u.view.members for u in uses):  # an iteration is another layer's
        return None
    found = {u.view.consumed[0].traced_index if u.view.consumed else ("none", 0) for u in uses}
    (scan, *others) = found
    return scan if not others and scan[0] == "scan" else None


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
