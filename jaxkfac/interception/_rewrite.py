"""Run a traced function with handlers in place of its layer uses.

Each layer has a *slot* (``Slot``): extra inputs. A slot is propagated with the variable that holds
its parameter, as a tangent is with its primal, down to the handler: through views, jit, checkpoint,
scan (stacked if the parameter is scanned, constant if it is constant), cond and shard_map.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxkfac._interpreter import Interpreter, Segment
from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    VarOrLiteral,
    call_kind,
    call_like,
    is_loop,
    num_selectors,
    of_operands,
    scan_counts,
    scan_like,
    states_placement,
)
from jaxkfac.interception._custom import run_beside
from jaxkfac.interception._elements import Elements, SlotRule, Slots, stacked_slots
from jaxkfac.interception._kind import Site, Use
from jaxkfac.interception._plan import Plan, plan_steps
from jaxkfac.interception._row_masks import RowMask, row_weights, where_chosen
from jaxkfac.interception.values._axes import Axes, AxisTable
from jaxkfac.interception.values._encoded import (
    DeferredParameter,
    Operand,
    bind,
    bind_view,
    refuse_deferred,
)
from jaxkfac.interception.values._slots import Slot, Window, row_of

# A function of the site and its operands that returns the equation's result. If rows pick entries
# of a stack, the operands end with the indices.
Handler = Callable[[Site, list[Any]], Any]


_NESTED_JITS = 24  # jits nested up to this depth stay jits; people write fewer


class Around(NamedTuple):
    """The context of an equation.

    Attributes:
        masks: Which rows exist.
        active: For layers in a window, whether it covers this iteration.
        computed: The slots of weights that are computed from parameters.
        depth: Number of calls around the equation.
    """

    masks: list[RowMask]
    active: dict[str, Bool[Array, ""]]
    computed: dict[str, Slot]
    depth: int = 0


class Tapped(NamedTuple):
    """A value of the program, and the slots of the parameters that are seen in it."""

    x: Operand
    slots: Slots


@dataclasses.dataclass(frozen=True)
class Rewriter(Interpreter[Tapped]):
    """Runs a plan with a handler.

    Args:
        table: The axis atoms of the analysis.
        handler: Called for every equation with a tapped use; returns its result.
        marks: The axes of every mark of the program.
        traced_indices: For each layer with a slot, the traced indices into its stack.
        windows: For layers with a window, the iterations for which their slot has rows.
        encoded: Paths of the parameters that the program sees as ``DeferredParameter``.
    """

    table: AxisTable
    handler: Handler
    marks: tuple[Axes, ...]
    traced_indices: Mapping[str, set[tuple[str, int]]]
    windows: Mapping[str, Window]
    encoded: frozenset[str] = frozenset()

    def rewrite(
        self, plan: Plan, args: Sequence[Operand], slots: Sequence[Slots], around: Around
    ) -> list[Any]:
        """Outputs of the plan's jaxpr; ``args`` and ``slots`` correspond to its inputs."""
        within = plan, around._replace(masks=list(around.masks))
        outs = self.run(plan.jaxpr, plan.consts, list(map(Tapped, args, slots)), within)
        return [x for x, _ in outs]

    def constant(self, operand: VarOrLiteral, value: Any) -> Tapped:
        return Tapped(value, {})

    def steps(self, jaxpr: Jaxpr, within: tuple[Plan, Around]) -> Iterable[Segment | int]:
        return plan_steps(within[0], self.encoded)

    def segment(self, segment: Segment, ins: list[Tapped]) -> list[Tapped]:
        values = [x for x, _ in ins]
        refuse_deferred(zip(segment.invars, values, strict=True), segment.reader_of)
        return [Tapped(x, {}) for x in segment.run(*values)]

    def equation(
        self, eqn: Eqn, ins: list[Tapped], position: int, within: tuple[Plan, Around]
    ) -> list[Tapped]:
        plan, around = within
        values = [x for x, _ in ins]
        if position in plan.uses:
            out = [self._use(eqn, plan.uses[position], ins, around)]
        elif position in plan.marks:
            mask: Any = values[1]
            around.masks.append(RowMask(mask, plan.marks[position].axes, complete=False))
            out = [bind(eqn)(*values)]  # kept: a later trace of this program reads the mark too
        elif position in plan.views:
            run = of_operands(eqn)
            rows, picks = plan.choices.get(position), position in plan.lookups
            index, into = plan.views[position], self.traced_indices
            rule = SlotRule(eqn, run, values, index, into, rows, picks)
            out = bind_view(eqn, values, run)
            return list(map(Tapped, out, rule.propagate([slots for _, slots in ins])))
        elif plan.calls[position].exports_views or _is_too_deep(eqn, around):
            # A call returns no slots, so a jit that returns a view (an indexing helper) is run in
            # place, as is a deeply nested one.
            inner, masks = plan.calls[position], list(around.masks)
            deeper = around._replace(masks=masks, depth=around.depth + 1)
            return self.run(inner.jaxpr, inner.consts, ins, (inner, deeper))
        else:
            out = self._call(eqn, plan.calls[position], plan.bodies(position), ins, around)
        return [Tapped(x, {}) for x in out]

    def _use(self, eqn: Eqn, uses: list[Use], ins: list[Tapped], around: Around) -> Any:
        values = [x for x, _ in ins]
        not_encoded = [(u, values[u.at.operand]) for u in uses if not u.kind.reads.encoded]
        refuse_deferred(not_encoded, lambda use: f"`{eqn.primitive.name}` ({use.kind.name})")
        # A layer that this pass does not gather has no slot.
        uses = [u for u in uses if u.layer in self.traced_indices]
        if not uses:
            return bind(eqn)(*values)
        beside = [
            around.computed if u.view.source.computed_from else ins[u.at.operand].slots
            for u in uses
        ]
        slots = [_at_use(its[u.layer or ""]) for u, its in zip(uses, beside, strict=True)]
        chosen = [
            [
                RowMask(mask, [axis for _, axis in choice], complete=False)
                for mask, choice in zip(s.chosen, u.view.chosen, strict=False)
            ]
            for s, u in zip(slots, uses, strict=True)
        ]
        # Biases and scales need the rows too: they square a gradient for each row, and that of an
        # absent row need not be zero.
        rows = [
            where_chosen(
                self.table,
                u,
                row_weights(self.table, u, [*around.masks, *chosen_rows], self.marks),
                chosen_rows,
            )
            for u, chosen_rows in zip(uses, chosen, strict=True)
        ]
        picked = [s.picked for s in slots if s.picked is not None][:1]  # one lookup's, for all uses
        active = [around.active.get(u.layer or "") for u in uses]
        return self.handler(Site(eqn, uses, slots, rows, active, self.table), [*values, *picked])

    def _call(
        self, eqn: Eqn, inner: Plan, bodies: list[Plan], ins: list[Tapped], around: Around
    ) -> list[Any]:
        tapped = tapped_layers(inner)
        values = [x for x, _ in ins]
        in_slots = [{k: s for k, s in d.items() if k in tapped} for _, d in ins]
        if is_loop(eqn):
            return self._scan(eqn, inner, values, in_slots, around)
        if call_kind(eqn) == "custom":
            refuse_deferred(enumerate(values), lambda _: f"`{eqn.primitive.name}`")
            beside = functools.partial(self.rewrite, inner, around=around)
            return run_beside(eqn, beside, values, in_slots)
        if call_kind(eqn) == "shard_map":
            operands = zip(values, eqn.invars, inner.jaxpr.invars, strict=True)
            split = [(x, x) for x, v, w in operands if v.aval.shape != w.aval.shape]
            refuse_deferred(split, lambda _: "`shard_map`, which splits it over mesh axes")
        # A deferred parameter has no sharding and no donation, so it is passed with the slots.
        deferred = [v if isinstance(v, DeferredParameter) else None for v in values]
        arrays = [None if isinstance(v, DeferredParameter) else v for v in values]
        masks = around.masks
        computed = {name: slot for name, slot in around.computed.items() if name in tapped}
        extras, tree = jax.tree.flatten(
            (in_slots, [m.mask for m in masks], around.active, computed, deferred)
        )

        def run(plan: Plan, *flat: Any) -> list[Any]:
            first = num_selectors(eqn)
            number = len(arrays) - first
            slots, mask_values, active, computed, deferred_values = jax.tree.unflatten(
                tree, flat[number:]
            )
            operands = [
                h if h is not None else v
                for v, h in zip(flat[:number], deferred_values[first:], strict=True)
            ]
            inside = [
                RowMask(v, m.axes, complete=m.complete)
                for v, m in zip(mask_values, masks, strict=True)
            ]
            around_it = Around(inside, active, computed, around.depth + 1)
            return self.rewrite(plan, operands, slots[first:], around_it)

        runs = [functools.partial(run, plan) for plan in bodies]
        return call_like(eqn, runs, arrays, extras)

    def _scan(
        self, eqn: Eqn, inner: Plan, values: list[Operand], in_slots: list[Slots], around: Around
    ) -> list[Any]:
        (nc, nk), length = scan_counts(eqn), eqn.params["length"]
        values = list(values)
        for k, use in inner.entries.items():  # states that the first iteration starts from
            values[k] = self._use(use.at.eqn, [use], [Tapped(values[k], in_slots[k])], around)
        fixed = in_slots[: nc + nk]  # a parameter carried unchanged is a constant
        stacks = {
            u.layer: u.layers
            for u in inner.all_uses()
            if u.layer is not None
            and u.view.source.members
            and u.view.source.stacked_for == inner.scan
        }
        scanned = {
            u.layer
            for u in inner.all_uses()
            if u.view.source.computed_from and ("scan", inner.scan) in u.view.source.traced_indices
        }
        in_slots = [
            *in_slots[: nc + nk],
            *(stacked_slots(d, stacks) for d in in_slots[nc + nk :]),
            {name: s for name, s in around.computed.items() if name in scanned},
        ]
        opening = self.windows.keys() - around.active.keys()  # an inner scan is inside the window
        rows = [
            {
                k: s.scanned(length) if isinstance(s, Elements) else s
                for k, s in d.items()
                if k not in opening
            }
            for d in in_slots[nc + nk :]
        ]
        buffers = [{k: s for k, s in d.items() if k in opening} for d in in_slots[nc + nk :]]
        iterations = jnp.arange(length) if any(buffers) else None

        def body(carry: tuple, scanned: tuple) -> tuple[tuple, list[Any]]:
            (state, buffers), (xs, rows, iteration) = carry, scanned
            slots, after, active = [], [], dict(around.active)
            for windowed, row_slots in zip(buffers, rows, strict=True):
                windowed_rows = {
                    k: row_of(b, self.windows[k], iteration) for k, b in windowed.items()
                }
                slots.append({**row_slots, **{k: row for k, (row, _) in windowed_rows.items()}})
                after.append({k: buffer for k, (_, buffer) in windowed_rows.items()})
                active.update({k: self.windows[k].covers(iteration) for k in windowed})
            computed = around.computed | slots.pop()
            inside = around._replace(active=active, computed=computed, depth=around.depth + 1)
            out = self.rewrite(inner, [*values[:nc], *state, *xs], [*fixed, *slots], inside)
            return (out[:nk], after), out[nk:]

        scanned = [
            v.scanned() if isinstance(v, DeferredParameter) else v for v in values[nc + nk :]
        ]
        (state, _), ys = scan_like(
            eqn, body, (values[nc : nc + nk], buffers), (scanned, rows, iterations)
        )
        return [*state, *ys]


def _is_too_deep(eqn: Eqn, around: Around) -> bool:
    """Whether a jit is run in place, so that a level of calls takes one Python frame.

    As a jit it takes 13 frames, and 10 more when it is differentiated: 77 levels would exhaust
    Python's limit of 1,000 frames, while JAX itself traces 120.
    """
    deep = around.depth >= _NESTED_JITS and call_kind(eqn) == "jit"
    return deep and not states_placement(eqn)


def _at_use(slot: Slot | Elements) -> Slot:
    return slot.at_use() if isinstance(slot, Elements) else slot


def tapped_layers(plan: Plan) -> set[str]:
    """Names of the layers with a tapped use inside a plan."""
    return {name for u in plan.all_uses() for name in u.layers if name is not None}
