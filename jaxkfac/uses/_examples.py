"""Gradients of single examples of an objective: checks, traces and backward passes."""

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import (
    NonFiniteFactorError,
    UnknownLayerError,
    instance_of,
    nearest,
)
from jaxkfac.blocks import Origin
from jaxkfac.curvature import (
    Eigenbases,
    check_bases,
    check_program_layers,
    check_vectors,
)
from jaxkfac.curvature.per_example import (
    ExampleGradients,
    Queries,
    block_dtype,
    check_readings,
    leaves_out_readings,
    refuse_meeting,
)
from jaxkfac.factors import (
    FISHER_TYPES,
    Batch,
    Gaussian,
    Linearised,
    ModelCall,
    Objective,
    Program,
    check_word,
)
from jaxkfac.interception import Layer, Traced
from jaxkfac.interception.coupling import Word
from jaxkfac.interception.values import Atoms
from jaxkfac.uses._damped_gradients import BlockDamping
from jaxkfac.uses._rotated_blocks import quadratic_forms
from jaxkfac.uses._rotated_gradients import OwnProducts, RotatedGradients, whole_gradients

# ---------------- batches


def batches_of(train: Any) -> Iterator[Any]:
    """Yield batches: a tuple is one batch; any other iterable is read once.

    Raises:
        TypeError: it is neither a tuple nor an iterable of batches.
        ValueError: there is no batch.
    """
    if isinstance(train, tuple):
        yield train
        return
    if not isinstance(train, Iterable) or isinstance(train, str | dict) or hasattr(train, "shape"):
        raise TypeError(
            "train: expected (inputs, targets), (inputs, targets, mask), or an iterable of such "
            f"tuples, got {type(train).__name__}"
        )
    empty = True
    for batch in train:
        empty = False
        yield batch
    if empty:
        raise ValueError("train: the iterable is empty, there are no examples")


# ---------------- the objective and its examples


Per = Literal["sum", "layer", "token"]
Measurement = Callable[[ArrayTree, Batch], Float[Array, ""]]
_NOT_F = (
    "they hold no curvature of the loss, and results from them are not the Fisher's. Collect "
    "factors with fisher='mc', 'empirical' or 'exact'"
)
Source = TypeVar("Source", Eigenbases, Queries)
Result = TypeVar("Result")


def check_shows_examples(objective: Any) -> None:
    """Refuse a scalar loss, marked or not: no example of it can be told from the others."""
    remedy = (
        "because a scalar loss does not show its examples: give the model and its likelihood as "
        "jk.Objective(apply_fn, likelihood); where the loss marks several outputs with "
        "jk.mark_outputs (a VAE), return these outputs in a dictionary and give one of likelihoods "
        "and weights, jk.Objective(apply_fn, {...}, weight={...})"
    )
    instance_of("objective", objective, Objective, remedy)


