"""Run a traced function with handlers in place of its layer uses.

Each layer has a *slot* (``Slot``): extra inputs. A slot is propagated with the variable that holds
its parameter, as a tangent is with its primal, down to the handler: through views, jit, checkpoint,
scan (stacked if the parameter is scanned, constant if it is constant), cond and shard_map.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool

from jaxkfac import _jaxpr_compat
from jaxkfac._jaxpr_compat import Eqn, Literal, Var
from jaxkfac.interception._custom import run_beside
from jaxkfac.interception._elements import Elements, SlotRule, Slots, stacked_slots
from jaxkfac.interception._kind import Site, Use
from jaxkfac.interception._plan import Plan, Segment, steps_of
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


@dataclasses.dataclass(frozen=True)
class Rewriter:
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

    def run(
        self, plan: Plan, args: Sequence[Operand], slots: Sequence[Slots], around: Around
    ) -> list[Any]:
        """Outputs of the plan's jaxpr; ``args`` and ``slots`` correspond to its inputs."""
        return self._run(plan, args, slots, around)[0]

    def _run(
        self, plan: Plan, args: Sequence[Operand], slots: Sequence[Slots], around: Around
    ) -> tuple[list[Operand], list[Slots]]:
        """The outputs, and the slots of the outputs that are views."""
        env: dict[Var, Any] = dict(zip(plan.jaxpr.constvars, plan.consts, strict=True))
        env.update(zip(plan.jaxpr.invars, args, strict=True))
        slot_env = {v: s for v, s in zip(plan.jaxpr.invars, slots, strict=True) if s}
        around = around._replace(masks=list(around.masks))

        def read(operand: Var | Literal) -> Any:
            return operand.val if isinstance(operand, Literal) else env[operand]

        for step in steps_of(plan, self.encoded):
            if isinstance(step, Segment):
                refuse_deferred([(v, env[v]) for v in step.invars], step.reader_of)
                out = step.run(*[env[v] for v in step.invars])
                env.update(zip(step.outvars, out, strict=True))
                continue
            eqn = plan.jaxpr.eqns[step]
            values = [read(v) for v in eqn.invars]
            in_slots = [slot_env.get(v, {}) if _jaxpr_compat.is_var(v) else {} for v in eqn.invars]
            if step in plan.uses:
                out = [self._use(eqn, plan.uses[step], values, in_slots, around)]
            elif step in plan.marks:
                around.masks.append(RowMask(values[1], plan.marks[step].axes, complete=False))
                out = [bind(eqn)(*values)]  # kept: a later trace of this program reads the mark too
            elif step in plan.views:
                run = _jaxpr_compat.of_operands(eqn, plan.jaxpr)
                out = bind_view(eqn, values, run)
                rows, picks = plan.choices.get(step), step in plan.lookups
                index, into = plan.views[step], self.traced_indices
                rule = SlotRule(eqn, run, values, index, into, rows, picks)
                out_slots = rule.propagate(in_slots)
                slot_env.update((v, s) for v, s in zip(eqn.outvars, out_slots, strict=True) if s)
            elif plan.calls[step].exports_views or _is_too_deep(eqn, around):
                # A call returns no slots, so a jit that returns a view (an indexing helper) is run
                # in place, as is a deeply nested one.
                deeper = around._replace(depth=around.depth + 1)
                out, out_slots = self._run(plan.calls[step], values, in_slots, deeper)
                slot_env.update((v, s) for v, s in zip(eqn.outvars, out_slots, strict=True) if s)
            else:
                inner = plan.calls[step]
                tapped = tapped_layers(inner)
                in_slots = [{k: s for k, s in d.items() if k in tapped} for d in in_slots]
                out = self._call(eqn, inner, values, in_slots, around)
            env.update(zip(eqn.outvars, out, strict=True))
        outs = plan.jaxpr.outvars
        return [read(v) for v in outs], [
            slot_env.get(v, {}) if _jaxpr_compat.is_var(v) else {} for v in outs
        ]

    def _use(
        self,
        eqn: Eqn,
        uses: list[Use],
        values: list[Operand],
        in_slots: list[Slots],
        around: Around,
    ) -> Any:
        not_encoded = [(u, values[u.operand]) for u in uses if not u.kind.reads.encoded]
        refuse_deferred(not_encoded, lambda use: f"`{eqn.primitive.name}` ({use.kind.name})")
        # A layer that this pass does not gather has no slot.
        uses = [u for u in uses if u.layer in self.traced_indices]
        if not uses:
            return bind(eqn)(*values)
        beside = [around.computed if u.view.computed_from else in_slots[u.operand] for u in uses]
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
        self, eqn: Eqn, inner: Plan, values: list[Operand], in_slots: list[Slots], around: Around
    ) -> list[Any]:
        kind = _jaxpr_compat.call_kind(eqn)
        if kind == "scan":
            return self._scan(eqn, inner, values, in_slots, around)
        if kind == "custom":
            refuse_deferred(enumerate(values), lambda _: f"`{eqn.primitive.name}`")
            beside = functools.partial(self.run, inner, around=around)
            return run_beside(eqn, beside, values, in_slots)
        masks, index = around.masks, None
        if kind == "cond":
            index, values, in_slots = values[0], values[1:], in_slots[1:]
        if kind == "shard_map":
            split = [
                (i, values[i])
                for i, (v, w) in enumerate(
                    zip(eqn.invars, _jaxpr_compat.body_of(eqn)[0].invars, strict=True)
                )
                if v.aval.shape != w.aval.shape
            ]
            refuse_deferred(split, lambda _: "`shard_map`, which splits it over mesh axes")
        # A deferred parameter has no sharding and no donation, so it is passed with the slots.
        deferred = [v if isinstance(v, DeferredParameter) else None for v in values]
        arrays = [None if isinstance(v, DeferredParameter) else v for v in values]
        tapped = tapped_layers(inner)
        computed = {name: slot for name, slot in around.computed.items() if name in tapped}
        extras, tree = jax.tree.flatten(
            (in_slots, [m.mask for m in masks], around.active, computed, deferred)
        )

        def run(plan: Plan, *flat: Any) -> list[Any]:
            n = len(arrays)
            slots, mask_values, active, computed, deferred_values = jax.tree.unflatten(
                tree, flat[n:]
            )
            operands = [
                h if h is not None else v for v, h in zip(flat[:n], deferred_values, strict=True)
            ]
            inside = [
                RowMask(v, m.axes, complete=m.complete)
                for v, m in zip(mask_values, masks, strict=True)
            ]
            around_it = Around(inside, active, computed, around.depth + 1)
            return self._run(plan, operands, slots, around_it)[0]

        if kind == "cond":
            branches = [functools.partial(run, inner.calls[k]) for k in sorted(inner.calls)]
            return jax.lax.switch(index, branches, *arrays, *extras)

        def body(*flat: Any) -> list[Any]:
            return run(inner, *flat)

        if kind == "checkpoint":
            return _jaxpr_compat.checkpoint_like(eqn, body)(*arrays, *extras)
        if kind == "shard_map":
            # A slot that enters replicated has a cotangent that is summed over the devices.
            specs = (PartitionSpec(),) * len(extras)
            return _jaxpr_compat.shard_map_like(eqn, body, specs)(*arrays, *extras)
        return _jaxpr_compat.jit_like(eqn, body, len(extras))(*arrays, *extras)

    def _scan(
        self, eqn: Eqn, inner: Plan, values: list[Operand], in_slots: list[Slots], around: Around
    ) -> list[Any]:
        (nc, nk), length = _jaxpr_compat.scan_counts(eqn), eqn.params["length"]
        values = list(values)
        for k, use in inner.entries.items():  # states that the first iteration starts from
            values[k] = self._use(use.eqn, [use], [values[k]], [in_slots[k]], around)
        fixed = in_slots[: nc + nk]  # a parameter carried unchanged is a constant
        stacks = {
            u.layer: u.layers
            for u in inner.all_uses()
            if u.layer is not None and u.view.members and u.view.stacked_for == inner.scan
        }
        scanned = {
            u.layer
            for u in inner.all_uses()
            if u.view.computed_from and ("scan", inner.scan) in u.view.traced_indices
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
            out = self.run(inner, [*values[:nc], *state, *xs], [*fixed, *slots], inside)
            return (out[:nk], after), out[nk:]

        scanned = [
            v.scanned() if isinstance(v, DeferredParameter) else v for v in values[nc + nk :]
        ]
        (state, _), ys = _jaxpr_compat.scan_like(
            eqn, body, (values[nc : nc + nk], buffers), (scanned, rows, iterations)
        )
        return [*state, *ys]


def _is_too_deep(eqn: Eqn, around: Around) -> bool:
    """Whether a jit is run in place, so that a level of calls takes one Python frame.

    As a jit it takes 13 frames, and 10 more when it is differentiated: 77 levels would exhaust
    Python's limit of 1,000 frames, while JAX itself traces 120.
    """
    deep = around.depth >= _NESTED_JITS and _jaxpr_compat.call_kind(eqn) == "jit"
    return deep and not _jaxpr_compat.states_placement(eqn)


def _at_use(slot: Slot | Elements) -> Slot:
    return slot.at_use() if isinstance(slot, Elements) else slot


def tapped_layers(plan: Plan) -> set[str]:
    """Names of the layers with a tapped use inside a plan."""
    return {name for u in plan.all_uses() for name in u.layers if name is not None}
