"""Tests on a user's model: whether examples meet, and whether gradient and factors are right."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    check_function,
    leaves_by_path,
    partition,
    with_leaves,
)
from jaxkfac._errors import at_least_one
from jaxkfac.curvature import Eigenbases, correct_eigenvalues, eigendecompose
from jaxkfac.factors import (
    Batch,
    ModelCall,
    Objective,
    Program,
    ValueGradAndFactors,
    as_batch,
    value_grad_and_factors,
)
from jaxkfac.factors.sums import Factors
from jaxkfac.interception import Layer
from jaxkfac.interception.coupling import Answer

DRAWS = 2  # number of parameter draws at which examples are replaced
_STEP = 0.1  # distance of a draw, relative to a parameter's size
_FAR = 1e3  # distance at which logits leave [0, 1], and probabilities do not


@dataclasses.dataclass(frozen=True)
class CoverageCheck:
    """The comparisons of :func:`check_coverage` and their results. ``print`` it.

    Attributes:
        value: Whether examples meet in values, as the program proves it.
        derivative: Whether they meet in derivatives, as the program proves it.
        seen: ``(replaced example, example whose output changed, relative change)`` for each pair
            that was seen to meet; the changed example is the one that changed most.
        pulled: ``(example, another one, relative size)`` for each pair in which the output of the
            first was seen to have a derivative in the inputs of the second.
        tried: How many examples were replaced, over all draws; 0 if none could be.
        gradient: Largest error of the gradient against plain JAX, relative to its largest entry.
        factors: By layer, the largest relative error of the batch's factors against the sum of
            single examples' factors.
        products: By layer, the largest relative error of the diagonal of the Fisher in its
            eigenbasis against explicit gradients of single examples.
        remarks: What was not compared, and why.
        doubts: Mistakes in the model that its outputs show, each with a remedy: probabilities where
            the likelihood expects logits.
    """

    value: Answer
    derivative: Answer
    seen: tuple[tuple[int, int, float], ...]
    pulled: tuple[tuple[int, int, float], ...]
    tried: int
    gradient: float
    factors: Mapping[str, float]
    products: Mapping[str, float]
    remarks: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def examples_meet(self) -> bool:
        """Whether examples were seen to meet, in values or in derivatives."""
        return bool(self.seen or self.pulled)

    def __str__(self) -> str:
        lines = [
            f"values: {self.value}; derivatives: {self.derivative} (from the program)",
            self._examples(),
            f"gradient beside plain JAX: {_digits(self.gradient)}",
        ]
        for what, errors in (
            ("factors beside the sum of single examples'", self.factors),
            ("Fisher's diagonal beside explicit gradients of examples", self.products),
        ):
            if errors:
                worst = max(errors, key=lambda name: _rank(errors[name]))
                lines.append(
                    f"{what}: {len(errors)} layers, worst {worst!r}, {_digits(errors[worst])}"
                )
        lines += [f"not compared: {remark}" for remark in self.remarks]
        return "\n".join([*lines, *self.doubts])

    def _examples(self) -> str:
        if self.seen:
            replaced, changed, by = max(self.seen, key=lambda pair: pair[2])
            return (
                f"examples: they meet. With example {replaced} replaced by another one of the "
                f"batch, the output of example {changed} changed by {by:.1e} of its size"
            )
        if self.pulled:
            one, second, by = max(self.pulled, key=lambda pair: pair[2])
            return (
                f"examples: they meet in derivatives. The output of example {one} has a "
                f"derivative in the inputs of example {second}, {by:.1e} of the size of its "
                f"derivative in its own inputs"
            )
        if not self.tried:
            return "examples: not tried"
        return (
            f"examples: none seen to meet in {self.tried} replacements at {DRAWS} draws of the "
            "parameters (which proves nothing)"
        )


def check_coverage(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: ArrayTree,
    key: Key[Array, ""] | None = None,
    *,
    state: ArrayTree | None = None,
    layers: str | None = None,
    experts: str | None = None,
    max_examples: int = 8,
    loss_terms: int | None = None,
) -> CoverageCheck:
    """Check this library's analysis on your own model. Run it once, on a small batch.

    It replaces some examples by others of the batch, one at a time, at two draws of the parameters,
    and compares the outputs of all other examples. If inputs are floating, it also takes the
    derivative of each example's outputs in the inputs of the others. It compares the gradient with
    plain JAX's, the factors with the sum of those of single examples, and the diagonal of the
    Fisher in the factors' eigenbasis (EKFAC) with explicit gradients of single examples. The
    factors are those of the given targets (``fisher="empirical"``) of the first ``max_examples``
    examples.

    It raises nothing for what it finds; ``print`` the result. It warns if the outputs are
    probabilities at the given parameters and at two draws far away, where the likelihood expects
    logits.

    Args:
        objective: The objective. For a scalar loss only the gradient is compared.
        params: Parameters.
        batch: As for :func:`value_grad_and_factors`; its arrays have the examples first.
        key: For dropout; the same key every time.
        state: What a call changes (batch statistics).
        layers: Full-match pattern over layer names; ``None`` for all.
        experts: See :func:`find_layers`.
        max_examples: How many examples are replaced, and how many the factors are computed from.
        loss_terms: Number of loss terms of a scalar loss that marks no outputs.

    Returns:
        A :class:`CoverageCheck`.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.
        ValueError: the batch does not fit the objective.

    Memory:
        The gradients of ``max_examples`` examples, and the batch's own backward pass.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"] - (x @ p["w"]).mean(0), jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (jnp.eye(3), jnp.zeros((3, 2)))
        >>> print(jk.check_coverage(objective, params, batch).examples_meet)
        True
    """
    at_least_one(max_examples=max_examples)
    check_arrays("params", params)
    check_arrays("batch", batch)
    finding: Any = {"layers": layers, "experts": experts}  # Any: keywords of different types
    if not isinstance(objective, Objective):
        check_function("objective", objective, "loss(params, batch), or a jk.Objective")
        stats = value_grad_and_factors(
            objective, loss_terms=loss_terms, uncovered="ignore", **finding
        )
        program = Program(objective, finding, cover=False)
        call = ModelCall(params, batch, key, state)
        traced = program.traced(call)
        remark = "examples and factors: a scalar loss does not show its examples"
        value, derivative = (traced.examples_meet(q) for q in ("value", "derivative"))
        error = _of_gradient(objective, stats, call)
        return CoverageCheck(value, derivative, (), (), 0, error, {}, {}, (remark,))
    full_batch = objective.batch(as_batch(batch))
    program = Program(objective, finding, cover=False)
    call = ModelCall(params, full_batch, key, state)
    traced = program.traced(call)
    stats = objective.programs.get(
        (check_coverage, layers, experts),
        lambda: value_grad_and_factors(objective, uncovered="ignore", **finding),
    )
    trial = _Trial(objective, stats, params, full_batch, key, state, max_examples)
    doubts = trial.probabilities()
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    pairs, tried = trial.replaced()
    pulled = trial.compared("derivatives between examples", trial.derivatives)
    gradient = _of_gradient(objective, stats, call)
    factors = trial.compared("factors", trial.summed)
    products = trial.compared("the Fisher's diagonal", lambda: trial.explicit(finding))
    return CoverageCheck(
        traced.examples_meet("value"),
        traced.examples_meet("derivative"),
        tuple(pairs),
        tuple((i, j, by) for (i, j), by in pulled.items()),
        tried,
        gradient,
        factors,
        products,
        tuple(trial.remarks),
        doubts,
    )


@dataclasses.dataclass
class _Trial:
    """The tests of one model and batch; ``remarks`` collects what cannot be compared."""

    objective: Objective
    stats: Callable[..., ValueGradAndFactors]
    params: ArrayTree
    batch: Batch
    key: Any
    state: Any
    most: int
    remarks: list[str] = dataclasses.field(default_factory=list)

    def outputs(self, params: ArrayTree, inputs: ArrayTree) -> list[Array]:
        """The model's outputs, one array for each likelihood."""
        return self.compiled(_outputs)(params, inputs, self.key, self.state)

    def probabilities(self) -> tuple[str, ...]:
        """Which outputs are probabilities where logits belong, whatever the parameters are."""
        doubts = self._doubts(self.params)
        for draw in range(1, DRAWS + 1) if doubts else ():
            far = self._doubts(drawn(self.params, draw, step=_FAR))
            doubts = {name: text for name, text in doubts.items() if name in far}
        return tuple(doubts.values())

    def _doubts(self, params: ArrayTree) -> dict[str, str]:
        outputs = self.outputs(params, self.batch.inputs)
        return self.objective.probabilities(self.objective.tree(outputs))

    def replaced(self) -> tuple[list[tuple[int, int, float]], int]:
        """The pairs of examples that were seen to meet, and how many examples were replaced."""
        number = self.batch.num_examples
        if number == 1:
            self.remarks.append("examples: a batch of one has no others")
            return [], 0
        substitutes = {
            i: j
            for i in range(min(number, self.most))
            if (j := self._different_example(i)) is not None
        }
        if not substitutes:
            self.remarks.append("examples: all inputs are identical, so no replacement shows")
            return [], 0

        pairs, tried = [], 0
        for draw in range(DRAWS):
            params = self.params if draw == 0 else drawn(self.params, draw)
            before = self.outputs(params, self.batch.inputs)
            if not all(np.isfinite(np.asarray(x)).all() for x in before):
                where = "of the parameters" if draw == 0 else "at the second draw of the parameters"
                self.remarks.append(f"examples: outputs {where} are not all finite")
                continue
            for i, j in substitutes.items():
                after = self.outputs(params, self._with(i, j))
                tried += 1
                for x, y in zip(before, after, strict=True):
                    pairs += _changed(np.asarray(x), np.asarray(y), i)
        return pairs, tried

    def _different_example(self, i: int) -> int | None:
        """An example whose inputs differ from those of example ``i``."""
        number = self.batch.num_examples
        rows = [np.asarray(x) for x in self._rows() if not _is_key(x)]
        for j in (*range(i + 1, number), *range(i)):
            if any(not np.array_equal(x[i], x[j], equal_nan=x.dtype.kind == "f") for x in rows):
                return j
        return None

    def _rows(self) -> list[Any]:
        leaves = jax.tree.leaves(self.batch.inputs)
        return [x for x in leaves if x.shape[:1] == (self.batch.num_examples,)]

    def _with(self, i: int, j: int) -> ArrayTree:
        number = self.batch.num_examples

        def one(x: Array) -> Array:
            return x.at[i].set(x[j]) if x.shape[:1] == (number,) else x

        return jax.tree.map(one, jax.tree.map(jnp.asarray, self.batch.inputs))

    def few(self, start: int, stop: int) -> ModelCall:
        """The call with examples from ``start`` to ``stop``."""
        number = self.batch.num_examples
        batch = jax.tree.map(lambda x: x[start:stop] if x.shape[:1] == (number,) else x, self.batch)
        return ModelCall(self.params, batch, self.key, self.state)

    def derivatives(self) -> dict[tuple[int, int], float]:
        """For each tested example, the one whose inputs its output's derivative is largest in.

        Only derivatives above rounding are returned.
        """
        number = self.batch.num_examples
        inputs = jax.tree.map(jnp.asarray, self.batch.inputs)
        free = tuple(
            k
            for k, x in enumerate(jax.tree.leaves(inputs))
            if x.shape[:1] == (number,) and jnp.issubdtype(x.dtype, jnp.floating)
        )
        if number == 1 or not free:
            return {}
        run, largest, unknown = self.compiled(_derivative_sizes, free), {}, []
        eps = [float(jnp.finfo(jax.tree.leaves(inputs)[k].dtype).eps) for k in free]
        for i in range(min(number, self.most)):
            by = np.array(run(self.params, inputs, self.key, self.state, i), np.float64)
            if not np.isfinite(by).all():
                unknown.append(str(i))
                continue
            size, by[i] = by.max() or 1.0, 0.0
            if by.max() > 64 * max(eps) * size:
                largest[i, int(by.argmax())] = float(by.max() / size)
        if unknown:
            self.remarks.append(
                f"derivatives between examples: not all finite for outputs of {', '.join(unknown)}"
            )
        return largest

    def compiled(self, run: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        """``run(objective, *static, ...)``, compiled once for the objective."""
        return self.objective.programs.get(
            (run, *static), lambda: jax.jit(functools.partial(run, self.objective, *static))
        )

    def compared(self, what: str, compare: Callable[[], dict[Any, float]]) -> dict[Any, float]:
        """The result of a comparison; if it fails, an empty one and a remark."""
        try:
            return compare()
        except Exception as error:  # a model may raise anything when it is transformed
            lines = str(error).splitlines() or [type(error).__name__]
            self.remarks.append(f"{what}: {lines[0][:300]}")
            return {}

    def summed(self) -> dict[str, float]:
        """Errors of the factors of some examples against the sum of each example's factors."""
        number = min(self.batch.num_examples, self.most)
        if number == 1:
            raise ValueError("a batch of one is its own sum")
        run = self.compiled(_factors, self.stats)
        together, total = run(self.few(0, number)), run(self.few(0, 1))
        for n in range(1, number):
            total = total + run(self.few(n, n + 1))
        errors = {}
        for layer in together.layers:
            pairs = zip(together[layer.name], total[layer.name], strict=True)
            errors[layer.name] = _largest(_error(x, y) for x, y in pairs)
        return errors

    def explicit(self, finding: Mapping[str, Any]) -> dict[str, float]:
        """Errors of measured eigenvalues against squares of explicit gradients of examples."""
        if self.objective.num_outputs > 1:
            raise ValueError("several outputs share an example's gradient among them")
        call = self.few(0, min(self.batch.num_examples, self.most))
        params, batch, key, state = call
        factors = self.stats(params, batch, key, state=state).factors
        bases = eigendecompose(factors, max_condition=math.inf)
        measure = correct_eigenvalues(self.objective, bases, experts=finding["experts"])
        measured = measure(params, batch, key, state=state)
        gradients = self.compiled(_example_gradients)(call)
        read = [layer.weight.path for layer in bases.layers]
        errors, left_out = {}, []
        for layer in bases.layers:
            if read.count(layer.weight.path) > 1 or layer.computed_from or not layer.is_covered:
                left_out.append(layer.name)
                continue
            squares = _squares(layer, measured, gradients)
            basis: Any = measured[layer.name]  # its class follows from ``is_diagonal``
            values = basis.raw_diagonal if layer.is_diagonal else basis.raw_values
            expected = squares / np.asarray(factors.terms)
            errors[layer.name] = _error(np.asarray(values).reshape(expected.shape), expected)
        if left_out:
            names = ", ".join(map(repr, left_out))
            self.remarks.append(
                f"the Fisher's diagonal of {names}: the weight has further readings, is computed, "
                "or has no block"
            )
        return errors


def _outputs(
    objective: Objective,
    params: ArrayTree,
    inputs: ArrayTree,
    key: Key[Array, ""] | None,
    state: ArrayTree | None,
) -> list[Array]:
    return jax.tree.leaves(objective.outputs(params, inputs, key, state)[0])


def _factors(
    objective: Objective, stats: Callable[..., ValueGradAndFactors], call: ModelCall
) -> Factors:
    return stats(call.params, call.batch, call.key, state=call.state).factors


def _example_gradients(objective: Objective, call: ModelCall) -> dict[str, Array]:
    params, batch, key, state = call

    def terms(free: dict[str, Array]) -> Array:
        outputs, _ = objective.outputs(with_leaves(params, free), batch.inputs, key, state)
        (head,) = objective.heads(outputs, batch.targets, batch.mask)
        kept_terms = head.kept_terms(root=True)
        return kept_terms.reshape(len(kept_terms), -1).sum(1)

    return jax.jacrev(terms)(partition(params)[0])


def _derivative_sizes(
    objective: Objective,
    free: tuple[int, ...],
    params: ArrayTree,
    inputs: ArrayTree,
    key: Key[Array, ""] | None,
    state: ArrayTree | None,
    i: Array | int,
) -> Array:
    """By example, the largest derivative of example ``i``'s outputs in that example's inputs.

    The outputs are weighted by normal numbers; the inputs are the leaves at ``free``.
    """
    leaves, tree = jax.tree.flatten(inputs)

    def outputs(moving: list[Array]) -> list[Array]:
        moved = dict(zip(free, moving, strict=True))
        every = [moved.get(k, x) for k, x in enumerate(leaves)]
        model_outputs, _ = objective.outputs(params, jax.tree.unflatten(tree, every), key, state)
        return jax.tree.leaves(model_outputs)

    out, vjp = jax.vjp(outputs, [leaves[k] for k in free])
    keys = jax.random.split(jax.random.key(0), len(out))
    cotangents = [
        jnp.zeros_like(x).at[i].set(jax.random.normal(key, x.shape[1:], x.dtype))
        for key, x in zip(keys, out, strict=True)
    ]
    sizes = [abs(x).reshape(len(x), -1).max(1).astype(jnp.float32) for x in vjp(cotangents)[0]]
    return jnp.stack(sizes).max(0)


def _squares(layer: Layer, bases: Eigenbases, gradients: Mapping[str, Array]) -> np.ndarray:
    """The sum over examples of squared gradients in the layer's eigenbasis."""
    basis: Any = bases[layer.name]  # it has vectors unless the layer is diagonal
    total: Any = 0.0
    for n in range(len(gradients[layer.weight.path])):
        kernel = layer.weight.read(gradients[layer.weight.path][n])
        if layer.is_diagonal:
            total = total + np.square(np.asarray(gradients[layer.weight.path][n]))
            continue
        kernel = kernel.reshape(*layer.stack, -1, layer.out_features)
        if layer.bias is not None and bases.wants_ones(layer):
            row = layer.bias.read(gradients[layer.bias.path][n])
            row = row.reshape(*layer.stack, 1, layer.out_features)
            kernel = jnp.concatenate([kernel, row], -2)
        if basis.a_vectors is not None:
            kernel = jnp.einsum("...ia,...ij->...aj", basis.a_vectors, kernel)
        if basis.g_vectors is not None:
            kernel = jnp.einsum("...ij,...jb->...ib", kernel, basis.g_vectors)
        total = total + np.square(np.asarray(kernel))
    return np.asarray(total)


def drawn(params: ArrayTree, draw: int, step: float = _STEP) -> ArrayTree:
    """Parameters of which each array is moved by ``step`` times its size, by default nearby."""
    free, _ = partition(params)
    moved = {}
    for k, (path, x) in enumerate(leaves_by_path(free).items()):
        key = jax.random.fold_in(jax.random.key(draw), k)
        size = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))) + 1e-3
        change = step * size * jax.random.normal(key, x.shape, jnp.float32)
        moved[path] = (x.astype(jnp.float32) + change).astype(x.dtype)
    return with_leaves(params, moved)


