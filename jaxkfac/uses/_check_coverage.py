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
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, correct_eigenvalues, eigendecompose
from jaxkfac.factors import (
    Batch,
    Estimator,
    ModelCall,
    Objective,
    Program,
    ValueGradAndFactors,
    as_batch,
    takes_key,
    value_grad_and_factors,
)
from jaxkfac.interception import Layer, Traced
from jaxkfac.interception.coupling import Answer

DRAWS = 2  # number of parameter draws at which examples are replaced
_STEP = 0.1  # distance of a draw, relative to a parameter's size
_JAX_FOOTER = "\n--------------------"  # JAX adds a note on its traceback below such a line
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
    fisher: str | Estimator = "empirical",
    max_examples: int = 8,
    loss_terms: int | None = None,
    has_aux: bool = False,
) -> CoverageCheck:
    """Check this library's analysis on your own model. Run it once, on a small batch.

    It replaces some examples by others of the batch, one at a time, at two draws of the parameters,
    and compares the outputs of all other examples. If inputs are floating, it also takes the
    derivative of each example's outputs in the inputs of the others. It compares the gradient with
    plain JAX's, the factors with the sum of those of single examples, and the diagonal of the
    Fisher in the factors' eigenbasis (EKFAC) with explicit gradients of single examples, at the
    given targets. Factors are those of the first ``max_examples`` examples.

    A single example is the batch with the loss terms of all other examples masked, so that dropout
    draws the same numbers and every other array stays the same. Only the input sides A count rows
    without loss terms; they are compared with those of examples run alone, where an example alone
    has the outputs that it has in the batch. Rows of the inputs are replaced only where their
    leading axis is known to be the examples, or where all inputs have that leading axis.

    It raises nothing for what it finds; ``print`` the result. It warns if the outputs are
    probabilities at the given parameters and at two draws far away, where the likelihood expects
    logits.

    Args:
        objective: The objective. For a scalar loss only the gradient is compared.
        params: Parameters.
        batch: As for :func:`value_grad_and_factors`.
        key: For dropout, and for the labels of ``fisher="mc"``; the same key every time.
        state: What a call changes (batch statistics).
        layers: Full-match pattern over layer names; ``None`` for all.
        experts: See :func:`find_layers`.
        fisher: As for :func:`value_grad_and_factors`.
        max_examples: How many examples are replaced, and how many the factors are computed from.
        loss_terms: Number of loss terms of a scalar loss that marks no outputs.
        has_aux: Whether a scalar loss returns ``(value, aux)``.

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
        call = ModelCall(params, batch, key, state)
        return _of_scalar_loss(objective, call, finding, fisher, loss_terms, has_aux)
    full_batch = objective.batch(as_batch(batch))
    program = Program(objective, finding, cover=False)
    call = ModelCall(params, full_batch, key, state)
    traced = program.traced(call)

    def collector(fisher: Any) -> Callable[..., ValueGradAndFactors]:
        return objective.programs.get(
            (check_coverage, layers, experts, fisher),
            lambda: value_grad_and_factors(objective, uncovered="ignore", **finding, fisher=fisher),
        )

    stats = collector(fisher)
    trial = _Trial(objective, stats, params, full_batch, key, state, max_examples, traced)
    doubts = trial.probabilities()
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    pairs, tried = trial.replaced()
    pulled = trial.compared("derivatives between examples", trial.derivatives)
    gradient = _of_gradient(objective, stats, call)
    factors: dict[str, float] = {}
    if met := trial.meeting(bool(pairs or pulled)):
        trial.remarks.append(f"factors: {met}, so those of the batch are no sum over examples")
    else:
        factors = trial.compared("factors", trial.summed)
    products = trial.compared(
        "the Fisher's diagonal", lambda: trial.explicit(finding, collector("empirical"))
    )
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
    traced: Traced
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
        if not self.by_example:
            self.remarks.append(
                "examples: no array of the inputs has a leading axis that is known to be the "
                "examples, so none was replaced"
            )
            return [], 0
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
        return [leaves[k] for k in self.by_example]

    @functools.cached_property
    def by_example(self) -> tuple[int, ...]:
        """The leaves of the inputs whose entry ``i`` is example ``i``.

        A leading axis of that length is not enough: an array of a batched graph has it by chance.
        """
        leaves, number = jax.tree.leaves(self.batch.inputs), self.batch.num_examples
        fitting = [k for k, x in enumerate(leaves) if np.shape(x)[:1] == (number,)]
        if len(fitting) == len(leaves):
            return tuple(fitting)
        certain = tuple(k for k in fitting if self.traced.is_by_example(k))
        if len(certain) < len(fitting):
            paths = [jax.tree_util.keystr(at) for at, _ in _leaves_with_path(self.batch.inputs)]
            left = ", ".join(f"inputs{paths[k]}" for k in fitting if k not in certain)
            self.remarks.append(
                f"examples: the rows of {left} were not replaced, because its leading axis of "
                f"{number} is not known to be the examples"
            )
        return certain

    def _of_inputs(self, change: Callable[[Any], Any]) -> ArrayTree:
        """The inputs, with the arrays that are by example changed."""
        leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, self.batch.inputs))
        changed = [change(x) if k in self.by_example else x for k, x in enumerate(leaves)]
        return jax.tree.unflatten(tree, changed)

    def _with(self, i: int, j: int) -> ArrayTree:
        return self._of_inputs(lambda x: x.at[i].set(x[j]))

    def few(self, start: int, stop: int) -> ModelCall:
        """The call with examples from ``start`` to ``stop`` alone."""
        inputs = self._of_inputs(lambda x: x[start:stop])
        targets, mask = jax.tree.map(lambda x: x[start:stop], tuple(self.batch[1:]))
        batch = self.batch._replace(inputs=inputs, targets=targets, mask=mask)
        return ModelCall(self.params, batch, self.key, self.state)

    def masked(self, start: int, stop: int) -> ModelCall:
        """The call with the loss terms of examples from ``start`` to ``stop``, and all rows."""
        outputs = self.outputs(self.params, self.batch.inputs)
        heads = self.objective.heads(self.objective.tree(outputs), None, self.batch.mask)
        masks = []
        for head in heads:
            mask = jnp.ones(head.terms_shape, bool) if head.mask is None else jnp.asarray(head.mask)
            at = np.arange(len(mask)).reshape(-1, *[1] * (mask.ndim - 1))
            chosen = jnp.asarray((start <= at) & (at < stop))
            masks.append(jnp.where(chosen, mask, jnp.zeros((), mask.dtype)))
        batch = self.batch._replace(mask=self.objective.tree(masks))
        return ModelCall(self.params, batch, self.key, self.state)

    def meeting(self, seen: bool) -> str:
        """Where examples meet, in derivatives or values; empty if they are not known to."""
        answers = [self.traced.examples_meet(question) for question in ("derivative", "value")]
        met = next((str(x) for x in answers if x.answer == "yes"), "")
        return met or "the examples were seen to meet" * seen

    def run_alone(self, number: int) -> bool:
        """Whether each of the first examples alone has the outputs that it has in the batch."""
        together = self.outputs(self.params, self.batch.inputs)
        for n in range(number):
            alone = self.outputs(self.params, self.few(n, n + 1).batch.inputs)
            for x, y in zip(together, alone, strict=True):
                rounding = 1024 * float(jnp.finfo(x.dtype).eps)
                if y.shape != (1, *x.shape[1:]) or not _error(y[0], x[n]) <= rounding:
                    return False
        return True

    def derivatives(self) -> dict[tuple[int, int], float]:
        """For each tested example, the one whose inputs its output's derivative is largest in.

        Only derivatives above rounding are returned.
        """
        number = self.batch.num_examples
        inputs = jax.tree.map(jnp.asarray, self.batch.inputs)
        leaves = jax.tree.leaves(inputs)
        free = tuple(k for k in self.by_example if jnp.issubdtype(leaves[k].dtype, jnp.floating))
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
            text = str(error).split(_JAX_FOOTER)[0].strip() or type(error).__name__
            self.remarks.append(f"{what}: {text}")
            return {}

    def summed(self) -> dict[str, float]:
        """Errors of the factors of some examples against the sum of each example's factors."""
        number = min(self.batch.num_examples, self.most)
        if number == 1:
            raise ValueError("a batch of one is its own sum")
        run = self.compiled(_factors, self.stats)
        together, total = run(self.masked(0, number)), run(self.masked(0, 1))
        for n in range(1, number):
            total = total + run(self.masked(n, n + 1))
        errors, sides = {}, [together[layer.name] for layer in together.layers]
        size = max((np.abs(np.asarray(x[-1])).max() for x in sides if x[-1].size), default=0.0)
        for layer, one in zip(together.layers, sides, strict=True):
            # The last side is G, or the diagonal; A counts rows without loss terms too.
            errors[layer.name] = _error(one[-1], total[layer.name][-1], size, power=2)
        return self._with_inputs(errors, number)

    def _with_inputs(self, errors: dict[str, float], number: int) -> dict[str, float]:
        """The errors, and those of A where examples can run alone."""
        if not self.run_alone(number):
            self.remarks.append(
                "A of the factors: an example alone has other outputs than in the batch (random "
                "masks, or arrays that are not split by example)"
            )
            return errors
        run = self.compiled(_factors, self.stats)
        together, total = run(self.few(0, number)), run(self.few(0, 1))
        for n in range(1, number):
            total = total + run(self.few(n, n + 1))
        if set(together) != set(total) or not set(errors) <= set(together):
            self.remarks.append("A of the factors: an example alone has other layers")
            return errors
        return {
            name: _largest([error, *(_error(x, y) for x, y in _sides_a(together, total, name))])
            for name, error in errors.items()
        }

    def explicit(
        self, finding: Mapping[str, Any], stats: Callable[..., ValueGradAndFactors]
    ) -> dict[str, float]:
        """Errors of measured eigenvalues against squares of explicit gradients of examples."""
        if self.objective.num_outputs > 1:
            raise ValueError("several outputs share an example's gradient among them")
        number = min(self.batch.num_examples, self.most)
        call = self.masked(0, number)
        params, batch, key, state = call
        factors = stats(params, batch, key, state=state).factors
        bases = eigendecompose(factors, max_condition=math.inf)
        measure = correct_eigenvalues(self.objective, bases, experts=finding["experts"])
        measured = measure(params, batch, key, state=state)
        gradients = self.compiled(_example_gradients, number)(call)
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


