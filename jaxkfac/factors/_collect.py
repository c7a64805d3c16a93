"""Value, gradient and every factor in one backward pass."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, PyTree

from jaxkfac._errors import LostRowsError
from jaxkfac.factors._diagonal_pass import diagonal_layers, per_example_diagonals
from jaxkfac.factors._factors import BiasMode, Factors
from jaxkfac.factors._objective import Batch, Objective, as_batch, takes_key
from jaxkfac.factors._slots import empty_slots, to_factors
from jaxkfac.factors._taps import tap
from jaxkfac.interception._rows import RowMask
from jaxkfac.interception._trace import Traced, trace
from jaxkfac.linalg._gram import statistics_dtype

LABELS = 0x6C61  # folded into the caller's key for sampled labels
Fisher = Literal["empirical", "mc"]
Sharing = Literal["expand"]
Uncovered = Literal["raise", "diagonal", "ignore"]


class ValueGradAndFactors(NamedTuple):
    """What one call returns."""

    value: Any
    grads: PyTree
    factors: Factors


def _one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


class FactorCollector:
    """The function that ``value_grad_and_factors`` returns. Pure; jit it."""

    def __init__(
        self,
        objective: Callable[..., Any],
        *,
        fisher: Fisher,
        bias: BiasMode,
        layers: str | None,
        experts: str | None,
        uncovered: Uncovered,
        max_dense: int,
        has_aux: bool,
        loss_terms: int | None,
    ) -> None:
        self._objective = objective
        self._fisher: Fisher = fisher
        self._bias: BiasMode = bias
        self._uncovered: Uncovered = uncovered
        self._finding = {"layers": layers, "max_dense": max_dense, "experts": experts}
        self._has_aux, self._loss_terms = has_aux, loss_terms
        self._traces: dict[Any, Traced] = {}

    def __call__(
        self,
        params: PyTree,
        batch: Any,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | None = None,
    ) -> ValueGradAndFactors:
        """Value, gradient and factors of one batch.

        Args:
            params: Parameters; integer leaves are held out and get zeros for a gradient.
            batch: ``(inputs, targets)`` or ``(inputs, targets, mask)`` for an ``Objective``;
                whatever the function takes, for a scalar loss.
            key: For dropout, and for the labels of ``fisher="mc"``.
            positions: ``(N, S)`` bool: which positions exist. Rows outside it are left out
                of every factor with their count. Its axes are those of the outputs.

        Returns:
            ``(value, grads, factors)``; value is ``(value, aux)`` with ``has_aux``.

        Raises:
            UncoveredParameterError: a parameter is covered by no layer.
            LostRowsError: ``positions`` is given and cannot be followed to a layer.
            ValueError: a batch that is empty, or does not fit the likelihood.
        """
        split = _Leaves(params)
        if isinstance(self._objective, Objective):
            return self._model(self._objective, split, as_batch(batch), key, positions)
        if positions is not None:
            raise ValueError("positions= needs an Objective: a scalar loss has no output axes")
        return self._scalar(split, batch, key)

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

    # -- an Objective -----------------------------------------------------------------

    def _model(
        self, objective: Objective, split: "_Leaves", batch: Batch, key: Any, positions: Any
    ) -> ValueGradAndFactors:
        if self._fisher == "mc" and key is None:
            raise ValueError('fisher="mc" samples labels: pass key=')
        model_key = key  # as the caller gave it, so that the value is the objective's own

        def forward(params: PyTree, inputs: PyTree, key: Any) -> Any:
            return objective.outputs(params, inputs, key)

        traced = self._trace(forward, split.tree, batch.inputs, model_key)
        masks = _masks(traced, positions)
        slots = empty_slots(traced, self._bias)

        def run(free: list[Any], slots: Any) -> Any:
            params = split.join(free)
            return traced.emit(tap, params, slots, batch.inputs, model_key, masks=masks)

        outputs, pull, aux = jax.vjp(run, split.free, slots, has_aux=True)

        def loss(outputs: Any, targets: Any) -> Any:
            return objective.loss(outputs, targets, batch.mask)

        value, pull_loss, terms = jax.vjp(lambda y: loss(y, batch.targets), outputs, has_aux=True)
        grads, emitted = pull(pull_loss(jnp.ones_like(value))[0])
        if self._fisher == "mc":
            label_key = jax.random.fold_in(key, LABELS)
            sampled = objective.likelihood.sample(label_key, jax.lax.stop_gradient(outputs))
            _, pull_sampled, _ = jax.vjp(lambda y: loss(y, sampled), outputs, has_aux=True)
            _, emitted = pull(pull_sampled(jnp.ones_like(value))[0])
            batch = batch._replace(targets=sampled)
        factors = to_factors(traced.table.layers, emitted, terms, self._bias)
        if self._uncovered == "diagonal" and traced.table.uncovered:
            factors = self._with_diagonals(objective, traced, split, batch, model_key, factors)
        out = (value, aux) if self._has_aux or objective.has_aux else value
        return ValueGradAndFactors(out, split.gradient(grads), factors)

    def _with_diagonals(
        self,
        objective: Objective,
        traced: Traced,
        split: "_Leaves",
        batch: Batch,
        key: Any,
        factors: Factors,
    ) -> Factors:
        layers = diagonal_layers(traced.table, split.tree)
        number = len(jax.tree.leaves(batch.targets)[0])
        print(
            f"jaxkfac: {len(layers)} parameters are covered by a second pass over "
            f"{number} examples, about one more gradient",
            file=sys.stderr,
        )
        sums = per_example_diagonals(objective, split.tree, batch, key, layers)
        return dataclasses.replace(
            factors,
            diagonals={**factors.diagonals, **sums},
            layers=(*factors.layers, *layers),
        )

    # -- a scalar loss ----------------------------------------------------------------

    def _scalar(self, split: "_Leaves", batch: Any, key: Any) -> ValueGradAndFactors:
        fn, passes_key = self._objective, takes_key(self._objective)

        def forward(params: PyTree, batch: Any, key: Any) -> Any:
            out = fn(params, batch, key=key) if passes_key else fn(params, batch)
            value, aux = out if self._has_aux else (out, None)
            if jnp.shape(value) != ():
                raise ValueError(
                    f"the loss has shape {jnp.shape(value)}, expected a scalar mean over rows; "
                    "give a model and a likelihood as jk.Objective instead"
                )
            return value, aux

        traced = self._trace(forward, split.tree, batch, key)
        slots = empty_slots(traced, self._bias)

        def run(free: list[Any], slots: Any) -> Any:
            return traced.emit(tap, split.join(free), slots, batch, key)

        (value, aux), (grads, emitted) = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(
            split.free, slots
        )
        terms = jnp.asarray(self._loss_terms, statistics_dtype(value.dtype))
        factors = to_factors(traced.table.layers, emitted, terms, self._bias)
        out = (value, aux) if self._has_aux else value
        return ValueGradAndFactors(out, split.gradient(grads), factors)

    def _trace(self, forward: Callable[..., Any], params: PyTree, *args: Any) -> Traced:
        """Trace once per set of shapes; a trace that closed over tracers is not kept."""
        leaves, tree = jax.tree.flatten((params, args))
        mesh = jax.sharding.get_abstract_mesh()
        key = (tree, tuple(jax.typeof(x) for x in leaves), mesh, jnp.zeros(()).dtype)
        if key in self._traces:
            return self._traces[key]
        lead = isinstance(self._objective, Objective)
        traced = trace(forward, params, *args, examples_lead=lead, **self._finding)
        if self._uncovered == "raise":
            traced.table.raise_uncovered()
        if not traced.holds_tracers:
            self._traces[key] = traced
        return traced


class _Leaves:
    """A parameter tree split into leaves with a gradient and held-out integer leaves."""

    def __init__(self, params: PyTree) -> None:
        self.tree = params
        leaves, self._structure = jax.tree.flatten(params)
        if not leaves:
            raise ValueError("params: the tree holds no arrays")
        self._leaves = leaves
        self._is_free = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
        self.free = [x for x, free in zip(leaves, self._is_free, strict=True) if free]

    def join(self, free: list[Any]) -> PyTree:
        rest = iter(free)
        leaves = [next(rest) if f else x for x, f in zip(self._leaves, self._is_free, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)

    def gradient(self, free: list[Any]) -> PyTree:
        rest = iter(free)
        zeros = [
            None
            if f
            else jnp.zeros(jnp.shape(x), x.dtype)
            if jnp.issubdtype(x.dtype, jnp.number)
            else x
            for x, f in zip(self._leaves, self._is_free, strict=True)
        ]
        leaves = [next(rest) if f else z for z, f in zip(zeros, self._is_free, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)


def _masks(traced: Traced, positions: Any) -> list[RowMask]:
    if positions is None:
        return []
    axes, shape = traced.output_axes(), traced.out_shapes[0].shape
    if positions.dtype != jnp.bool_ or axes is None:
        raise ValueError(f"positions: expected a bool array, got {positions.dtype}")
    if positions.ndim >= len(shape) or positions.shape != shape[: positions.ndim]:
        raise LostRowsError(
            f"positions have shape {positions.shape}, and the outputs' leading axes are "
            f"{shape[:-1]}: name rows that never reach the output with jk.mark_rows(x, mask)"
        )
    return [RowMask(positions, axes[: positions.ndim], complete=True)]


def value_grad_and_factors(
    objective: Callable[..., Any],
    *,
    fisher: Fisher = "empirical",
    sharing: Sharing = "expand",
    bias: BiasMode = "joint",
    layers: str | None = None,
    experts: str | None = None,
    uncovered: Uncovered = "raise",
    max_dense: int = 16384,
    has_aux: bool = False,
    loss_terms: int | None = None,
) -> FactorCollector:
    r"""Build a function that returns value, gradient and Kronecker factors.

    With $a$ the input row of a layer and $g$ the gradient of the sum of one example's loss
    terms with respect to its output row, over $N$ examples, $R$ terms and $S$ positions,

    $$A = \tfrac{1}{NS} \sum a a^\top, \qquad G = \tfrac{1}{NR} \sum g g^\top .$$

    Args:
        objective: An ``Objective``, or any scalar loss ``fn(params, batch)`` that is a mean
            over rows (then ``fisher="empirical"`` only, with ``loss_terms``).
        fisher: ``"empirical"``: the given targets, the gradient's own backward pass;
            ``"mc"``: labels sampled from the model, unbiased, a second pull of the same
            linearisation.
        sharing: ``"expand"``: every position is a row.
        bias: ``"joint"``: ones appended last to the inputs; ``"separate"``: the bias block
            is G.
        layers: Full-match pattern over layer names; ``None`` is all.
        experts: See ``find_layers``.
        uncovered: What to do with parameters that no rule covers: ``"raise"``, a
            per-example ``"diagonal"`` by a second pass, or ``"ignore"``.
        max_dense: A larger side is kept as a diagonal.
        has_aux: Whether the function returns ``(value, aux)``; an ``Objective`` says so
            itself.
        loss_terms: Number of rows a scalar loss is the mean of.

    Returns:
        A ``FactorCollector``: call it with ``(params, batch, key=None, positions=None)``.

    Raises:
        ValueError: an unknown option, or one that a scalar loss cannot give.

    Memory:
        The gradient's own, plus the factors; no activation is kept longer.

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
    _one_of("fisher", fisher, ("empirical", "mc"))
    _one_of("sharing", sharing, ("expand",))
    _one_of("bias", bias, ("joint", "separate"))
    _one_of("uncovered", uncovered, ("raise", "diagonal", "ignore"))
    if max_dense < 1:
        raise ValueError(f"max_dense={max_dense}: expected at least 1")
    if isinstance(objective, Objective):
        if loss_terms is not None:
            raise ValueError("loss_terms: an Objective counts its terms itself")
    else:
        if fisher != "empirical":
            raise ValueError(
                f'fisher="{fisher}" needs the model\'s outputs: give a jk.Objective, not a '
                "scalar loss"
            )
        if uncovered == "diagonal":
            raise ValueError('uncovered="diagonal" needs a jk.Objective, not a scalar loss')
        if loss_terms is None or loss_terms < 1:
            raise ValueError(
                f"loss_terms={loss_terms}: expected the number of rows that the loss is the mean of"
            )
    return FactorCollector(
        objective,
        fisher=fisher,
        bias=bias,
        layers=layers,
        experts=experts,
        uncovered=uncovered,
        max_dense=max_dense,
        has_aux=has_aux,
        loss_terms=loss_terms,
    )