def _changed(before: np.ndarray, after: np.ndarray, i: int) -> list[tuple[int, int, float]]:
    """The example, other than ``i``, whose output changed most, if any changed."""
    size = np.abs(before).max() or 1.0
    by = np.abs(np.asarray(after, np.float64) - before).reshape(len(before), -1).max(1) / size
    by[i] = 0.0
    most = int(by.argmax())
    rounding = 64 * float(jnp.finfo(before.dtype).eps)
    return [(i, most, float(by[most]))] if not by[most] <= rounding else []


def _of_gradient(
    objective: Callable[..., Any], stats: Callable[..., ValueGradAndFactors], call: ModelCall
) -> float:
    params, batch, key, state = call
    named = {} if state is None else {"state": state}
    named |= {} if key is None or not isinstance(objective, Objective) else {"key": key}
    beside = state is not None or getattr(objective, "has_aux", False)
    grads = stats(params, batch, key, **({} if state is None else {"state": state})).grads

    def gradient(params: ArrayTree, batch: ArrayTree, named: dict[str, Any]) -> dict[str, Array]:
        def loss(free: dict[str, Array]) -> Array:
            out = objective(with_leaves(params, free), batch, **named)
            return out[0] if beside else out

        return jax.grad(loss)(partition(params)[0])

    run = jax.jit(gradient)
    if isinstance(objective, Objective):  # a scalar loss has no place to store the program
        run = objective.programs.get((_of_gradient, beside), lambda: run)
    plain = run(params, batch, named)
    by_path = partition(grads)[0]
    return _largest(_error(by_path[path], plain[path]) for path in plain)


def _error(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest entry; NaN if an entry is NaN."""
    x, y = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.abs(y).max() if y.size else 0.0
    return float(np.abs(x - y).max() / (size or 1.0)) if y.size else 0.0


def _largest(errors: Iterable[float]) -> float:
    """The largest error, 0 if there is none; NaN if one is, which ``max`` alone may leave out."""
    return max(errors, key=_rank, default=0.0)


def _digits(error: float) -> str:
    if math.isnan(error):
        return "not a number"
    if error == 0:
        return "equal"
    return f"{max(0.0, -math.log10(error)):.0f} digits (relative error {error:.1e})"


def _rank(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _is_key(x: Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