def _sides_a(one: Factors, other: Factors, name: str) -> list[tuple[Any, Any]]:
    """The input sides of a layer's factors; none for a diagonal."""
    return list(zip(one[name], other[name], strict=True))[:-1]


def _example_gradients(objective: Objective, number: int, call: ModelCall) -> dict[str, Array]:
    params, batch, key, state = call

    def terms(free: dict[str, Array]) -> Array:
        outputs, _ = objective.outputs(with_leaves(params, free), batch.inputs, key, state)
        (head,) = objective.heads(outputs, batch.targets, batch.mask)
        kept_terms = head.kept_terms(root=True)[:number]
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


def _of_scalar_loss(
    loss: Callable[..., Any],
    call: ModelCall,
    finding: Mapping[str, Any],
    fisher: str | Estimator,
    loss_terms: int | None,
    has_aux: bool,
) -> CoverageCheck:
    """The gradient of a scalar loss beside plain JAX's, and the program's answers."""
    traced = Program(loss, finding, cover=False, has_aux=has_aux).traced(call)
    remarks = ["examples and factors: a scalar loss does not show its examples"]
    key = call.key
    if fisher == "empirical" and any(mark.beside for mark in traced.marks):
        fisher, key = "mc", jax.random.key(0) if key is None else key
        remarks.append(
            'fisher="empirical": a jk.mark_outputs stands in a custom derivative, so the gradient '
            'was computed beside factors of fisher="mc"'
        )
    options: Any = {**finding, "fisher": fisher, "loss_terms": loss_terms, "has_aux": has_aux}
    stats = value_grad_and_factors(loss, uncovered="ignore", **options)
    error = _of_gradient(loss, stats, call._replace(key=key), has_aux=has_aux)
    value, derivative = (traced.examples_meet(q) for q in ("value", "derivative"))
    return CoverageCheck(value, derivative, (), (), 0, error, {}, {}, tuple(remarks))


