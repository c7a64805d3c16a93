"""Value, gradient and every factor in one backward pass."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jaxtyping import Array, Bool, Key, PyTree

from jaxkfac.factors._diagonal_pass import diagonal_layers, per_example_diagonals
from jaxkfac.factors._factors import BiasMode, Factors
from jaxkfac.factors._fisher import FISHER_TYPES, Fisher, check_labels, sum_over_pulls
from jaxkfac.factors._objective import Batch, Objective, as_batch
from jaxkfac.factors._program import Leaves, Program
from jaxkfac.factors._statistics import Scales, Sharing, Statistics
from jaxkfac.interception._trace import Traced

Uncovered = Literal["raise", "diagonal", "ignore"]


class ValueGradAndFactors(NamedTuple):
    """What one call returns."""

    value: Any
    grads: PyTree
    factors: Factors


@dataclasses.dataclass(frozen=True)
class FactorCollector:
    """The function that ``value_grad_and_factors`` returns. Pure; jit it."""

    _program: Program
    _fisher: Fisher
    _sharing: Sharing
    _bias: BiasMode
    _scales: Scales
    _uncovered: Uncovered
    _has_aux: bool
    _loss_terms: int | None
    _samples: int
    _chunk: int

    def __call__(
        self,
        params: PyTree,
        batch: Any,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | None = None,
        labels: Any = None,
    ) -> ValueGradAndFactors:
        """Value, gradient and factors of one batch.

        Args:
            params: Parameters; integer leaves are held out and get zeros for a gradient.
            batch: ``(inputs, targets)`` or ``(inputs, targets, mask)`` for an ``Objective``;
                whatever the function takes, for a scalar loss.
            key: For dropout, and for the labels of ``fisher="mc"``.
            positions: ``(N, S)`` bool: which positions exist. Rows outside it are left out
                of every factor with their count. Its axes are those of the outputs.
            labels: ``(samples, *targets)``: labels for ``fisher="mc"`` in place of sampled
                ones, as a test or another framework wants them.

        Returns:
            ``(value, grads, factors)``; value is ``(value, aux)`` with ``has_aux``.

        Raises:
            UncoveredParameterError: a parameter is covered by no layer.
            LostRowsError: ``positions`` is given, or statistics of whole examples are asked
                for, and the rows cannot be followed to a layer.
            ValueError: a batch that is empty, or does not fit the likelihood.
        """
        split, objective = Leaves(params), self._program.objective
        is_model = isinstance(objective, Objective)
        if is_model:
            batch = as_batch(batch)
            check_labels(self._fisher, key, labels, batch)
        elif positions is not None or labels is not None:
            raise ValueError(
                "positions= and labels= need an Objective: a scalar loss has no outputs"
            )
        traced = self._program.traced(params, batch, key)
        forward = self._fisher == "forward"
        statistics = Statistics(traced, self._bias, self._sharing, self._scales, forward)
        at = self._program.linearise(
            traced,
            statistics.emit,
            statistics.slots(),
            split,
            batch,
            key,
            positions=positions,
            loss_terms=self._loss_terms,
        )
        if self._fisher in ("empirical", "forward"):
            outputs = statistics.outputs(at.emitted)
        else:
            outputs = sum_over_pulls(
                self._fisher,
                objective,
                at.outputs,
                batch,
                lambda cotangent: statistics.outputs(at.pull(cotangent)),
                key=key,
                labels=labels,
                samples=self._samples,
                chunk=self._chunk,
            )
        factors = statistics.factors(at.emitted, outputs, at.terms)
        if self._uncovered == "diagonal" and traced.table.uncovered:
            factors = self._with_diagonals(traced, split, batch, key, labels, factors)
        value = at.value
        if self._has_aux or (is_model and objective.has_aux):
            value = (at.value, at.aux)
        return ValueGradAndFactors(value, split.gradient(at.grads), factors)

    def factor_shapes(
        self,
        params: PyTree,
        batch: Any,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | None = None,
    ) -> Factors:
        """``Factors`` of ``jax.ShapeDtypeStruct``; nothing is computed."""
        if key is None and self._fisher == "mc":
            key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(self.__call__, params, batch, key, positions).factors

    def _with_diagonals(
        self, traced: Traced, split: Leaves, batch: Batch, key: Any, labels: Any, factors: Factors
    ) -> Factors:
        layers = diagonal_layers(traced.table, split.tree)
        print(
            f"jaxkfac: {len(layers)} parameters are covered by a second pass over "
            f"{traced.num_examples} examples, about one more gradient",
            file=sys.stderr,
        )
        sums = per_example_diagonals(
            self._program.objective,
            split.tree,
            batch,
            layers,
            fisher=self._fisher,
            key=key,
            labels=labels,
            samples=self._samples,
            chunk=self._chunk,
        )
        return dataclasses.replace(
            factors,
            diagonals={**factors.diagonals, **sums},
            layers=(*factors.layers, *layers),
        )


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def at_least_one(**numbers: int) -> None:
    """Refuse a number below one, by its name."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number}: expected at least 1")


