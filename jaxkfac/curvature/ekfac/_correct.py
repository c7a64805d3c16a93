"""EKFAC: eigenvalues measured in the eigenbases of the factors."""

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkfac._arguments import ArrayTree, check_function
from jaxkfac._errors import (
    CoupledExamplesError,
    LostRowsError,
    UnknownLayerError,
    at_least_one,
    nearest,
    one_of,
)
from jaxkfac._mapped_axes import AxisName, axis_names, check_mapped, sum_over_devices
from jaxkfac.blocks import Corrections, Origin, corrections_of
from jaxkfac.curvature._eigenbases import (
    Eigenbases,
    check_all_vectors,
    check_bases,
    check_vectors,
)
from jaxkfac.curvature.ekfac._statistics import Per, SquaredGradients, Squares
from jaxkfac.factors import (
    Estimator,
    Linearised,
    ModelCall,
    Objective,
    Program,
    apart_remedy,
    check_alone,
    check_word,
    estimator_of,
    per_example_diagonals,
)
from jaxkfac.interception import Layer, LayerTable, Traced, fast_convolutions
from jaxkfac.interception.coupling import Word
from jaxkfac.linalg import sum_over_chunks

MeasuredFisher = Literal["empirical", "mc", "exact"]


@dataclasses.dataclass(frozen=True, eq=False)  # bases hold arrays, which have no hash
class EigenvalueCorrector:
    """The function that ``correct_eigenvalues`` returns. Pure; jit it."""

    _program: Program
    _bases: Eigenbases
    _estimator: Estimator
    _per: Per

    def __call__(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree | None = None,
        state: ArrayTree | None = None,
    ) -> Eigenbases:
        """Measure the eigenvalues of one batch, and return the bases with them.

        Args:
            params: Parameters.
            batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``.
            key: For dropout, and for the labels of ``fisher="mc"``.
            positions: ``(N, S)`` bool: which positions exist. Other rows do not count. Floating
                weights, which weigh A alone, leave out the rows whose weight is 0.
            labels: ``(samples, *targets)`` for ``fisher="mc"``, in place of sampled ones.
            state: What a call changes (batch statistics); the changes are left out.

        Returns:
            The same eigenvectors; ``values`` and ``raw_values`` of each layer are measured.

        Raises:
            UnknownLayerError: the program lacks a layer of the bases.
            CoupledExamplesError: an example's output depends on other examples, and gradients
                of single examples are measured.
            LostRowsError: ``positions`` cannot be followed to a layer; or, for a scalar loss, the
                rows of a layer cannot be assigned to examples.
            ValueError: a layer differs from that of the bases, or the batch does not fit.
        """
        objective, bases = self._program.objective, self._bases
        check_mapped("jk.correct_eigenvalues", self._program.axes)
        has_outputs = isinstance(objective, Objective)
        batch = objective.batch(batch) if has_outputs else batch
        estimator = self._estimator.bound(key, labels, batch if has_outputs else None)
        call = ModelCall(params, batch, key, state)
        traced = self._program.traced(call)
        if not has_outputs and not traced.marks:
            raise TypeError(
                "correct_eigenvalues needs a model and a likelihood, to tell examples apart: give "
                "a jk.Objective, or name the outputs inside the loss with jk.mark_outputs, not "
                f"{objective!r}"
            )
        # Parameters that no rule covers have no taps; their squares come from a second pass.
        extra = [layer for layer in bases.layers if not layer.is_covered]
        check_program_layers(traced.table, [layer for layer in bases.layers if layer.is_covered])
        if has_outputs:
            # Values are checked here, where they are concrete, because a target out of range makes
            # all measured values NaN inside `jit`.
            estimator.check_values(objective, self._program.output_shapes(traced), batch)
        elif extra:
            raise ValueError(
                f"parameter {extra[0].weight.path!r} is covered by no layer, and a scalar loss "
                "does not run each example by itself: give a jk.Objective"
            )
        _check_examples(self._program, traced, bases, extra, self._per)

        def linearised(traced: Traced) -> tuple[Linearised, Callable[..., Squares]]:
            squared = SquaredGradients(traced, bases, self._per)
            at = self._program.linearise(
                traced, squared, call, positions=positions, differentiate=False
            )
            return at, lambda emitted: squared.outputs(emitted, bases)

        try:
            # One pass for all examples is tried first, because only the trace of the taps shows
            # whether every layer's rows belong to examples.
            at, outputs = linearised(traced)
            squares = estimator.gathered(objective, at, batch, outputs)
        except LostRowsError as error:
            # `_isolated` needs outputs of the same examples, and marks may have different ones.
            # With one example there is nothing to separate, so the error is about something else.
            if not has_outputs or traced.num_examples == 1:
                raise
            number = traced.num_examples
            _say_isolated(error, number)
            at, outputs = linearised(dataclasses.replace(traced, isolated=True))
            squares = _isolated(estimator, at, outputs, number)
        squares = sum_over_devices(squares, self._program.axes)
        scale = at.squares_to_sums
        squares = jax.tree.map(lambda x: x * scale.astype(x.dtype), squares)
        sums = squares.values
        if extra:
            axes = self._program.axes
            more = per_example_diagonals(objective, call, extra, estimator, axes)
            sums = sums | at.poisoned(more)
        corrections = Corrections(sums, squares.bias_values, at.all_terms)
        marks = [mark.likelihood for mark in traced.marks]
        likelihoods = jax.tree.leaves(objective.likelihood) if has_outputs else marks
        origin = Origin.of(estimator.name, likelihoods, self._program.examples)
        return dataclasses.replace(bases, corrections=corrections, origin=origin)