def _of_gradient(
    objective: Callable[..., Any],
    stats: Callable[..., ValueGradAndFactors],
    call: ModelCall,
    *,
    has_aux: bool = False,
) -> float:
    params, batch, key, state = call
    named = {} if state is None else {"state": state}
    if key is not None and (isinstance(objective, Objective) or takes_key(objective)):
        named["key"] = key
    beside = state is not None or getattr(objective, "has_aux", has_aux)
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
    sizes = [np.abs(np.asarray(x, np.float64)).max() for x in plain.values() if x.size]
    size = max(sizes, default=0.0)
    return _largest(_error(by_path[path], plain[path], size) for path in plain)


def _error(actual: Any, expected: Any, largest: float = 0.0, power: int = 1) -> float:
    """The largest difference, relative to the largest entry; NaN if an entry is NaN.

    A bias in front of a normalization has a gradient of zero, of which rounding is left. So a
    difference that is rounding of ``largest`` is relative to that.

    Args:
        actual: The array to test.
        expected: The array that it should equal.
        largest: The largest entry of all arrays of the comparison.
        power: 2 for squares of gradients, whose rounding is squared as well.
    """
    x, y = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not y.size:
        return 0.0
    difference, size = float(np.abs(x - y).max()), float(np.abs(y).max())
    rounding = (64 * float(jnp.finfo(jnp.asarray(expected).dtype).eps)) ** power
    if difference <= rounding * largest:
        size = max(size, largest)
    return difference / (size or 1.0)


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


def _leaves_with_path(tree: ArrayTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _is_key(x: Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