def value_grad_and_factors(
    objective: Callable[..., Any],
    *,
    fisher: Fisher = "empirical",
    sharing: Sharing = "expand",
    bias: BiasMode = "joint",
    scales: Scales = "diagonal",
    layers: str | None = None,
    experts: str | None = None,
    uncovered: Uncovered = "raise",
    max_dense: int = 16384,
    has_aux: bool = False,
    loss_terms: int | None = None,
    samples: int = 1,
    chunk: int = 1,
) -> FactorCollector:
    r"""Build a function that returns value, gradient and Kronecker factors.

    With $a$ the input row of a layer and $g$ the gradient of the sum of one example's loss
    terms with respect to its output row, over $N$ examples, $R$ terms and $S$ positions,

    $$A = \tfrac{1}{NS} \sum a a^\top, \qquad G = \tfrac{1}{NR} \sum g g^\top ,$$

    or, with ``sharing="reduce"``, the same of each example's mean input row and summed $g$:
    $A = \tfrac1N \sum \bar a \bar a^\top$,
    $G = \tfrac{1}{NR} \sum_n (\sum_s g)(\sum_s g)^\top$.

    Args:
        objective: An ``Objective``, or any scalar loss ``fn(params, batch)`` that is a mean
            over rows (then ``fisher="empirical"`` only, with ``loss_terms``).
        fisher: ``"empirical"``: the given targets, the gradient's own backward pass.
            ``"mc"``: labels sampled from the model, unbiased; ``samples`` further pulls of
            the same linearisation. ``"exact"``: the expectation over labels; one pull for
            each loss term of an example and each output column, right where outputs mix
            tokens. ``"forward"``: G is the identity. ``"exact_if_terms_do_not_mix"``: one
            pull for each column, shared by all terms: equal to ``"exact"`` under expand where
            no layer mixes the terms of an example, and biased elsewhere.
        sharing: ``"expand"``: every position is a row; ``"reduce"``: every example is one,
            over all positions, uses and iterations. Embeddings use expand under either.
        bias: ``"joint"``: ones appended last to the inputs; ``"separate"``: the bias block
            is G.
        scales: For normalisation scales and lone biases: ``"diagonal"``: as the sharing
            says, squares of each position's or each example's gradient.
            ``"exact_diagonal"``: each example's, under either sharing: the diagonal of the
            Fisher itself. ``"full_block"``: the whole block
            $\tfrac{1}{NR} \sum_n \gamma_n \gamma_n^\top$ of each example's gradient
            $\gamma_n$, read as ``g`` beside an ``a`` of one.
        layers: Full-match pattern over layer names; ``None`` is all.
        experts: See ``find_layers``.
        uncovered: What to do with parameters that no rule covers: ``"raise"``, a
            per-example ``"diagonal"`` by a second pass, or ``"ignore"``.
        max_dense: A larger side is kept as a diagonal.
        has_aux: Whether the function returns ``(value, aux)``; an ``Objective`` says so
            itself.
        loss_terms: Number of rows a scalar loss is the mean of.
        samples: How many labels ``"mc"`` samples for each term.
        chunk: How many pulls of ``"mc"`` and ``"exact"`` run at once.

    Returns:
        A ``FactorCollector``: call it with ``(params, batch, key=None, positions=None)``.

    Raises:
        ValueError: an unknown option, or one that a scalar loss cannot give.

    Memory:
        The gradient's own, plus the factors; no activation is kept longer. ``"mc"`` with
        several samples and ``"exact"`` add ``chunk`` times the memory of one backward pass
        and its output sides. Statistics by example hold ``N (in + out)`` elements a layer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> stats = jax.jit(jk.value_grad_and_factors(objective))
        >>> x, y = jnp.eye(3), jnp.zeros((3, 2))
        >>> value, grads, factors = stats({"w": jnp.ones((3, 2))}, (x, y))
        >>> factors["w"].a.shape, factors["w"].g.shape
        ((3, 3), (2, 2))

    References:
        James Martens and Roger Grosse, "Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature", 2015. Runa Eschenhagen et al., "Kronecker-Factored Approximate
        Curvature for Modern Neural Network Architectures", 2023.
    """
    one_of("fisher", fisher, FISHER_TYPES)
    one_of("sharing", sharing, get_args(Sharing))
    one_of("bias", bias, ("joint", "separate"))
    one_of("scales", scales, get_args(Scales))
    one_of("uncovered", uncovered, get_args(Uncovered))
    at_least_one(max_dense=max_dense, samples=samples, chunk=chunk)
    if fisher == "forward" and uncovered == "diagonal":
        raise ValueError(
            'uncovered="diagonal" squares gradients, and fisher="forward" has none: choose '
            'another Fisher type, or uncovered="ignore"'
        )
    if isinstance(objective, Objective):
        if loss_terms is not None:
            raise ValueError("loss_terms: an Objective counts its terms itself")
    else:
        _check_scalar_loss(fisher, sharing, scales, uncovered, loss_terms)
    finding = {
        "layers": layers,
        "max_dense": max_dense,
        "experts": experts,
        "scale_blocks": scales == "full_block",
    }
    program = Program(objective, finding, cover=uncovered == "raise", has_aux=has_aux)
    return FactorCollector(
        program, fisher, sharing, bias, scales, uncovered, has_aux, loss_terms, samples, chunk
    )


def _check_scalar_loss(
    fisher: Fisher, sharing: Sharing, scales: Scales, uncovered: Uncovered, terms: int | None
) -> None:
    """Refuse what needs a model's outputs, which a scalar loss does not show."""
    wrong = {
        "fisher": (fisher, "empirical"),
        "sharing": (sharing, "expand"),
        "scales": (scales, "diagonal"),
    }
    for name, (value, only) in wrong.items():
        if value != only:
            raise ValueError(
                f'{name}="{value}" needs the model\'s outputs: give a jk.Objective, not a '
                "scalar loss"
            )
    if uncovered == "diagonal":
        raise ValueError('uncovered="diagonal" needs a jk.Objective, not a scalar loss')
    if terms is None or terms < 1:
        raise ValueError(
            f"loss_terms={terms}: expected the number of rows that the loss is the mean of"
        )
