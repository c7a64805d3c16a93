"""Trace a function once and find its layers."""

import collections
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxkfac._arguments import ArrayTree, check_arrays, check_function, leaves_by_path
from jaxkfac._errors import UncoveredParameterError
from jaxkfac._jaxpr_compat import varying_axes
from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._custom import jaxpr_of
from jaxkfac.interception._examples import (
    analyse,
    leading_to,
    split_lost,
    split_partial,
    split_parts,
    split_recomputed,
)
from jaxkfac.interception._grouping import group_uses
from jaxkfac.interception._kind import Data, Use
from jaxkfac.interception._layer import LayerTable
from jaxkfac.interception._mark_outputs import lifted, marks_of
from jaxkfac.interception._row_masks import refuse_masks_apart
from jaxkfac.interception._trace_cache import depth_explained
from jaxkfac.interception._traced import Traced
from jaxkfac.interception.values._axes import Atoms
from jaxkfac.interception.values._encoded import (
    decoded_shapes,
    encoded_paths,
)
from jaxkfac.interception.values._values import CoverageNote

_PARTLY = "is in a layer for some of its readings: its factors leave out those that are not covered"


def trace(
    fn: Callable[..., Any],
    params: ArrayTree,
    *args: Any,
    layers: str | None = None,
    max_dense: int = 16384,
    experts: str | None = None,
    scale_blocks: bool = False,
    num_outputs: int = 0,
    state: ArrayTree = None,
) -> Traced:
    """Trace ``fn(params, *args)`` and find its layers; see ``find_layers``.

    ``scale_blocks`` gives scales and lone biases a dense block. ``num_outputs`` is the number of
    leaves at the start of the result whose first axis is the examples. ``state`` is the part of
    the arguments that a call changes.
    """
    check_function("fn", fn, "fn(params, *args)")
    encoded, params = encoded_paths(params), decoded_shapes(params)
    check_arrays("params", params)
    check_arrays("the arguments beside params", args)
    with depth_explained():
        closed, shapes = jaxpr_of(fn, params, *args)
    paths = leaves_by_path(params)
    num_args = len(closed.jaxpr.invars) - len(paths)
    # The state is found by identity: it is one of the arguments, in whatever place, and equal
    # shapes would not tell it apart.
    changing = {id(leaf) for leaf in jax.tree.leaves(state)}
    states = [k for k, x in enumerate(jax.tree.leaves(args)) if id(x) in changing]
    of_state = frozenset(k + len(paths) for k in states)
    with depth_explained():
        closed, analysis = analyse(
            closed, [*paths, *[None] * num_args], num_outputs=num_outputs, state=of_state
        )
    refuse_masks_apart(analysis.table, analysis.plan)
    # A use that leads to no output has no gradient: a derivative leaves its value unread.
    live = {id(use) for use in leading_to(analysis.plan, *range(len(analysis.outputs)))[0]}
    uses, lost = split_lost(analysis, num_outputs=num_outputs)
    dead = {use.view.source.path for use in uses if id(use) not in live}
    uses = [use for use in uses if id(use) in live]
    _refuse_encoded_parts(uses, encoded)
    uses, cut = split_parts(analysis.table, uses)
    uses, partial = split_partial(analysis, uses)
    uses, recomputed = split_recomputed(analysis, uses, num_outputs=num_outputs)
    # A diagonal for only some readings of a function of a parameter would be wrong.
    lost = [*lost, *cut, *partial, *recomputed]
    missing = {f.path for f in (*analysis.findings, *lost) if f.fatal}
    uses = [u for u in uses if not (u.view.history.function and u.view.source.path in missing)]
    found_layers, notes, tapped = group_uses(
        analysis.table,
        uses,
        max_dense=max_dense,
        experts=experts,
        pattern=layers,
        scale_blocks=scale_blocks,
    )
    analysis.plan.replace_uses(_with_features(analysis, uses, tapped, num_outputs=num_outputs))
    findings = [*analysis.findings, *lost, *notes]
    covered_paths = {
        matrix.path for layer in found_layers for matrix in (layer.weight, layer.bias) if matrix
    }
    partly = dict.fromkeys(f.path for f in findings if f.fatal and f.path in covered_paths)
    findings += [CoverageNote(path, _PARTLY, fatal=False) for path in partly]
    touched = {f.path for f in findings}
    touched |= {v.source.path for u in uses for v in (u.view, *u.view.source.members)}
    shapes_of = {path: tuple(getattr(leaf, "shape", ())) for path, leaf in paths.items()}
    # These are no errors: their gradient is zero.
    unread = [
        (
            path,
            "leads to no output"
            if path in dead
            else "meets no data"
            if path in analysis.reads
            else "is not read by the function",
        )
        for path in paths
        if path not in touched
    ]

    def is_selected(path: str) -> bool:
        """Whether the caller's pattern selects a parameter."""
        return layers is None or path in covered_paths or re.fullmatch(layers, path) is not None

    table = LayerTable(
        layers=tuple(found_layers),
        uncovered=[(f.path, f.reason) for f in findings if f.fatal or f.path not in covered_paths]
        + unread,
        notes=[(f.path, f.reason) for f in findings if not f.fatal and f.path in covered_paths],
        sizes={path: math.prod(shape) for path, shape in shapes_of.items()},
        # What the caller leaves out need not be covered.
        problems=[(f.path, f.reason) for f in findings if f.fatal and is_selected(f.path)],
    )
    leaves, tree = jax.tree.flatten(shapes)
    traced = Traced(
        closed,
        analysis,
        table,
        tree,
        leaves,
        shapes_of,
        encoded,
        num_outputs or 1,
        state=of_state,
    )
    table = dataclasses.replace(table, meeting=traced.meeting)
    return dataclasses.replace(traced, table=table)


