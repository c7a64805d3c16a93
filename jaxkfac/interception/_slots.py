"""Slots: what rides along with a parameter, and what a view of the parameter makes of it.

Where a program reads ``c W``, the gradient with respect to ``W`` is ``c`` times that with respect
to ``c W``. So a statistic of the gradients of ``c W`` is one of ``W`` once it is multiplied by a
power of ``c``, which only whoever defines the statistic knows. Each entry of a slot declares its
power, and one that declares none is an error: a wrong power would be a wrong number in silence.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree, Shaped

from jaxkfac.interception import _compat
from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._encoded import Operand
from jaxkfac.interception._views import SAME_ELEMENTS, is_negated

Slot = dict[str, PyTree]  # arrays, or their shapes, by entry
Slots = dict[str, Slot]  # by layer

CHOSEN = "chosen"  # beside the entries of a slot: which rows a view of its parameter is chosen for


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


def scale_slot(
    eqn: Eqn, slot: Slot, position: int, values: Sequence[Operand], entries: Entries
) -> Slot:
    """A slot behind a view of the operand at ``position``: a scalar constant multiplies it."""
    name, chosen = eqn.primitive.name, slot.get(CHOSEN)
    if chosen is not None:
        slot = {key: part for key, part in slot.items() if key != CHOSEN}
        return {**scale_slot(eqn, slot, position, values, entries), CHOSEN: chosen}
    if is_negated(eqn, position):
        return _times(slot, jnp.asarray(-1.0), entries)
    if name not in ("mul", "div"):
        return slot
    c = jax.lax.stop_gradient(jnp.asarray(values[1 - position])).reshape(())  # may be data
    return _times(slot, c if name == "mul" else 1 / c, entries)


def _times(slot: Slot, c: Shaped[Array, ""], entries: Entries) -> Slot:
    def times(part: PyTree[ArrayLike], entry: SlotEntry | Entries) -> PyTree[ArrayLike]:
        if not isinstance(entry, SlotEntry):
            return _times(part, c, entry)
        if entry.power == 0:
            return part
        return jax.tree.map(lambda x: x * c.astype(x.dtype) ** entry.power, part)

    return {key: times(part, entries[key]) for key, part in slot.items()}


def move_elements(
    eqn: Eqn,
    slot: Mapping[str, Shaped[Array, "..."]],
    position: int,
    values: Sequence[ArrayLike],
    entries: Entries,
) -> dict[str, list[Shaped[Array, "..."]]]:
    """For each entry of a slot shaped like the parameter, what each result of a view has of it.

    Args:
        eqn: The view: the entry goes through the same equation.
        slot: The slot.
        position: Of the parameter among the operands.
        values: The operands.
        entries: What the entries declare.
    """
    flat = {key: entry for key, entry in entries.items() if isinstance(entry, SlotEntry)}
    return {key: _move(eqn, flat[key], s, position, values) for key, s in slot.items()}


def _move(
    eqn: Eqn,
    entry: SlotEntry,
    slot: Shaped[Array, "..."],
    position: int,
    values: Sequence[ArrayLike],
) -> list[Shaped[Array, "..."]]:
    if not entry.by_example:
        return _move_one(eqn, entry, slot, position, values)
    # Broadcast axes are kept at size one as long as that is possible: their elements are sums
    # over what was broadcast, and no use needs them apart.
    if eqn.primitive.name == "broadcast_in_dim":
        shape = [1] * (len(eqn.params["shape"]) + 1)
        for d, size in zip(eqn.params["broadcast_dimensions"], slot.shape[:-1], strict=True):
            shape[d] = size
        return [slot.reshape(*shape[:-1], slot.shape[-1])]
    full = (*jnp.shape(values[position]), slot.shape[-1])
    if slot.shape != full and eqn.primitive.name not in _KEEPS_BROADCAST:
        slot = jnp.broadcast_to(slot, full)
    return jax.vmap(
        lambda part: _move_one(eqn, entry, part, position, values), in_axes=-1, out_axes=-1
    )(slot)


_KEEPS_BROADCAST = (SAME_ELEMENTS - {"pvary", "pcast"}) | {
    "transpose",
    "mul",
    "div",
    "neg",
    "select_n",
}


def _move_one(
    eqn: Eqn,
    entry: SlotEntry,
    slot: Shaped[Array, "..."],
    position: int,
    values: Sequence[ArrayLike],
) -> list[Shaped[Array, "..."]]:
    name = eqn.primitive.name
    if name in ("mul", "div"):
        constant = jax.lax.stop_gradient(jnp.asarray(values[1 - position]))  # may be data
        constant = constant.astype(slot.dtype) ** entry.power
        return [slot * constant if name == "mul" else slot / constant]
    if is_negated(eqn, position) and entry.power % 2:
        slot = -slot
    if name in ("neg", "select_n"):  # rows that do not choose it have no cotangent
        return [slot]
    if name in ("add", "sub", "add_any"):
        return [jnp.broadcast_to(slot, eqn.outvars[0].aval.shape)]
    if name in SAME_ELEMENTS and name not in ("pvary", "pcast"):
        return [slot]
    if name == "pad":
        values = [values[0], jnp.zeros((), slot.dtype)]
    operands = [slot if i == position else v for i, v in enumerate(values)]
    out = _compat.bind(eqn)(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]
