"""The distribution of outputs under a posterior, and the predictive distribution of targets."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxkfac._arguments import ArrayTree, partition, with_leaves
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac.curvature.per_example import ExampleGradients, block_dtype
from jaxkfac.factors import Batch, Bernoulli, Categorical, Gaussian, Head, ModelCall, kept_targets
from jaxkfac.interception import Layer, LayerVjp, Traced, fast_convolutions
from jaxkfac.interception.values import Slot
from jaxkfac.kinds import Basis, RowSums
from jaxkfac.linalg import map_over_chunks
from jaxkfac.memory import MemoryBudgetError, bytes_text
from jaxkfac.uses._examples import Examples
from jaxkfac.uses._posterior_precision import PosteriorPrecision
from jaxkfac.uses._rotated_gradients import ScaledBasis, whole_gradients

# ---------------- whitened gradients of outputs
#
# With $P$ the posterior precision, each layer gives vectors $v_c$, linear in the gradient $J_c$ of
# output $c$, such that $\langle v_c, v_d \rangle = J_c^\top P^{-1} J_d$. Their products are the
# covariance of the outputs.


GRADIENTS = 3  # alive at once for each output: the gradient, its copy by layer, the whitened one


class OutputGradients(ExampleGradients):
    """The taps of one traced program.

    If an example passes a layer once, with one row, the layer emits output rows, and no gradient is
    formed. All other layers emit gradients of examples.

    Args:
        traced: The program.
        precision: The posterior precision.
        all_gradients: Whether all layers emit gradients.
    """

    def __init__(
        self, traced: Traced, precision: PosteriorPrecision, *, all_gradients: bool = False
    ) -> None:
        self._bases = bases = precision.bases
        dtype = functools.partial(block_dtype, bases)
        super().__init__(traced, bases.layers, dtype, traced.examples, traced.num_examples)
        self._precision = precision
        alone = set() if all_gradients else whole_gradients(traced, bases)
        self._by_rows = {name for name in alone if self._has_one_row(self._layers[name])}

    def _has_one_row(self, layer: Layer) -> bool:
        (use,), table = self._traced.uses_of(layer), self._traced.analysis.table
        atoms = [a for axis in use.axes.rows for a in table.atoms(axis)]
        has_examples = set(table.atoms(self._rows)) <= set(atoms)
        rows = math.prod(table.size(a) for a in atoms)
        return has_examples and rows == self._number

    @property
    def size(self) -> int:
        """How many numbers are alive for one output of one example."""
        return sum(
            math.prod(layer.stack) * layer.out_features
            if name in self._by_rows
            else GRADIENTS * layer.num_parameters
            for name, layer in self._layers.items()
        )

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._by_rows:
            return super()._slot(layer)
        a, g = self._bases.spectra(layer)
        scale, bias_scale = self._precision.inverse_eigenvalues(layer.name)
        basis = Basis(a.vectors, g.vectors, self._bases.wants_ones(layer))
        shape = *layer.stack, self._number, layer.out_features
        sums = RowSums(jnp.zeros(shape, self._dtype(layer)))
        return Slot(sums, ScaledBasis(basis, scale, bias_scale))

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        """The statistics from both sides of a use."""
        if not isinstance(like, RowSums):
            return super().products(vjp, like, sides)
        return sides.scaled_outputs(*vjp.constants)

    def whitened(self, emitted: Mapping[str, Any]) -> dict[str, Float[Array, "outputs examples n"]]:
        """``{layer: vectors}`` from the emissions of several cotangents, stacked along axis 0."""
        number = len(jax.tree.leaves(emitted)[0])
        shape = number, self._number, -1
        by_layer = {}
        for name in self._by_rows:
            rows = jnp.moveaxis(emitted[name].rows, -2, 1)
            by_layer[name] = rows.reshape(shape)
        gradients = {name: slot for name, slot in emitted.items() if name not in self._by_rows}
        if not gradients:
            return by_layer
        leaves = jax.vmap(self.gradients)(gradients)
        many = {path: x.reshape(-1, *x.shape[2:]) for path, x in leaves.items()}
        some = tuple(layer for name, layer in self._layers.items() if name in gradients)
        for layer, solutions in self._precision.solved_by_layer(many, some, -0.5):
            moved = [jnp.moveaxis(x, len(layer.stack), 0) for x in solutions]
            flat = jnp.concatenate([x.reshape(len(x), -1) for x in moved], -1)
            by_layer[layer.name] = flat.reshape(shape)
        return by_layer


# ---------------- the covariance of the outputs


@dataclasses.dataclass(frozen=True)
class LinearisedVariance:
    r"""$J_n P^{-1} J_n^\top$ of the outputs of each example's loss terms.

    If the gradients of all outputs of an example fit into the budget, they are whitened layer by
    layer and multiplied with each other, for as many examples at a time as fit. Otherwise examples
    are handled one by one, and outputs some at a time: their gradients are solved, and the model is
    differentiated forward along the solutions.

    Attributes:
        examples: The objective and its layers.
        precision: The posterior precision.
        params: The parameters.
        state: What a call of the model takes besides its inputs.
        max_bytes: The budget.
        by_layer: Whether to return the layers' parts separately.
    """

    examples: Examples
    precision: PosteriorPrecision
    params: ArrayTree
    state: ArrayTree
    max_bytes: int
    by_layer: bool = False

    def __call__(
        self, batch: Batch
    ) -> tuple[Float[Array, "N terms C"], Float[Array, "N *layers terms C C"]]:
        """The outputs and their covariance.

        Raises:
            MemoryBudgetError: the gradient of one output does not fit.
            ValueError: the batch has to be split, and an array does not have the examples first.
        """
        traced = self.examples.traced(self._call(batch))
        number, _, columns = split_terms(traced.out_shapes[0].shape)
        item = self.precision.prior.dtype.itemsize
        one = OutputGradients(traced, self.precision).size * item
        full_size = OutputGradients(traced, self.precision, all_gradients=True).size * item
        at_once = self.max_bytes // (one * columns)
        if at_once:
            some = min(at_once, number)
            self._check_cut(batch, number, some)
            return _over_chunks(self._of_examples, batch, some)
        needed = one * columns if self.by_layer else full_size
        if needed > self.max_bytes:
            what = "all outputs" if self.by_layer else "one output"
            raise MemoryBudgetError(
                f"max_bytes={self.max_bytes}: gradients of {what} of one example take "
                f"{bytes_text(needed)}; allow that much, or choose fewer layers="
            )
        self._check_cut(batch, number, 1)
        some = self.max_bytes // full_size
        return _over_chunks(lambda chunk: self._of_one(chunk, some), batch, 1)

    def _call(self, batch: Batch) -> ModelCall:
        return ModelCall(self.params, batch, state=self.state)

    def _check_cut(self, batch: Batch, number: int, some: int) -> None:
        if some < number and any(x.shape[:1] != (number,) for x in jax.tree.leaves(batch)):
            raise ValueError(
                f"inputs: gradients of the outputs of {number} examples do not fit into "
                f"max_bytes={self.max_bytes}, and an array does not have the examples first: give "
                "fewer at once"
            )

    def _of_examples(self, batch: Batch) -> tuple[Array, Array]:
        traced = self.examples.traced(self._call(batch))
        taps = OutputGradients(traced, self.precision)
        outputs, vjp = self._outputs_and_vjp(traced, taps, batch)
        number, terms, columns = split_terms(outputs.shape)

        def of_term(term: Array) -> Array:
            cotangents = _cotangents(outputs, term, jnp.arange(columns))
            whitened = taps.whitened(jax.vmap(vjp)(cotangents))
            names = [block.layer.name for block in self.precision.blocks]
            by_layer = [_products(whitened[name], self.precision.prior.dtype) for name in names]
            return jnp.stack(by_layer, 1) if self.by_layer else sum(by_layer[1:], by_layer[0])

        covariance = jax.lax.map(fast_convolutions(of_term), jnp.arange(terms))
        return outputs.reshape(number, terms, columns), jnp.moveaxis(covariance, 0, -3)

    def _of_one(self, batch: Batch, some: int) -> tuple[Array, Array]:
        """Like :meth:`_of_examples` for one example, some outputs at a time, forward."""
        traced = self.examples.traced(self._call(batch))
        taps = OutputGradients(traced, self.precision, all_gradients=True)
        outputs, vjp = self._outputs_and_vjp(traced, taps, batch)
        _, terms, columns = split_terms(outputs.shape)
        leaves = partition(self.params)[0]

        def model(leaves: dict[str, Array]) -> Array:
            params = with_leaves(self.params, leaves)
            model_outputs, _ = self.examples.objective.outputs(
                params, batch.inputs, None, self.state
            )
            return jax.tree.leaves(model_outputs)[0].reshape(terms, columns)

        _, forward = jax.linearize(model, leaves)
        zeros = {path: jnp.zeros_like(x) for path, x in leaves.items()}

        def of_columns(term: Array, chosen: Array) -> Array:
            cotangents = _cotangents(outputs, term, chosen)
            gradients = jax.vmap(taps.gradients)(jax.vmap(vjp)(cotangents))
            gradients = {path: x[:, 0] for path, x in gradients.items()}
            solved = self.precision.solved(gradients, -1.0)
            typed = {path: x.astype(leaves[path].dtype) for path, x in solved.items()}
            moved = jax.vmap(lambda one: forward(zeros | one)[term])(typed)
            return moved.astype(self.precision.prior.dtype)

        def of_term(term: Array) -> Array:
            every = jnp.arange(columns)
            return _over_chunks(lambda chosen: of_columns(term, chosen), every, some)

        covariance = jax.lax.map(fast_convolutions(of_term), jnp.arange(terms))
        return outputs.reshape(1, terms, columns), covariance[None]

    def _outputs_and_vjp(self, traced: Traced, taps: OutputGradients, batch: Batch) -> Any:
        outputs, vjp = self.examples.outputs_and_vjp(traced, taps, self._call(batch))
        (single,), form = jax.tree.flatten(outputs)
        return single, lambda cotangent: vjp(jax.tree.unflatten(form, [cotangent]))


def split_terms(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Numbers of examples, of loss terms for each, and of outputs of each term."""
    if len(shape) == 1:
        return shape[0], 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _cotangents(outputs: Array, term: Array, columns: Array) -> Array:
    """Unit cotangents for some outputs of one term of every example, ``(columns, *outputs)``."""
    number, terms, every = split_terms(outputs.shape)
    is_output = (jnp.arange(terms) == term)[:, None] & (columns[:, None, None] == jnp.arange(every))
    one = jnp.broadcast_to(is_output[:, None], (len(columns), number, terms, every))
    one = one.astype(outputs.dtype).reshape(-1, *outputs.shape)
    return cast_varying(one, outputs)  # inside shard_map the outputs differ between devices


