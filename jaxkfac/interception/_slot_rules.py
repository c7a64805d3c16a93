"""How slots are propagated through an equation of parameters: its rule, as for tangents."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._elements import (
    Elements,
    join_elements,
    move_elements,
    stack_elements,
    through_function,
)
from jaxkfac.interception._functions import JOINS, is_function
from jaxkfac.interception._lookups import entries_picked
from jaxkfac.interception._slots import CHOSEN, PICKED, Entries, Slot, scale_slot

Slots = dict[str, Slot | Elements]  # by layer


@dataclasses.dataclass(frozen=True)
class SlotRule:
    """The rule of an equation of parameters alone: a view, a function, or several side by side.

    Args:
        eqn: The equation.
        run: What it computes, of all operands.
        values: The operands.
        traced_index: The scan or dynamic index that takes an entry of a stack in it, if any.
        traced_indices: For each layer with a slot, the traced indices into its stack.
        entries: How the entries of slots follow their parameter.
        rows: Of a choice of rows, the axes along which they run.
        picks: Whether each row picks its own entry of a stack.
    """

    eqn: Eqn
    run: Callable[..., Any]
    values: Sequence[Any]
    traced_index: tuple[str, int] | None
    traced_indices: Mapping[str, set[tuple[str, int]]]
    entries: Entries
    rows: tuple[int, ...] | None = None
    picks: bool = False

    def propagate(self, in_slots: list[Slots]) -> list[Slots]:
        """The slots of each result, from those of each operand."""
        if self.eqn.primitive.name == "optimization_barrier":
            return in_slots
        outs: list[Slots] = [{} for _ in self.eqn.outvars]
        elements: dict[str, dict[int, Elements]] = collections.defaultdict(dict)
        for position, slots in enumerate(in_slots):
            for name, slot in slots.items():
                if isinstance(slot, Elements):
                    elements[name][position] = slot
                elif (moved := self._matrix(name, slot, position)) is not None:
                    for out in outs:
                        out[name] = moved
        for name, parts in elements.items():
            for out, moved in zip(outs, self._elements(parts), strict=True):
                out[name] = moved
        return outs

    def _matrix(self, name: str, slot: Slot, position: int) -> Slot | None:
        if self.rows is not None:
            over = tuple(d for d in range(self.values[0].ndim) if d not in self.rows)
            return {**slot, CHOSEN: (*slot.get(CHOSEN, ()), self.values[0].any(over))}
        if self.picks:
            return {**slot, PICKED: entries_picked(self.eqn, self.values)}
        if self.traced_index is None:
            return scale_slot(self.eqn, slot, position, self.values, self.entries)
        if self.traced_index not in self.traced_indices[name]:
            return None
        index = self.values[1 - position]
        beside = {key: slot[key] for key in (CHOSEN, PICKED) if key in slot}
        own = {key: part for key, part in slot.items() if key not in beside}
        taken = jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, index, keepdims=False), own)
        return taken | beside

    def _elements(self, parts: dict[int, Elements]) -> list[Elements]:
        if self.rows is not None:  # a row that does not choose it has no cotangent
            return list(parts.values())
        if is_function(self.eqn):
            return [through_function(self.eqn, self.run, parts, self.values, self.entries)]
        if self.eqn.primitive.name in JOINS:
            return [join_elements(self.eqn, parts, self.values, self.entries)]
        ((position, part),) = parts.items()
        return move_elements(self.eqn, part, position, self.values, self.entries)


def stacked_slots(slots: Slots, stacks: Mapping[str, Sequence[str | None]]) -> Slots:
    """Slots beside the operand of a scan, those of stacked parameters stacked likewise.

    Args:
        slots: The slots.
        stacks: For some layers, which layers' parameters make up a stack with theirs, in order.
    """
    joined = {name for names in stacks.values() for name in names}
    out: Slots = {name: slot for name, slot in slots.items() if name not in joined}
    for first, names in stacks.items():
        elements = [None if name is None else slots.get(name) for name in names]
        matrices = [slot if isinstance(slot, dict) else {} for slot in elements]
        if any(isinstance(slot, Elements) for slot in elements):
            out[first] = stack_elements([s if isinstance(s, Elements) else None for s in elements])
        elif any(matrices):
            out[first] = _stack_matrices(matrices)
    return out


def _stack_matrices(slots: Sequence[Slot]) -> Slot:
    """Zeros stand where a layer gathers less than another."""
    likes = {key: value for slot in reversed(slots) for key, value in slot.items()}
    zeros = jax.tree.map(jnp.zeros_like, likes)
    each = [{key: slot.get(key, zeros[key]) for key in likes} for slot in slots]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *each)