def _with_features(
    analysis: Analysis, uses: list[Use], tapped: dict[Use, Use], *, num_outputs: int
) -> dict[Use, Use]:
    """The tapped uses, now with their ``features``: axes of the result that are features.

    These are the axes that a product takes in or gives out, and the last axis of an output. An axis
    that is also an axis of a product's rows, or another axis of an output, counts as positions (the
    tokens of a layer that mixes tokens), as does an axis that no product knows (pixels that are
    pooled). A scalar that multiplies logits has one gradient at each position, the sum over the
    classes.
    """
    table, products = analysis.table, [use for use in uses if not use.kind.elementwise]
    outputs = [v.axes for v in analysis.outputs[: max(1, num_outputs)] if isinstance(v, Data)]

    def atoms_of(axes: Iterable[Atoms]) -> set[int]:
        return {a for axis in axes for a in table.atoms(axis)}

    positions = atoms_of(axis for axes in outputs for axis in axes[: max(1, len(axes) - 1)])
    positions |= atoms_of(axis for use in products for axis in use.axes.rows)
    features = atoms_of(axis for axes in outputs for axis in axes[1:][-1:])
    features |= atoms_of(axis for use in products for axis in use.kind.contracted(use))

    def is_feature(a: int) -> bool:
        # An axis that is both (tokens that a layer mixes) counts as positions: features are summed
        # before the square, and positions are not.
        return a not in positions and (a in features or "feature" in table.kinds(a))

    def featured(use: Use) -> Use:
        if not use.kind.elementwise or use.elements.whole_examples:
            return use
        features = tuple(
            d
            for d, axis in enumerate(use.axes.result)
            if (atoms := table.atoms(axis)) and all(map(is_feature, atoms))
        )
        return dataclasses.replace(use, elements=use.elements._replace(features=features))

    return {use: featured(with_layers) for use, with_layers in tapped.items()}


def trace_marked(traced: Traced, params: ArrayTree, *args: Any, **finding: Any) -> Traced:
    """The program changed so that it returns a ``Marked``; unchanged if it has no marks.

    Its last argument is a list of zeros in the shape of each mark.

    Raises:
        HiddenMarkError: a mark is where its terms cannot be read.
        ValueError: a mark is of a value that does not depend on data.
    """
    closed, tree = traced.closed, traced.out_tree
    marks = tuple(marks_of(closed.jaxpr))
    if not marks:
        return traced

    def again(params: ArrayTree, *args: Any) -> Any:
        leaves = jax.tree.leaves((params, *args[:-1]))
        out = lifted(closed.jaxpr, closed.consts, leaves, args[-1])
        return out._replace(result=jax.tree.unflatten(tree, out.result))

    # Shapes where they suffice; inside `shard_map` only an array can vary over the mesh axes.
    shifts = [mark.zeros() if varying_axes(mark.type) else mark.shape for mark in marks]
    traced_again = trace(again, params, *args, shifts, num_outputs=len(marks), **finding)
    for number, mark in enumerate(marks):
        if traced_again.output_axes(number) is None:
            raise ValueError(
                f"jk.mark_outputs: mark {number} (of shape {mark.shape.shape}) marks a value "
                "that does not depend on the batch, expected outputs of examples; mark what is "
                "computed from them"
            )
    return dataclasses.replace(traced_again, marks=marks)