class Examples:
    """The objective and the layers whose gradients are computed for single examples.

    Args:
        objective: The objective.
        source: The eigenbases, or queries that were prepared with them.
        layers: Which of their layers; ``None`` for all.
        experts: As for the factors.
        declared: ``"apart"`` if the user declares that examples do not meet where it is not proved.

    Attributes:
        layers: The selected layers.

    Raises:
        TypeError: no ``Objective``, or no eigenbases.
        UnknownLayerError: ``layers`` matches none of the bases' layers.
        ValueError: a selected layer has no gradients of single examples, or the bases are of
            another likelihood.
    """

    def __init__(
        self,
        objective: Objective,
        source: Eigenbases | Queries,
        layers: str | None,
        experts: str | None,
        declared: Word | None = None,
    ) -> None:
        check_shows_examples(objective)
        self.objective = objective
        self._source: Eigenbases | Queries
        if isinstance(source, Queries):
            self._source = chosen(source, layers)
        else:
            check_bases(source)
            self._source = chosen(source, layers)
        _check_likelihoods(self._source.origin, objective)
        self.layers = self._source.layers
        if isinstance(self._source, Eigenbases):
            _check_blocks(self._source)
            _warn_of_forward(self._source, jax.tree.leaves(objective.likelihood))
        names = "|".join(re.escape(layer.name) for layer in self.layers)
        check_word(declared)
        self._finding = names, experts, declared
        self._program, self._whole_program = objective.programs.get(
            (Examples, self._finding), lambda: _programs(objective, *self._finding)
        )

    @property
    def bases(self) -> Eigenbases:
        """The eigenbases of the selected layers."""
        assert isinstance(self._source, Eigenbases)
        return self._source

    @property
    def queries(self) -> Queries:
        """The queries of the selected layers."""
        assert isinstance(self._source, Queries)
        return self._source

    def _dtype(self, layer: Layer) -> Any:
        if isinstance(self._source, Queries):
            return self._source.dtype(layer)
        return block_dtype(self._source, layer)

    def checked(self, params: ArrayTree, batch: ArrayTree, state: ArrayTree) -> Batch:
        """Check that a batch fits the objective, the parameters and the bases, and return it.

        Raises:
            CoupledExamplesError: an example's output depends on other examples.
            UnknownLayerError: the program lacks a layer of the bases.
            ValueError: a layer differs from that of the bases, one of its parameters is also read
                in a layer that is left out, or the batch does not fit.
        """
        batch = self.objective.batch(batch)
        call = ModelCall(params, batch, state=state)
        traced = self._program.traced(call)
        check_program_layers(traced.table, list(self.layers))
        if leaves_out_readings(traced, self.layers):
            full_trace = self._whole_program.traced(call)
            check_readings(self.layers, full_trace)
        self.objective.check(self._program.output_shapes(traced), batch.targets, batch.mask)
        for layer in self.layers:
            if masked := [
                u.view.history.masked for u in traced.uses_of(layer) if u.view.history.masked
            ]:
                raise ValueError(
                    f"layer {layer.name!r} is masked by a constant in `{masked[0]}`, so its "
                    "gradient is no product of rows: leave it out with layers="
                )
        names = ", ".join(repr(layer.name) for layer in self.layers)
        refuse_meeting(names, self._program.meeting(traced, "derivative"))
        return batch

    def gradients(
        self, call: ModelCall, measurement: Measurement | None = None
    ) -> dict[str, Array]:
        """Gradients ``{path: (N, *parameter)}`` of each example's sum of terms or measurement.

        Raises:
            ValueError: the measurement of one example is not a floating scalar.
        """
        traced = self._program.traced(call)
        rows = traced.examples, traced.num_examples
        taps = ExampleGradients(traced, self.layers, self._dtype, *rows)
        if measurement is None:
            at, emitted = self._emitted(traced, taps, call)
            return {path: x * _scale(at, x) for path, x in taps.gradients(emitted).items()}
        outputs, vjp = self.outputs_and_vjp(traced, taps, call)
        per_example = jax.vmap(jax.grad(_checked_measurement(measurement)))
        return taps.gradients(vjp(per_example(jax.lax.stop_gradient(outputs), call.batch)))

    def rotated_gradients(self, call: ModelCall) -> tuple[list[Array], Float[Array, ""]]:
        """Gradients of examples in the eigenbasis, by block, and the batch's number of terms."""
        traced = self._program.traced(call)
        taps = RotatedGradients(traced, self.bases)
        at, emitted = self._emitted(traced, taps, call)
        return taps.rotated(emitted, lambda x: _scale(at, x)), at.terms

    def own_products(
        self, bases: Eigenbases, call: ModelCall, damping: BlockDamping
    ) -> Float[Array, " N"]:
        """Each example's gradient multiplied with itself, through the damped inverse curvature."""
        traced = self._program.traced(call)
        taps = OwnProducts(traced, bases, damping)
        at, emitted = self._emitted(traced, taps, call)
        by_layer = taps.summed(emitted)
        if taps.gradient_layers:
            remaining = dataclasses.replace(bases, layers=taps.gradient_layers)
            by_layer.append(quadratic_forms(taps.remaining_gradients(emitted), remaining, damping))
        dtype = jnp.result_type(*[x.dtype for x in by_layer])
        total = jnp.stack([x.astype(dtype) for x in by_layer]).sum(0)
        return total * jnp.square(_scale(at, total))

    def own_gradients(self, call: ModelCall) -> list[Layer]:
        """The layers of which :meth:`own_products` stores gradients."""
        traced = self._program.traced(call)
        return [x for x in self.layers if x.name not in whole_gradients(traced, self.bases)]

    def scores(self, queries: Queries, call: ModelCall, *, per: Per) -> Float[Array, "..."]:
        """Products of the queries with each example's gradient, in the form of ``influence``."""
        traced = self._program.traced(call)
        rows, shape = _rows(traced, per)
        number = int(np.prod(shape))
        taps = ExampleGradients(traced, self.layers, self._dtype, rows, number, queries)
        at, emitted = self._emitted(traced, taps, call)
        by_layer = [x * _scale(at, x) for x in taps.scores(emitted).values()]
        dtype = jnp.result_type(*[x.dtype for x in by_layer])
        stacked = jnp.stack([x.astype(dtype) for x in by_layer], 1)
        if per == "layer":
            return stacked
        total = stacked.sum(1)
        return total.reshape(len(total), *shape)

    def _emitted(
        self, traced: Traced, taps: ExampleGradients, call: ModelCall
    ) -> tuple[Linearised, Mapping[str, Any]]:
        taps = taps.of((call.params, call.batch))
        at = self._program.linearise(traced, taps, call, differentiate=False)
        if self.objective.num_outputs == 1:
            return at, at.emitted
        # Each output's mean has its own number of terms, so this takes the cotangent of their sum.
        fixed, number = at.outputs, at.terms

        def total(outputs: ArrayTree) -> Array:
            heads = self.objective.heads(outputs, call.batch.targets, call.batch.mask)
            sums = [head.kept_terms().sum(dtype=number.dtype) for head in heads]
            return jnp.stack(sums).sum() / number

        return at, at.vjp(jax.grad(total)(fixed))

    def without_arrays(self) -> "Examples":
        """A copy with shapes in place of the bases' arrays: static data of compiled functions.

        Equal copies compare equal, so that a function compiled for one serves the others.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._source)
        return self._of(shapes)

    def _of(self, source: Eigenbases | Queries) -> "Examples":
        clone = copy.copy(self)
        clone._source, clone.layers = source, source.layers
        return clone

    def _identity(self) -> tuple[Hashable, ...]:
        leaves, structure = jax.tree.flatten(self._source)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        return self.objective, self._finding, structure, shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Examples) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def compiled(self, run: Callable[..., Result], *static: Hashable) -> Callable[..., Result]:
        """``run(examples, call, *rest, *static)``, compiled once.

        It is stored with the objective and holds no array: the bases or queries are its first
        argument.

        Args:
            run: A module-level function, so that it is the same object at every call.
            static: Its last arguments.

        Returns:
            ``f(source, call, *rest)``.
        """

        def make() -> Callable[..., Result]:
            shell = self.without_arrays()

            def with_source(source: Eigenbases | Queries, call: ModelCall, *more: Any) -> Any:
                return run(shell._of(source), call, *more, *static)

            return jax.jit(with_source)

        return self.objective.programs.get((run, self._finding, *static), make)

    def traced(self, call: ModelCall) -> Traced:
        """The program for a checked batch."""
        return self._program.traced(call)

    def outputs_and_vjp(
        self, traced: Traced, taps: ExampleGradients, call: ModelCall
    ) -> tuple[ArrayTree, Callable[[ArrayTree], Mapping[str, Any]]]:
        """The outputs, and a function from their cotangents to what the taps emit."""
        taps = taps.of((call.params, call.batch))
        at = self._program.linearise(traced, taps, call, differentiate=False)
        return at.outputs, at.vjp

    def exists(self, batch: Batch) -> Bool[Array, " N"]:
        """Which examples have a term that the mask keeps, or weights by more than 0."""
        every = jnp.ones(batch.num_examples, bool)
        if batch.mask is None:
            return every
        masks = self.objective.parts(batch.mask, "batch: the mask")
        masks_by_example = [
            every if x is None else x.astype(bool).reshape(len(x), -1).any(1) for x in masks
        ]
        return jnp.stack(masks_by_example).any(0)


def _checked_measurement(measurement: Measurement) -> Measurement:
    """Wrap a measurement to refuse results other than one floating scalar."""

    def measure(outputs: ArrayTree, query: Batch) -> Any:
        value = measurement(outputs, query)
        shape = getattr(value, "shape", None)
        if shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            got = type(value).__name__ if shape is None else f"{value.dtype} of shape {shape}"
            raise ValueError(
                "measurement: expected one floating scalar of each query, got "
                f"{got}. It sees one query, without the axis of examples: outputs "
                f"{jax.tree.map(jnp.shape, outputs)}"
            )
        return value

    return measure


def _programs(
    objective: Objective, names: str, experts: str | None, declared: Word | None
) -> tuple[Program, Program]:
    """The program with only the selected layers, and the program with all layers."""
    finding = {"layers": names, "experts": experts}
    return (
        Program(objective, finding, cover=False, examples=declared),
        Program(objective, {"experts": experts}, cover=False),
    )


def chosen(source: Source, layers: str | None) -> Source:
    """Keep only layers whose name or weight path matches the pattern."""
    if layers is None:
        return source
    matches = tuple(
        layer
        for layer in source.layers
        if any(re.fullmatch(layers, x) for x in (layer.name, layer.weight.path))
    )
    if not matches:
        raise UnknownLayerError(
            f"layers={layers!r} matches no layer of the bases; the nearest names are "
            f"{nearest(layers, [layer.name for layer in source.layers])}"
        )
    return dataclasses.replace(source, layers=matches)


def _check_blocks(bases: Eigenbases) -> None:
    """Refuse blocks without gradients of single examples, or without eigenvectors."""
    for layer in bases.layers:
        if not layer.is_covered or layer.computed_from:
            raise ValueError(
                f"{layer.name!r} is "
                + ("a weight that is computed from others" if layer.computed_from else layer.kind)
                + ", which no backward pass sees example by example: leave it out with layers="
            )
        if not layer.is_diagonal:
            check_vectors(bases, layer)


def check_values(bases: Eigenbases) -> None:
    """Refuse eigenvalues that are not finite, or all zero, if they are concrete.

    Raises:
        NonFiniteFactorError: naming the layer.
        ValueError: every eigenvalue is zero.
    """
    is_zero, corrections = True, bases.corrections if is_measured(bases) else None
    for layer in bases.layers:
        if layer.is_diagonal:
            sides = [bases.diagonals[layer.name]]
        else:
            sides = [spectrum.values for spectrum in bases.spectra(layer)]
        measured = [] if corrections is None else corrections.of_layer(layer.name)
        arrays = [*sides, *measured]
        if any(isinstance(x, Tracer) or not _is_local(x) for x in arrays):
            return
        if not all(np.isfinite(np.asarray(x)).all() for x in arrays):
            raise NonFiniteFactorError(
                f"bases: the eigenvalues of layer {layer.name!r} are not finite: collect its "
                "factors anew, from batches whose loss is finite"
            )
        # A measured eigenvalue is that of a block; one of the factors is only a side of it.
        curved = any(map(_any, measured)) if measured else all(map(_any, sides))
        is_zero = is_zero and not curved
    if is_zero:
        raise ValueError(
            "bases: every eigenvalue is zero, so they hold no curvature: decompose the factors of "
            "a batch with jk.eigendecompose"
        )


def is_measured(bases: Eigenbases) -> bool:
    """Whether the bases have measured eigenvalues, not counting a measurement without a term.

    :func:`jaxkfac.kfac` keeps such a measurement after a refresh; the bases then read the
    eigenvalues of the factors. A traced number of terms counts as some.
    """
    terms = None if bases.corrections is None else bases.corrections.terms
    if terms is None or isinstance(terms, Tracer) or not _is_local(terms):
        return terms is not None
    return bool(np.asarray(terms) > 0)


def _any(values: Array | np.ndarray) -> bool:
    return bool(np.asarray(values).any())


def _is_local(array: object) -> bool:
    return getattr(array, "is_fully_addressable", True)


def _check_likelihoods(origin: Origin | None, objective: Objective) -> None:
    """Refuse bases of a different likelihood: their G belongs to another loss."""
    if origin is None:
        return
    objective_origin = Origin.of(origin.fisher, jax.tree.leaves(objective.likelihood))
    if origin.has_other_likelihoods(objective_origin):
        theirs, ours = (" and ".join(x.likelihoods) for x in (origin, objective_origin))
        raise ValueError(
            f"the bases come from factors of {theirs}, and the objective's likelihood is "
            f"{ours}: take "
            "the objective with which the factors were collected; or, if it is meant, "
            "dataclasses.replace(bases, origin=None)"
        )


def _warn_of_forward(bases: Eigenbases, likelihoods: Sequence[Any]) -> None:
    """Warn if the curvature contains no gradients."""
    fisher = None if bases.origin is None else FISHER_TYPES.get(bases.origin.fisher)
    if fisher is None:
        _warn_of_identities(bases, likelihoods)
    elif fisher.unit_outputs:
        warnings.warn(
            f"the bases are of fisher={fisher.name!r}, in which every G is the identity: {_NOT_F}",
            stacklevel=5,
        )


def _warn_of_identities(bases: Eigenbases, likelihoods: Sequence[Any]) -> None:
    """Warn if every G is the identity, for bases whose Fisher type is not known."""
    values = [bases.g[x.name].values for x in bases.layers if not x.is_diagonal]
    if bases.corrections is not None or any(isinstance(x, Tracer) for x in values):
        return
    # A bias that is added to a Gaussian's output has G = 1 exactly, and the output's width.
    by_right = len(likelihoods) if all(isinstance(x, Gaussian) for x in likelihoods) else 0
    if len({x.shape[-1] for x in values}) <= by_right:
        return
    if all((np.asarray(x) == 1).all() for x in values):
        warnings.warn(
            f"every G of the bases is the identity (fisher='forward'): {_NOT_F}", stacklevel=6
        )


def _rows(traced: Traced, per: Per) -> tuple[Atoms, tuple[int, ...]]:
    """The atoms of the axes that scores keep, and the lengths of these axes."""
    number = traced.num_examples
    if per != "token":
        return traced.examples, (number,)
    axes, shape = traced.output_axes(), traced.out_shapes[0].shape
    if traced.num_outputs > 1 or axes is None or len(shape) < 3:
        raise ValueError(
            f"per='token' needs one output (N, S, ...) with a position axis, got {shape}"
            + (f" and {traced.num_outputs - 1} more" if traced.num_outputs > 1 else "")
        )
    return (*traced.examples, *traced.analysis.table.atoms(axes[1])), (number, shape[1])


def _scale(at: Linearised, like: Array) -> Array:
    """From gradients of the mean loss to those of sums over terms; NaN if the loss is NaN."""
    bad = jnp.isnan(at.value)
    return jnp.where(bad, jnp.nan, at.terms.astype(like.dtype)).astype(like.dtype)