def _products(whitened: Float[Array, "C N n"], dtype: DTypeLike) -> Float[Array, "N C C"]:
    covariance = jnp.einsum("cnk,dnk->ncd", whitened, whitened, precision=jax.lax.Precision.HIGHEST)
    return covariance.astype(dtype)


def _over_chunks(fn: Callable[[Any], Any], examples: ArrayTree, chunk: int) -> ArrayTree:
    """Apply a function to each chunk of examples, and join the results."""
    per_chunk = lambda chunk, _: fn(chunk)
    return map_over_chunks(per_chunk, examples, chunk, in_loop=fast_convolutions)


# ---------------- predictive distributions


class GaussianPrediction(NamedTuple):
    """A Gaussian over the targets of each loss term.

    Attributes:
        mean: The model's outputs.
        covariance: ``(N, ..., C, C)``, of the outputs plus the noise.
    """

    mean: Float[Array, "*outputs"]
    covariance: Float[Array, "*terms C C"]


class OutputDistribution(NamedTuple):
    """A Gaussian over the outputs of each loss term.

    Attributes:
        mean: The model's outputs.
        covariance: Covariance of the outputs, without noise.
    """

    mean: Float[Array, "*terms C"]
    covariance: Float[Array, "*terms C C"]

    @property
    def variances(self) -> Float[Array, "*terms C"]:
        """The diagonal of the covariance."""
        return jnp.diagonal(self.covariance, axis1=-2, axis2=-1)

    @property
    def moderated(self) -> Float[Array, "*terms C"]:
        r"""The logits $f / \sqrt{1 + \tfrac\pi8 v}$ that the probit approximation gives."""
        return self.mean / jnp.sqrt(1 + math.pi / 8 * self.variances)

    def samples(self, key: Key[Array, ""], number: int) -> Float[Array, "number *terms C"]:
        """Draw outputs; the covariance may be singular."""
        values, vectors = jnp.linalg.eigh(self.covariance)
        root = vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
        noise = jax.random.normal(key, (number, *self.mean.shape), self.mean.dtype)
        exact = jax.lax.Precision.HIGHEST
        return self.mean + jnp.einsum("...ij,k...j->k...i", root, noise, precision=exact)


