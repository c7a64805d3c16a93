"""How slots are propagated with a parameter through the equations that read it."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Shaped

from jaxkfac._jaxpr_compat import Eqn, bind, cast_varying, reshape_groups
from jaxkfac.interception._functions import JOINS, Lookup, is_function
from jaxkfac.interception._views import SAME_ELEMENTS, is_negated
from jaxkfac.interception.values._encoded import Operand
from jaxkfac.interception.values._index import Index, shape_of, slices
from jaxkfac.interception.values._slots import Slot, Statistic

# ---------------- slots shaped like the parameter
#
# These slots go through the same equations as the elements of the parameter. Behind an elementwise
# function such as ``exp(w)`` the slot stays unchanged, and the derivative of the function goes with
# it. The derivative is applied at the use, where the gradient is known for each position. A
# parameter that enters an element twice, as in ``w * sigmoid(w)``, needs one derivative there: the
# sum over its occurrences must be formed before anything is squared.


class Elements(NamedTuple):
    """The slot of one layer that goes with a value in which its parameter is seen.

    Attributes:
        sums: Arrays shaped like the value. By example, axes along which the value was broadcast may
            have size one, because their elements are sums over the broadcast.
        derivative: Derivative of the value with respect to the parameter, element by element;
            ``None`` stands for 1.
    """

    sums: Any
    derivative: Array | None = None

    @classmethod
    def of(cls, sums: Any, index: Index, shape: Sequence[int]) -> "Elements":
        """The slot of ``parameter[index]``, extended with zeros to the parameter's ``shape``."""
        if not index:
            return cls(sums)
        lead = len(shape_of(index, shape))

        def extended(s: Array) -> Array:
            return jnp.zeros((*shape, *s.shape[lead:]), s.dtype).at[slices(index)].set(s)

        return cls(jax.tree.map(extended, sums))

    @property
    def by_example(self) -> bool:
        """Whether the last axis of each array is the examples."""
        return isinstance(self.sums, Statistic) and self.sums.by_example

    def scanned(self, length: int) -> "Elements":
        """Broadcast so that the first axis has one entry for each iteration of a scan."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape[1:])), self)

    def at_use(self) -> Slot:
        """The slot in the form that a handler gets."""
        return Slot(self.sums, derivative=self.derivative)


def through_function(
    eqn: Eqn,
    run: Callable[..., Any],
    slots_by_operand: Mapping[int, Elements],
    values: Sequence[ArrayLike],
) -> Elements:
    """The slot behind an elementwise function: its derivative becomes that of the result.

    Args:
        eqn: The equation.
        run: The equation as a function of all operands.
        slots_by_operand: The slot of each operand in which the parameter is seen, by position. The
            parameter's elements have the same arrangement in all of them.
        values: The operands.
    """
    # Only statistics read this derivative, so it is not differentiated with the loss.
    values = [jax.lax.stop_gradient(jnp.asarray(v)) for v in values]
    shape = eqn.outvars[0].aval.shape

    def of_parameter(*arrays: Array) -> Array:
        array_of = dict(zip(slots_by_operand, arrays, strict=True))
        (out,) = jax.tree.leaves(run(*[array_of.get(i, v) for i, v in enumerate(values)]))
        return out

    tangents = [
        jnp.ones_like(values[i])
        if elements.derivative is None
        else jnp.broadcast_to(elements.derivative, values[i].shape).astype(values[i].dtype)
        for i, elements in slots_by_operand.items()
    ]
    # All occurrences of the parameter move together: one JVP is the sum over them.
    derivative = jax.jvp(of_parameter, [values[i] for i in slots_by_operand], tangents)[1]
    position, elements = next(iter(slots_by_operand.items()))
    if values[position].shape == shape:
        return Elements(elements.sums, derivative)

    def spread(s: Array) -> Array:
        if elements.by_example:  # axes that are broadcast stay at size one
            return s.reshape(*(1,) * (len(shape) + 1 - s.ndim), *s.shape)
        return jnp.broadcast_to(s, shape)

    return Elements(jax.tree.map(spread, elements.sums), derivative)


def move_elements(
    eqn: Eqn, elements: Elements, position: int, values: Sequence[ArrayLike]
) -> list[Elements]:
    """The slot of each result of a view.

    Args:
        eqn: The view; the entries of the slot go through the same equation.
        elements: The slot of the operand.
        position: Position of the parameter among the operands.
        values: The operands.
    """
    by_example = elements.by_example
    move = _move_by_example if by_example else _move

    def moved(x: Array) -> list[Array]:
        return move(eqn, x, position, values)

    arrays, form = jax.tree.flatten(elements.sums)
    # A slot without sums, whose layer gathers nothing, has none for any result.
    by_result = zip(*map(moved, arrays), strict=True) if arrays else [()] * len(eqn.outvars)
    derivatives: list[Any] = [None] * len(eqn.outvars)
    if elements.derivative is not None:
        derivative = elements.derivative
        derivatives = moved(derivative[..., None] if by_example else derivative)
        derivatives = [d[..., 0] if by_example else d for d in derivatives]
    return [
        Elements(form.unflatten(result), d)
        for result, d in zip(by_result, derivatives, strict=True)
    ]


def join_elements(
    eqn: Eqn,
    slots_by_operand: Mapping[int, Elements],
    values: Sequence[ArrayLike],
) -> Elements:
    """The slot behind parameters put side by side; it is zero where the others are."""
    if eqn.primitive.name == "pad":
        return move_elements(eqn, slots_by_operand[0], 0, values)[0]
    lead = [jnp.shape(v) for v in values]
    first = next(iter(slots_by_operand.values()))
    by_example = first.by_example

    def joined(arrays: Mapping[int, Array], tail: tuple[int, ...], dtype: DTypeLike) -> Array:
        arrays_in_full = [
            jnp.broadcast_to(arrays[i], (*shape, *tail))
            if i in arrays
            else jnp.zeros((*shape, *tail), dtype)
            for i, shape in enumerate(lead)
        ]
        if eqn.primitive.name == "stack":
            return jnp.stack(arrays_in_full, eqn.params["axis"])
        return jnp.concatenate(arrays_in_full, eqn.params["dimension"])

    def of_operands(*arrays: Array) -> Array:
        tail = arrays[0].shape[-1:] if by_example else ()
        return joined(dict(zip(slots_by_operand, arrays, strict=True)), tail, arrays[0].dtype)

    sums = jax.tree.map(of_operands, *(elements.sums for elements in slots_by_operand.values()))
    if all(elements.derivative is None for elements in slots_by_operand.values()):
        return Elements(sums)
    ones = {i: jnp.ones((), jnp.result_type(values[i])) for i in slots_by_operand}
    derivatives = {
        i: ones[i] if elements.derivative is None else elements.derivative
        for i, elements in slots_by_operand.items()
    }
    return Elements(sums, joined(derivatives, (), next(iter(derivatives.values())).dtype))


def stack_elements(layer_slots: Sequence[Elements | None]) -> Elements:
    """One slot for the layers of a stack: each layer's slot is zero in the entries of the others.

    ``None`` stands for a layer that has no slot.
    """
    # A parameter that is in the stack twice has one slot, which covers both of its entries.
    distinct_slots = list(
        {id(elements): elements for elements in layer_slots if elements is not None}.values()
    )
    sums = jax.tree.map(
        lambda *x: sum(x[1:], x[0]), *[elements.sums for elements in distinct_slots]
    )
    like = next((p.derivative for p in distinct_slots if p.derivative is not None), None)
    if like is None:
        return Elements(sums)
    rows = [
        jnp.ones_like(like[k])
        if elements is None or elements.derivative is None
        else elements.derivative[k]
        for k, elements in enumerate(layer_slots)
    ]
    return Elements(sums, jnp.stack(rows))


def _move_by_example(
    eqn: Eqn, x: Shaped[Array, "... n"], position: int, values: Sequence[ArrayLike]
) -> list[Array]:
    if eqn.primitive.name == "broadcast_in_dim":
        shape = [1] * (len(eqn.params["shape"]) + 1)
        for d, size in zip(eqn.params["broadcast_dimensions"], x.shape[:-1], strict=True):
            shape[d] = size
        return [x.reshape(*shape[:-1], x.shape[-1])]
    if eqn.primitive.name == "tile":
        copies = zip(eqn.params["reps"], x.shape[:-1], strict=True)
        return [jnp.tile(x, [*(1 if size == 1 else r for r, size in copies), 1])]
    full = (*jnp.shape(values[position]), x.shape[-1])
    if eqn.primitive.name == "reshape" and not eqn.params.get("dimensions") and x.size:
        return [_reshaped(x, full[:-1], eqn.outvars[0].aval.shape)]
    if x.shape != full and eqn.primitive.name not in _KEEPS_BROADCAST:
        x = jnp.broadcast_to(x, full)
    return jax.vmap(lambda one: _move(eqn, one, position, values), in_axes=-1, out_axes=-1)(x)


def _reshaped(
    x: Shaped[Array, "... n"], before: Sequence[int], after: Sequence[int]
) -> Shaped[Array, "... n"]:
    """A slot by example behind a reshape: what was broadcast along all merged axes stays so."""
    full, shape = [], []
    for ins, outs in reshape_groups(before, after):
        broadcast = all(x.shape[d] == 1 for d in ins)
        full += [x.shape[d] if broadcast else before[d] for d in ins]
        shape += [1 if broadcast else after[d] for d in outs]
    return jnp.broadcast_to(x, (*full, x.shape[-1])).reshape(*shape, x.shape[-1])


_KEEPS_BROADCAST = (SAME_ELEMENTS - {"pvary", "pcast"}) | {"transpose"}


def _move(
    eqn: Eqn, x: Shaped[Array, "..."], position: int, values: Sequence[ArrayLike]
) -> list[Array]:
    name = eqn.primitive.name
    # A slot keeps its own dtype and sharding. It must vary over the mesh axes over which its
    # parameter does, so that its cotangent is summed over the same devices.
    if name in ("pvary", "pcast"):  # one by example varies from the start, and is cast no more
        return [cast_varying(x, eqn.outvars[0].aval)]
    if name in SAME_ELEMENTS:
        return [x]
    if name == "pad":
        values = [values[0], jnp.zeros((), x.dtype)]
    operands = [x if i == position else v for i, v in enumerate(values)]
    out = bind(eqn)(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]


def scale_slot(eqn: Eqn, slot: Slot, position: int, values: Sequence[Operand]) -> Slot:
    """The slot behind a view of the operand at ``position``, multiplied by a scalar constant.

    Behind an elementwise function the value is no matrix of the parameter, so no use reads the
    slot, and the function returns it unchanged.
    """
    name = eqn.primitive.name
    if is_negated(eqn, position):
        return slot.times(jnp.asarray(-1.0))
    # `w / c` is a multiple of w, and `c / w` is none.
    if name in ("mul", "div") and position <= (name == "mul"):
        # The constant may be data without the examples, whose gradient no slot may change.
        c = jax.lax.stop_gradient(jnp.asarray(values[1 - position]))
        if c.size == 1:
            c = c.reshape(())
            c = jnp.abs(c) if jnp.iscomplexobj(c) else c  # what remains of it is the view's phase
            return slot.times(c if name == "mul" else 1 / c)
    return slot


# ---------------- the rule by which an equation of parameters propagates slots
#
# It plays the role that a JVP rule plays for tangents.


Slots = dict[str, Slot | Elements]  # by layer


@dataclasses.dataclass(frozen=True)
class SlotRule:
    """The rule of an equation of parameters alone: a view, a function, or several side by side.

    Args:
        eqn: The equation.
        run: The equation as a function of all operands.
        values: The operands.
        traced_index: The scan or dynamic index by which it selects an entry of a stack, if any.
        traced_indices: For each layer with a slot, the traced indices into its stack.
        rows: For a choice of rows, the axes along which the rows run.
        picks: Whether each row picks its own entry of a stack.
    """

    eqn: Eqn
    run: Callable[..., Any]
    values: Sequence[Any]
    traced_index: tuple[str, int] | None
    traced_indices: Mapping[str, set[tuple[str, int]]]
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
        for name, slots_by_operand in elements.items():
            for out, moved in zip(outs, self._elements(slots_by_operand), strict=True):
                out[name] = moved
        return outs

    def _matrix(self, name: str, slot: Slot, position: int) -> Slot | None:
        if self.rows is not None:
            over = tuple(d for d in range(self.values[0].ndim) if d not in self.rows)
            return dataclasses.replace(slot, chosen=(*slot.chosen, self.values[0].any(over)))
        if self.picks:
            lookup = Lookup.of(self.eqn)
            assert lookup is not None
            return dataclasses.replace(slot, picked=lookup.entries(self.eqn, self.values))
        if self.traced_index is None:
            return scale_slot(self.eqn, slot, position, self.values)
        # No use of the layer is behind this index, so its slot has no axis to select from.
        if self.traced_index not in self.traced_indices[name]:
            return None
        # The primitive moves an index below zero to zero; the function would count it from the end.
        return slot.entry_at(jnp.maximum(self.values[1 - position], 0))

    def _elements(self, slots_by_operand: dict[int, Elements]) -> list[Elements]:
        if self.rows is not None:  # a row that does not choose it has no cotangent
            return list(slots_by_operand.values())
        if is_function(self.eqn):
            return [through_function(self.eqn, self.run, slots_by_operand, self.values)]
        if self.eqn.primitive.name in JOINS:
            return [join_elements(self.eqn, slots_by_operand, self.values)]
        ((position, elements),) = slots_by_operand.items()
        return move_elements(self.eqn, elements, position, self.values)


def stacked_slots(slots: Slots, stacks: Mapping[str, Sequence[str | None]]) -> Slots:
    """Slots for the operands of a scan; the slots of stacked parameters are stacked too.

    Args:
        slots: The slots by layer.
        stacks: For the first layer of each stack, the layers of the stack in order.
    """
    joined = {name for names in stacks.values() for name in names}
    out: Slots = {name: slot for name, slot in slots.items() if name not in joined}
    for first, names in stacks.items():
        elements = [None if name is None else slots.get(name) for name in names]
        matrices = [slot if isinstance(slot, Slot) else None for slot in elements]
        if any(isinstance(slot, Elements) for slot in elements):
            out[first] = stack_elements([s if isinstance(s, Elements) else None for s in elements])
        elif any(slot is not None for slot in matrices):
            out[first] = _stack_matrices(matrices)
    return out


def _stack_matrices(slots: Sequence[Any]) -> Any:
    """A stack of slots; zeros fill the entries that a layer does not gather."""
    first = next((slot for slot in slots if slot is not None), None)
    if isinstance(first, Slot | Statistic):
        stacked = {
            f.name: _stack_matrices([s if s is None else getattr(s, f.name) for s in slots])
            for f in dataclasses.fields(first)
            if not f.metadata.get("static")
        }
        return dataclasses.replace(first, **stacked)
    zeros = jax.tree.map(jnp.zeros_like, first)
    full_slots = [zeros if slot is None else slot for slot in slots]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *full_slots)