def _say_isolated(error: LostRowsError, number: int) -> None:
    lost = str(error).partition(",")[0]
    print(
        f"jaxkfac: {lost}; so gradients of whole examples take a backward pass for each of "
        f"the {number} examples, and per='token' takes one for all",
        file=sys.stderr,
    )


def _isolated(
    estimator: Estimator, at: Linearised, outputs: Callable[..., Squares], number: int
) -> Squares:
    """Squares of single examples' gradients, from one backward pass for each example.

    It is not needed to know which rows belong to an example: all other cotangents are zero.
    """
    assert at.terms_of is not None

    def contribution(cotangent: ArrayTree) -> Squares:
        def one(examples: Int[Array, " 1"], _: Array | None) -> Squares:
            def alone(x: Array) -> Array:
                mine = jnp.arange(number) == examples
                return jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

            # The same linearization for all examples: only the backward pass is repeated.
            return outputs(at.vjp(jax.tree.map(alone, cotangent)))

        return sum_over_chunks(one, jnp.arange(number), 1, in_loop=fast_convolutions)

    return estimator.expectation(at.terms_of, at.outputs, at.batch, contribution)


def correct_eigenvalues(
    objective: Callable[..., Any],
    bases: Eigenbases,
    *,
    fisher: MeasuredFisher | Estimator = "empirical",
    per: Per = "example",
    experts: str | None = None,
    samples: int = 1,
    chunk: int = 1,
    examples: Word | None = None,
    axis_name: AxisName = None,
) -> EigenvalueCorrector:
    r"""Build a function that measures eigenvalues in given eigenbases (EKFAC).

    The eigenvectors of $A \otimes G$ are kept. The products of the factors' eigenvalues are
    replaced by second moments of the gradient in that basis: for each layer

    $$\lambda = \tfrac{1}{NR} \sum_n \Bigl( Q_A^\top \bigl[\sum_s a_s g_s^\top\bigr] Q_G
    \Bigr)^{\odot 2} .$$

    This is the diagonal of $Q^\top F Q$ for the layer's block $F$ of the Fisher, and the best
    diagonal in that basis: $\lVert Q \operatorname{diag}(\lambda) Q^\top - F \rVert_F$ is never
    larger than with the products, and the traces agree.

    If a parameter is read in two orientations (a tied embedding and head), its gradient is the sum
    over both uses, measured in the bases of the block that the optimizer uses, the head's. The
    values of the other block come from its own use.

    Args:
        objective: The objective, or a scalar loss that marks its outputs.
        bases: From :func:`eigendecompose`, with vectors.
        fisher: Which gradients: ``"empirical"``, ``"mc"`` or ``"exact"``, as in
            :func:`value_grad_and_factors`, or an ``Estimator`` of your own.
        per: ``"example"``: squares of each example's gradient, summed over all its positions,
            uses and iterations. ``"token"``: squares of each position's,
            $\tfrac{1}{NR} \sum_{n,s} (Q_A^\top a_s g_s^\top Q_G)^{\odot 2}$, which leaves out
            the products of different positions, as the factors of ``sharing="expand"`` do.
            Full blocks of scales, and parameters that no rule covers, are always measured by
            example.
        experts: As for the factors.
        samples: How many labels ``"mc"`` samples for each term.
        chunk: How many vector-Jacobian products of ``"mc"`` and ``"exact"`` run at once.
        examples: As for :func:`value_grad_and_factors`.
        axis_name: As for :func:`value_grad_and_factors`: eigenvalues are those of the rows of all
            devices.

    Returns:
        An ``EigenvalueCorrector``: call it with ``(params, batch, key=None,
        positions=None)``. The bases it returns work wherever ``bases`` did, except in
        ``reconstruct``. Combine those of several batches with ``+``, or average them with
        :func:`update_average` (in the same eigenvectors; start anew after a new decomposition).
        If the bases change from call to call, build it inside the jitted function.

    Raises:
        ValueError: an unknown option, or bases without vectors.
        TypeError: when called: ``objective`` is no ``Objective`` and marks no outputs.

    Memory:
        The forward pass and the backward pass to the inputs of layers; no gradient of the
        parameters, and one row-sized copy of each layer's inputs and outputs at a time. By
        example, with more than four positions, gradients of as many examples as fit in 32 MiB (on
        the CPU, of one). If the rows of a layer cannot be assigned to examples (a ``lax.map`` over
        micro-batches), each example takes its own backward pass, and a line on stderr says so. A
        layer that an example passes several times (tied, shared, in a recurrent loop) holds
        ``N in out`` elements, except with ``per="token"``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = jk.value_grad_and_factors(objective)(params, batch)
        >>> bases = jk.eigendecompose(factors)
        >>> corrected = jax.jit(jk.correct_eigenvalues(objective, bases))(params, batch)
        >>> corrected["w"].raw_values.shape, float(corrected["w"].raw_values.sum().round(3))
        ((3, 2), 2.0)

    References:
        Thomas George et al., "Fast Approximate Natural Gradient Descent in a
        Kronecker-factored Eigenbasis", 2018.
    """
    if not isinstance(objective, Objective):
        check_function("objective", objective, "loss(params, batch), or a jk.Objective")
    estimator = estimator_of(fisher, samples=samples, chunk=chunk, of_examples=True)
    one_of("per", per, get_args(Per))
    at_least_one(samples=samples, chunk=chunk)
    check_bases(bases)
    _check_vectors(bases)
    # Only the layers of the bases are found and tapped; the others cost nothing, and may be ones
    # that no rule covers.
    names = [layer.name for layer in bases.layers if layer.is_covered]
    finding = {"layers": "|".join(map(re.escape, names)), "experts": experts}
    check_word(examples)
    axes = axis_names(axis_name) or ()
    program = Program(objective, finding, cover=False, examples=examples, axes=axes)
    return EigenvalueCorrector(program, bases, estimator, per)