def bridge(outputs: OutputDistribution) -> Float[Array, "*terms C"]:
    r"""Class probabilities of the Dirichlet to which the Laplace bridge maps the Gaussian.

    First the Gaussian is conditioned on $\sum_c f_c = 0$, as in laplace-torch; a shift of all
    logits changes no probability.
    """
    mean, covariance = outputs
    rows, total = covariance.sum(-1), covariance.sum((-2, -1))[..., None]
    divisor = jnp.where(total > 0, total, jnp.ones_like(total))  # the total of no variance is 0
    mean = mean - rows * mean.sum(-1, keepdims=True) / divisor
    finfo = jnp.finfo(mean.dtype)
    least = finfo.eps * outputs.variances + finfo.tiny  # the rounding error of the difference
    variances = jnp.maximum(outputs.variances - rows * rows / divisor, least)
    classes = mean.shape[-1]
    # In logs, because confident logits overflow: alpha_c v_c = 1 - 2/C + e^f_c sum_d e^-f_d / C^2.
    inverse = jax.nn.logsumexp(-mean, axis=-1, keepdims=True) + mean - 2 * math.log(classes)
    constant = math.log(1 - 2 / classes) if classes > 2 else -math.inf
    return jax.nn.softmax(jnp.logaddexp(constant, inverse) - jnp.log(variances))