def _refuse_encoded_parts(uses: Sequence[Use], encoded: frozenset[str]) -> None:
    """Refuse an encoded parameter in one value with others, which would get no gradient."""
    beside = collections.defaultdict(set)
    for use in uses if encoded else ():
        if use.kind.covered and not use.view.source.computed_from:
            beside[use.at.scope].add(use.view.source.path)
    for use in uses if encoded else ():
        path = use.view.source.path
        further = sorted(beside[use.at.scope] - {path})
        if further and path in encoded:
            raise UncoveredParameterError(
                f"parameter {path!r} is held as NF4, which only the product of a dense "
                f"layer can read, and is added to, or stands in one array with, {further[0]!r}: "
                "keep this parameter in full precision"
            )


def find_layers(
    fn: Callable[..., Any],
    params: ArrayTree,
    *args: Any,
    layers: str | None = None,
    max_dense: int = 16384,
    experts: str | None = None,
    **named: Any,
) -> LayerTable:
    """Find every place where a parameter meets data in a linear operation.

    The table lists a parameter as not covered exactly where :func:`value_grad_and_factors` would
    raise for it.

    Args:
        fn: A ``jk.Objective``, then called as ``find_layers(objective, params, batch)``; or
            ``fn(params, *args)``, any JAX function: the apply function of a Flax, Haiku or
            Equinox model, or a loss. Shapes suffice: nothing is computed.
        params: Parameters; arrays or ``jax.ShapeDtypeStruct``, or NF4 (``jk.nf4``).
        *args: The other arguments, as arrays or ``jax.ShapeDtypeStruct``. A single ``tuple`` is
            unpacked, as an objective's inputs are, where ``fn`` does not take it as one argument.
        layers: Full-match pattern over layer names; ``None`` is all.
        max_dense: A side with more features is stored as a diagonal.
        experts: Full-match pattern over parameter paths. If a free axis of a parameter can be read
            as outputs or as a stack of experts (``bti,eio->ebto``), the parameters that match are
            read as a stack. Shared axes always are.
        **named: Arguments of ``fn`` by name, in the same forms: ``key=``, ``state=``.

    Returns:
        A ``LayerTable``; ``print`` it for the coverage report.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.
        TypeError: the arguments do not fit ``fn``.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> apply_fn = lambda p, x: jnp.tanh(x @ p["w"] + p["b"])
        >>> params, x = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((5, 3))
        >>> table = jk.find_layers(apply_fn, params, x)
        >>> table["w"].in_features, table["w"].bias.path
        (3, 'b')
        >>> objective = jk.Objective(apply_fn, jk.Gaussian())
        >>> list(jk.find_layers(objective, params, (x, jnp.ones((5, 2)))))
        ['w']
    """
    options: Any = {"layers": layers, "max_dense": max_dense, "experts": experts}
    # An objective knows its model's outputs, which its loss hides.
    if (layer_table := getattr(fn, "layer_table", None)) is not None:
        return layer_table(params, *args, **named, **options)
    args = _unpacked(fn, params, args, named)

    def called(params: ArrayTree, named: dict[str, Any], *args: Any) -> Any:
        return fn(params, *args, **named)

    called_fn, inputs = (called, (named, *args)) if named else (fn, args)
    options["state"] = named.get("state")
    traced = trace(called_fn, params, *inputs, **options)
    traced = trace_marked(traced, params, *inputs, **options)
    is_loss = bool(traced.out_shapes) and traced.out_shapes[0].shape == ()
    if is_loss or traced.marks or traced.leads_with_examples:
        traced = traced.with_second_pass(outputs=not is_loss)
    reason = "leads to none of the loss's jk.mark_outputs"
    return traced.table.without(traced.unmarked, reason) if traced.unmarked else traced.table


def _unpacked(
    fn: Callable[..., Any], params: ArrayTree, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments; a lone tuple is unpacked where the function takes its entries, and not it."""
    if len(args) != 1 or type(args[0]) is not tuple:
        return args
    for form in (args, args[0]):
        try:
            inspect.signature(fn).bind(params, *form, **named)
        except (TypeError, ValueError):  # other numbers of arguments, or no signature to inspect
            continue
        return form
    return args