@corrections_of.register
def _corrections_of_bases(
    bases: Eigenbases,
    program: Program,
    estimator: Estimator,
    call: ModelCall,
    positions: Bool[Array, "..."] | Float[Array, "..."] | None,
) -> Corrections:
    """Measure like ``correct_eigenvalues``, with a program that exists already.

    Raises:
        ValueError: the Fisher type has no gradients of whole examples, or the bases lack vectors.
    """
    if not estimator.of_examples:
        raise ValueError(
            f"bases= measures gradients of examples, for which fisher={estimator.name!r} does not "
            'stand: choose "empirical", "mc" or "exact"'
        )
    _check_vectors(bases)
    corrector = EigenvalueCorrector(program, bases, estimator, "example")
    labels = estimator.labels
    measured = corrector(
        call.params, call.batch, call.key, positions, labels=labels, state=call.state
    )
    assert measured.corrections is not None
    return measured.corrections


def _check_vectors(bases: Eigenbases) -> None:
    for layer in bases.layers:
        if layer.is_diagonal:
            continue
        check_vectors(bases, layer)
        # With a truncated basis the squares outside it are lost, and their trace with them.
        check_all_vectors(bases, layer, "measured eigenvalues")


def _check_examples(
    program: Program, traced: Traced, bases: Eigenbases, extra: list[Layer], per: Per
) -> None:
    """Refuse gradients of single examples if an example's output depends on others."""
    if extra:
        check_alone(program, traced, extra)
    # A full block of a scale has gradients of whole examples, whatever `per` says.
    by_example = [x for x in bases.layers if per == "example" or (x.is_elementwise and x.g_dense)]
    if by_example and (met := program.meeting(traced, "derivative")):
        names = ", ".join(repr(layer.name) for layer in by_example)
        raise CoupledExamplesError(
            f"{names}: eigenvalues are measured with gradients of single examples, and {met}. "
            "Measure rows by themselves with per='token', or leave these layers out of the bases; "
            "where the examples meet in batch statistics and nowhere else, use evaluation mode "
            f"(Linen: use_running_average=True; NNX: model.eval()){apart_remedy(met)}"
        )


def check_program_layers(table: LayerTable, layers: list[Layer]) -> None:
    """Refuse a program whose layers are not those of the bases.

    Raises:
        UnknownLayerError: the program lacks a layer of the bases.
        ValueError: a layer of that name differs between the two.
    """
    by_name = {layer.name: layer for layer in table.layers}
    for layer in layers:
        if layer.name not in by_name:
            raise UnknownLayerError(
                f"the bases have a layer {layer.name!r} that the program lacks; the nearest names "
                f"are {nearest(layer.name, by_name)}"
            )
        program_layer = by_name[layer.name]
        for what in ("kind", "weight", "bias"):
            mine, theirs = getattr(layer, what), getattr(program_layer, what)
            if mine != theirs:
                raise ValueError(
                    f"layer {layer.name!r}: the bases have {what} {mine}, the program {theirs}. "
                    "Take the objective, and experts=, with which the factors were collected."
                )