Rule = Callable[[OutputDistribution, Any, int], Float[Array, "*terms C"]]

PREDICTIVES: Mapping[type, Mapping[str, Rule]] = {
    Categorical: {
        "probit": lambda outputs, key, number: jax.nn.softmax(outputs.moderated),
        "bridge": lambda outputs, key, number: bridge(outputs),
        "mc": lambda outputs, key, number: jax.nn.softmax(outputs.samples(key, number)).mean(0),
    },
    Bernoulli: {
        "probit": lambda outputs, key, number: jax.nn.sigmoid(outputs.moderated),
        "mc": lambda outputs, key, number: jax.nn.sigmoid(outputs.samples(key, number)).mean(0),
    },
}


def rule_of(likelihood: object, method: str) -> Rule:
    """The function from an output distribution to class probabilities.

    Raises:
        ValueError: naming the methods that the likelihood has.
    """
    rules = PREDICTIVES.get(type(likelihood), {})
    if method not in rules:
        names = ", ".join(map(repr, rules))
        name = type(likelihood).__name__
        raise ValueError(
            f"method={method!r}: {name} has "
            + (f"{names}" if rules else "no predictive; take variance(inputs) and the model's own")
        )
    return rules[method]


def negative_log_predictive(
    head: Head, outputs: OutputDistribution, noise: Float[Array, ""]
) -> Float[Array, ""]:
    """Summed over terms with their weights: by the probit rule, or exactly for a Gaussian.

    Args:
        head: Outputs in their own shape, targets and mask.
        outputs: Their distribution, ``(N, terms, C)``.
        noise: Standard deviation of a Gaussian's noise.
    """
    if not isinstance(head.likelihood, Gaussian):
        return (
            head._replace(outputs=outputs.moderated.reshape(head.outputs.shape)).kept_terms().sum()
        )
    targets = kept_targets(head.targets, head.kept).reshape(outputs.mean.shape)
    residual = targets.astype(outputs.mean.dtype) - outputs.mean
    covariance = with_noise(outputs.covariance, noise)
    values, vectors = jnp.linalg.eigh(covariance)
    exact = jax.lax.Precision.HIGHEST
    rotated = jnp.einsum("...ij,...i->...j", vectors, residual, precision=exact)
    losses = (jnp.square(rotated) / values + jnp.log(2 * math.pi * values)).sum(-1) / 2
    return head.weighted(losses.reshape(head.terms_shape), 1.0).sum()


def with_noise(
    covariance: Float[Array, "*terms C C"], noise: Float[Array, ""]
) -> Float[Array, "*terms C C"]:
    """The covariance of targets: that of the outputs plus the noise."""
    variance = jnp.square(noise).astype(covariance.dtype)
    return covariance + variance * jnp.eye(covariance.shape[-1], dtype=covariance.dtype)
