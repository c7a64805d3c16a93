"""Losses that mark their outputs: which layers the marks reach, and with what weight."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import UncoveredParameterError
from jaxkfac._mapped_axes import axes_apart, num_devices
from jaxkfac.factors._loss_terms import (
    Counts,
    Head,
    LossTerms,
    number_of_terms,
    or_one,
    pooled_counts,
    times,
)
from jaxkfac.interception import Layer, OutputMark, Traced, leading_to, marks_of


def refuse_marks(traced: Traced) -> None:
    """Refuse marks inside an ``Objective``, whose likelihood already names the outputs."""
    if marks_of(traced.closed.jaxpr, rules=False):
        raise ValueError(
            "jk.mark_outputs stands inside the apply_fn of a jk.Objective, whose likelihood says "
            "what its outputs are: leave the mark out, give a dictionary of likelihoods for "
            "several outputs, or give the whole scalar loss in place of the Objective"
        )


def refuse_unmarked(traced: Traced) -> None:
    """Refuse a layer that leads to no mark: the marks do not show how the loss depends on it."""
    if traced.unmarked:
        names = ", ".join(repr(layer.name) for layer in traced.unmarked)
        raise UncoveredParameterError(
            f"layers {names} lead to none of the loss's jk.mark_outputs, and would have factors of "
            "zeros: mark the outputs that they lead to, or leave them out with layers="
        )


def check_marked_outputs(heads: Sequence[Head]) -> None:
    """Refuse outputs that do not fit their likelihood."""
    for head in heads:
        head.check()
        one = getattr(head.likelihood, "one_output", False)
        if len(head.outputs.shape) < (1 if one else 2):
            name = type(head.likelihood).__name__
            raise ValueError(
                f"{head.name} is of shape {head.outputs.shape}, expected (examples, ..., outputs) "
                f"for {name}: mark the outputs themselves, not a function of them"
            )


def refuse_beside(traced: Traced) -> None:
    """Refuse given targets for a mark inside a custom derivative: it receives no cotangent."""
    for number, mark in enumerate(traced.marks):
        if mark.beside:
            raise ValueError(
                f"jk.mark_outputs: mark {number} stands in a function with a derivative of its own "
                "(custom_jvp), which sends no cotangent to what it marks: take "
                'fisher="mc" or "exact"'
            )


def refuse_chained(traced: Traced) -> None:
    """Refuse marks that follow each other: the first one's cotangent includes the second's."""
    # The program was lifted (`trace_marked`): one shift for each mark stands behind its other
    # inputs.
    last = len(traced.closed.jaxpr.invars) - len(traced.marks)
    for mark in range(len(traced.marks)):
        inputs = leading_to(traced.analysis.plan, mark)[1]
        before = [k for k in range(len(traced.marks)) if last + k in inputs]
        if before:
            raise ValueError(
                f"jk.mark_outputs: mark {mark} is computed from mark {before[0]}. The cotangent "
                f"of mark {before[0]} then holds that of both, and the two have different "
                'shares of the loss: take fisher="mc" or "exact"'
            )


def leads_past_marks(traced: Traced) -> bool:
    """Whether the loss depends on a layer past its marks, as with a penalty on activations."""
    first = len(traced.closed.jaxpr.invars) - len(traced.marks)
    shifts = range(first, first + len(traced.marks))
    return bool(leading_to(traced.analysis.plan, len(traced.marks), past=shifts)[0])


def parameters_past_marks(traced: Traced) -> list[str]:
    """Paths of the parameters on which the loss depends past its marks, as with a penalty."""
    first = len(traced.closed.jaxpr.invars) - len(traced.marks)
    shifts = range(first, first + len(traced.marks))
    inputs = leading_to(traced.analysis.plan, len(traced.marks), past=shifts)[1]
    return [path for k, path in enumerate(traced.shapes) if k in inputs]


def row_weights(traced: Traced, heads: Sequence[Head]) -> dict[str, Float[Array, " uses"]]:
    r"""For layers whose uses lead to different marks, the weight of each use's input rows.

    It is $c_u = \sum_m w_m / T_m$ over the marks that the use leads to, times
    $\sum_m T_m / \sum_m w_m$ over the marks of the layer. The second factor makes the count of
    rows equal their number if there is one row for each term. Then A and G of a linear layer are
    those of its Gauss-Newton matrix for any numbers of terms. A mark that keeps no term does not
    contribute.
    """
    by_layer = {}
    for layer in weighed(traced):
        reached = [traced.marks_reached.get(id(u), frozenset()) for u in traced.uses_of(layer)]
        dtype = heads[0].count.dtype
        none = jnp.zeros((), dtype)
        counts = [h.num_kept.astype(dtype) for h in heads]
        nominal_weights = [jnp.asarray(h.weight).astype(dtype) for h in heads]
        # A mark that keeps no term adds nothing to the loss; its weight would dilute the others.
        weights = [jnp.where(k > 0, w, none) for k, w in zip(counts, nominal_weights, strict=True)]
        # Each term counts once here: its weight is none of its rows' in A.
        means = [w / jnp.maximum(k, 1) for w, k in zip(weights, counts, strict=True)]
        marks = sorted(frozenset().union(*reached))
        total = sum(weights[m] for m in marks)
        one = jnp.ones((), dtype)  # for a total of zero, where all sums are zero
        every = sum(counts[m] for m in marks) / jnp.where(total == 0, one, total)
        # A set has no order of its own, and the last bits of a sum depend on it.
        use_means = [sum((means[m] for m in sorted(r)), none) for r in reached]
        by_layer[layer.name] = jnp.stack(use_means) * every
    return by_layer


def with_weights_apart(traced: Traced) -> Traced:
    """The program, without sharing an input factor between layers that weigh its rows unlike.

    Two layers that read the same inputs share one A. Their uses may lead to other marks, and then
    the rows have weights of their own in each.
    """

    def row_marks(layer: Layer) -> Hashable:
        rows = collections.Counter(
            (
                use.data and use.data.number,
                use.at.scope.scans,
                use.view.source.traced_indices,
                traced.marks_reached.get(id(use)),
            )
            for use in traced.uses_of(layer)
        )
        # Rows that all lead to the same marks have no weights, whichever marks these are.
        return frozenset(rows.items()) if len({marks for *_, marks in rows}) > 1 else None

    # The layer that stores an A comes first, so that its name stays that of the A.
    first: dict[Hashable, str] = {}
    inputs = {
        layer.name: first.setdefault((layer.input, row_marks(layer)), layer.name)
        for layer in sorted(traced.table.tapped, key=lambda layer: layer.input != layer.name)
    }
    layers = tuple(
        dataclasses.replace(layer, input=inputs.get(layer.name, layer.input))
        for layer in traced.table.layers
    )
    if layers == traced.table.layers:
        return traced
    return dataclasses.replace(traced, table=dataclasses.replace(traced.table, layers=layers))


def weighed(traced: Traced) -> list[Layer]:
    """The layers whose input rows have weights that differ between uses."""
    return [
        layer
        for layer in traced.table.tapped
        if traced.marks
        and not layer.is_elementwise
        # Once for a shared A, by the layer that stores it: its readers weigh rows alike
        # (`with_weights_apart`).
        and layer.input == layer.name
        and len({traced.marks_reached.get(id(u)) for u in traced.uses_of(layer)}) > 1
    ]


# ---------------- loss terms of marked outputs


@dataclasses.dataclass(frozen=True)
class MarkedTerms(LossTerms):
    """The loss terms of marked outputs; trees are lists with an entry for each mark.

    Attributes:
        marks: The marks.
        weights: Weights that are arrays, by mark.
        masks: Masks, by mark.
        meeting: Says, for a mark, where its terms depend on rows of several examples.
        axes: The mapped axes whose devices have different terms.
        pooled: For each mark, its counts over these axes; see ``Head``. Empty without axes.
    """

    marks: Sequence[OutputMark]
    weights: Mapping[int, Any]
    masks: Mapping[int, Any]
    meeting: Callable[[int], str] = lambda mark: ""
    axes: tuple[str, ...] = ()
    pooled: Sequence[Counts | None] = ()

    def over_devices(self, outputs: Sequence[Any], names: tuple[str, ...]) -> "MarkedTerms":
        """The terms with counts over all devices of the axes over which they differ.

        Args:
            outputs: The marked outputs, or zeros that vary over the same axes.
            names: Mapped axes that ``axis_name=`` names.
        """
        axes = axes_apart(names, list(outputs), self.masks)
        pooled = pooled_counts(self.heads(outputs), axes)
        return dataclasses.replace(self, axes=axes, pooled=pooled)

    def share(self, outputs: Sequence[Any], value: Any) -> Float[Array, ""]:
        """This device's share of all terms, with which its loss enters the mean of all devices.

        Along an axis over which the loss's ``value`` does not differ, by its type, the loss is a
        mean over devices already, and enters as it is.
        """
        alone = dataclasses.replace(self, axes=(), pooled=())
        every = alone.over_devices(outputs, axes_apart(self.axes, value))
        local, total = (number_of_terms(terms.heads(outputs)) for terms in (alone, every))
        return local / or_one(total).astype(local.dtype)

    def as_if_pooled(
        self, outputs: Sequence[Any], cotangents: Sequence[Any], value: Any
    ) -> list[Array]:
        r"""The loss's own cotangents, as if each mark's mean ran over the terms of all devices.

        A device's loss holds the means over its own terms, and enters with its share of all terms.
        The cotangent of mark $m$ then holds $w_m / T_m'$ times this share with the device's own
        count $T_m'$, where the mean over the terms of all devices has $w_m / T_m$.
        """
        local, every = dataclasses.replace(self, pooled=()).heads(outputs), self.heads(outputs)
        averaged = [axis for axis in self.axes if axis not in axes_apart(self.axes, value)]
        share = or_one(self.share(outputs, value)) / num_devices(tuple(averaged))
        return [
            times(x, one.num_terms / or_one(all_of.num_terms) / share.astype(one.num_terms.dtype))
            for x, one, all_of in zip(cotangents, local, every, strict=True)
        ]

    def heads(
        self, outputs: ArrayTree, targets: ArrayTree = None, mask: ArrayTree = None
    ) -> list[Head]:
        """The mask is always the marks' own; the argument is ignored."""
        return [
            Head(
                one.likelihood,
                x,
                None if targets is None else targets[k],
                self.masks.get(k),
                self.weights[k] if one.weight is None else one.weight,
                f"jk.mark_outputs: mark {k}",
                functools.partial(self.meeting, k),
                pooled=self.pooled[k] if self.pooled else None,
            )
            for k, (one, x) in enumerate(zip(self.marks, outputs, strict=True))
        ]

    def tree(self, entries: Sequence[Any]) -> PyTree:
        return list(entries)
