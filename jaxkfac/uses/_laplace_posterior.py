"""A Gaussian over parameters whose precision is curvature: evidence, predictions, samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one, check_key
from jaxkfac._jaxpr_compat import replicated
from jaxkfac._text import array_text
from jaxkfac.blocks import LongSum
from jaxkfac.factors import Batch, Gaussian, ModelCall
from jaxkfac.memory import ByteSize, parse_bytes
from jaxkfac.uses._examples import batches_of
from jaxkfac.uses._laplace_programs import (
    best_on_evidence,
    best_prior_on,
    evidence_of,
    output_distribution,
    sampled,
    summed_terms,
)
from jaxkfac.uses._linearised_variance import (
    GaussianPrediction,
    OutputDistribution,
    rule_of,
    split_terms,
    with_noise,
)
from jaxkfac.uses._posterior_precision import (
    LogLikelihood,
    PosteriorPrecision,
    check_maximum,
    check_noise,
    check_prior,
    statistics_dtype_of,
)

Method = Literal["probit", "bridge", "mc"]

BYTES = 2**28


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LaplacePosterior:
    r"""$\mathcal N(\theta, P^{-1})$ with $P = N R F / \sigma^2 + \operatorname{diag}(\delta)$.

    A pytree, which jitted functions can take and return. :func:`laplace` makes it.

    Attributes:
        params: The mean; parameters in ``fixed`` are not part of the posterior.
        bases: The curvature $F$ of the mean loss.
        prior_precision: $\delta$, a number, or ``(layers,)`` in the order of ``layers``.
        noise: $\sigma$, the standard deviation of a Gaussian likelihood's noise; else 1.
        state: What a call of the model takes besides its inputs.
        examples: The objective and the program, static.
        num_examples: $N$, static.
        terms_per_example: $R$, static; ``None`` for one.
        layers: Names of the layers that own parameters, static.
        fixed: Paths of the parameters that are fixed, completely or partly, static.
    """

    params: Any
    bases: Any
    prior_precision: Any
    noise: Any
    state: Any
    examples: Any = dataclasses.field(metadata={"static": True})
    num_examples: float = dataclasses.field(metadata={"static": True})
    terms_per_example: float | None = dataclasses.field(metadata={"static": True})
    layers: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    fixed: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return (
            f"LaplacePosterior(layers={list(self.layers)}, fixed={list(self.fixed)}, "
            f"prior_precision={self.prior_precision}, noise={self.noise}, "
            f"num_examples={self.num_examples})"
        )

    def __str__(self) -> str:
        sizes = {layer.name: layer.num_parameters for layer in self.bases.layers}
        number = sum(sizes[name] for name in self.layers)
        numbers = (self.prior_precision, self.noise)
        prior, noise = (array_text(x) if jnp.ndim(x) or isinstance(x, Tracer) else f"{float(x):g}"
                        for x in numbers)  # fmt: skip
        fixed = f"; fixed are {', '.join(self.fixed)}" if self.fixed else ""
        return (
            f"posterior of {number:,} parameters in {len(self.layers)} layers from "
            f"{self.num_examples:,g} examples: prior precision {prior}, noise {noise}{fixed}"
        )

    # -- evidence ---------------------------------------------------------------------

    def log_likelihood(self, train: Any) -> LogLikelihood:
        """Everything that the evidence needs from the data, in one pass.

        It depends neither on the prior nor on the noise, and
        ``log_marginal_likelihood`` accepts it in place of the data.

        Args:
            train: ``(inputs, targets)`` or ``(inputs, targets, mask)``, or an iterable of such
                tuples, read once.

        Raises:
            ValueError: an iterable that is empty, a batch that does not fit, or another number of
                loss terms than the posterior's (the number is known outside ``jit`` only).
        """
        total = None
        for some in batches_of(train):
            batch_sum = summed_terms(self, self.checked(some))
            total = (LongSum.zeros(batch_sum) if total is None else total) + batch_sum
        assert total is not None
        total = total.total
        expected = self.num_examples * (self.terms_per_example or 1)
        if not isinstance(total.terms, Tracer) and abs(float(total.terms) / expected - 1) > 1e-6:
            raise ValueError(
                f"train has {float(total.terms):g} loss terms, and num_examples="
                f"{self.num_examples:g} times terms_per_example={self.terms_per_example or 1:g} is "
                f"{expected:g}: the evidence needs the same data as the precision"
            )
        return total

    def log_marginal_likelihood(
        self,
        train: Any,
        *,
        prior_precision: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> Float[Array, ""]:
        r"""The logarithm of the evidence.

        $$\log p(\mathcal D \mid \theta) - \tfrac12 (\log\det P - \log\det P_0
        + \theta^\top P_0 \theta), \qquad P_0 = \operatorname{diag}(\delta).$$

        It is differentiable in the prior precision and in the noise, and can be jitted.

        Args:
            train: The data, as for ``log_likelihood``, or what that returned.
            prior_precision: Replaces the posterior's own.
            noise: Replaces the posterior's own.

        Raises:
            ValueError: as in ``log_likelihood``; a prior precision or noise that is not
                positive; or a noise for a likelihood other than a Gaussian.
        """
        if isinstance(noise, Tracer) and not isinstance(self.likelihood, Gaussian):
            raise ValueError(f"noise={noise}: only a Gaussian likelihood has one")
        data = train if isinstance(train, LogLikelihood) else self.log_likelihood(train)
        posterior = self.replace(
            self.prior_precision if prior_precision is None else prior_precision,
            self.noise if noise is None else noise,
        )
        return evidence_of(posterior, data)

    def tune_prior(
        self,
        train: Any = None,
        *,
        validation: Any = None,
        by_layer: bool = False,
        grid: Sequence[float | int] | None = None,
        max_bytes: ByteSize = BYTES,
    ) -> "LaplacePosterior":
        r"""The posterior with the prior precision that fits best.

        On the evidence, bisection finds the only maximum, from the eigenvalues alone. The data
        is read only for a Gaussian, whose noise is fitted with the prior. For other likelihoods
        the best prior does not depend on the data, and ``train`` is not read.

        On validation data, the number of a grid with the least negative log predictive
        probability is chosen (by the probit rule, or exactly for a Gaussian, whose noise stays).
        With ``by_layer``, the layers are tuned in turn until none changes.

        Args:
            train: The data, as for ``log_likelihood``, or its result. ``None`` keeps the noise.
            validation: Tune on this data instead of the evidence: a batch, or an iterable of
                batches, read once.
            by_layer: Tune a precision for each layer instead of one for all.
            grid: For ``validation``; by default 25 numbers from 1e-4 to 1e4.
            max_bytes: For ``validation``, as in ``variance``.

        Raises:
            ValueError: both train and validation are given; there is no maximum (no curvature, or
                all parameters are zero; inside ``jit`` the prior precision stays instead); or the
                loss on validation data is NaN, or is infinite for every prior precision.

        Warns:
            UserWarning: by layer, some layers have no maximum and keep their prior precision.

        Memory:
            By layer on validation data, the covariances of all examples for every layer and number
            of the grid.
        """
        if validation is not None:
            if train is not None:
                raise ValueError("tune_prior: give train, for the evidence, or validation=")
            budget = parse_bytes(max_bytes, name="max_bytes")
            return best_prior_on(self, validation, by_layer=by_layer, grid=grid, max_bytes=budget)
        if grid is not None:
            raise ValueError("grid= is for validation=; the evidence's maximum is exact")
        data = None
        if train is not None and isinstance(self.likelihood, Gaussian):
            data = train if isinstance(train, LogLikelihood) else self.log_likelihood(train)
        prior, noise, has_maximum = best_on_evidence(self, data, by_layer=by_layer)
        if not isinstance(prior, Tracer):
            check_maximum(has_maximum, noise, self.layers, by_layer=by_layer)
        return self.replace(prior, noise)

    # -- predictions ------------------------------------------------------------------

    def variance(self, inputs: ArrayTree, *, max_bytes: ByteSize = BYTES) -> Float[Array, "..."]:
        r"""The covariance $J_n P^{-1} J_n^\top$ of the outputs of the linearized model.

        The gradients of all examples and outputs are never stored together: examples, and if
        necessary outputs, are handled some at a time.

        Args:
            inputs: What the model takes, examples first.
            max_bytes: Most bytes of gradients of outputs at once, a number or ``"256MiB"``.

        Returns:
            ``(N, C, C)``. For outputs ``(N, ..., C)`` with several loss terms ``(N, ..., C, C)``,
            one matrix for each term; for outputs ``(N,)`` ``(N, 1, 1)``.

        Raises:
            CoupledExamplesError: an example's output depends on other examples.
            MemoryBudgetError: the gradient of one output does not fit into ``max_bytes``.
            ValueError: inputs do not fit, or have to be split and do not have the examples first.
        """
        return self._distribution(inputs, max_bytes)[0].covariance

    @overload
    def predict(
        self,
        inputs: ArrayTree,
        method: Method,
        *,
        key: Key[Array, ""] | None = ...,
        num_samples: int = ...,
        max_bytes: ByteSize = ...,
    ) -> Float[Array, "..."]: ...
    @overload
    def predict(
        self,
        inputs: ArrayTree,
        method: None = ...,
        *,
        key: Key[Array, ""] | None = ...,
        num_samples: int = ...,
        max_bytes: ByteSize = ...,
    ) -> Float[Array, "..."] | GaussianPrediction: ...
    def predict(
        self,
        inputs: ArrayTree,
        method: Method | None = None,
        *,
        key: Key[Array, ""] | None = None,
        num_samples: int = 100,
        max_bytes: ByteSize = BYTES,
    ) -> Float[Array, "..."] | GaussianPrediction:
        r"""The predictive distribution of the targets.

        Args:
            inputs: What the model takes, examples first.
            method: How a Gaussian over logits becomes probabilities: ``"probit"``, the default,
                $\operatorname{softmax}(f / \sqrt{1 + \tfrac\pi8 v})$; ``"bridge"``, the mean of the
                Dirichlet of the Laplace bridge (``Categorical`` only); ``"mc"``, the mean over
                samples. A Gaussian likelihood takes no method: its predictive is exact.
            key: For ``"mc"``.
            num_samples: For ``"mc"``.
            max_bytes: As for ``variance``.

        Returns:
            Probabilities, shaped like the outputs; for a Gaussian likelihood a
            ``GaussianPrediction(mean, covariance)`` whose covariance includes the noise.

        Raises:
            ValueError: an unknown method, one that the likelihood lacks, or ``"mc"``
                without a key; otherwise as for ``variance``.

        References:
            David MacKay, "The Evidence Framework Applied to Classification Networks", 1992.
            Marius Hobbhahn et al., "Fast Predictive Uncertainty for Classification with Bayesian
            Deep Networks", 2022.
        """
        likelihood, rule = self.likelihood, None
        if not isinstance(likelihood, Gaussian):
            rule = rule_of(likelihood, method or "probit")
        elif method is not None:
            raise ValueError(
                f"method={method!r}: leave it out, the predictive of a Gaussian is exact"
            )
        if method == "mc":
            if key is None:
                raise ValueError('method="mc" draws samples: pass key=')
            check_key(key)
            at_least_one(num_samples=num_samples)
        outputs, shape = self._distribution(inputs, max_bytes)
        if rule is not None:
            return rule(outputs, key, num_samples).reshape(shape)
        covariance = with_noise(outputs.covariance, self.noise)
        return GaussianPrediction(outputs.mean.reshape(shape), covariance)

    def sample(self, key: Key[Array, ""], num_samples: int) -> ArrayTree:
        """Parameters drawn from the posterior.

        Args:
            key: A key.
            num_samples: How many.

        Returns:
            A tree like the parameters, in their dtypes. Every leaf has a leading axis of
            ``num_samples``, including fixed parameters.
        """
        check_key(key)
        at_least_one(num_samples=num_samples)
        return sampled(self, key, num_samples)

    # -- precision and checks ---------------------------------------------------------

    @property
    def likelihood(self) -> Any:
        """The objective's likelihood."""
        (likelihood,) = jax.tree.leaves(self.examples.objective.likelihood)
        return likelihood

    @property
    def precision(self) -> PosteriorPrecision:
        """The precision as blocks."""
        number = self.num_examples * (self.terms_per_example or 1)
        scale = number / jnp.square(self.noise)
        prior = jnp.broadcast_to(self.prior_precision, len(self.layers))
        return PosteriorPrecision(self.bases, scale, prior)

    def replace(self, prior_precision: ArrayLike, noise: ArrayLike) -> "LaplacePosterior":
        """The posterior with another prior precision and noise.

        Raises:
            ValueError: a number is not positive, the prior precision has another shape, or a
                noise other than 1 comes to a likelihood that has none.
        """
        check_prior(prior_precision, self.layers)
        check_noise(self.likelihood, noise)
        dtype = statistics_dtype_of(self.bases)
        prior, noise = (jnp.asarray(x, dtype) for x in (prior_precision, noise))
        return dataclasses.replace(self, prior_precision=prior, noise=noise)

    def checked(self, batch: ArrayTree) -> Batch:
        """Check that a batch fits the model and the bases; see ``Examples``.

        Raises:
            ValueError: outputs have several loss terms, and ``terms_per_example`` is not given.
        """
        batch = self.examples.checked(self.params, replicated(batch), self.state)
        traced = self.examples.traced(ModelCall(self.params, batch, state=self.state))
        shape = traced.out_shapes[0].shape
        if self.terms_per_example is None and split_terms(shape)[1] > 1:
            raise ValueError(
                f"outputs of shape {shape} have several loss terms for each example: pass "
                "terms_per_example=, how many of them the mask keeps on average"
            )
        return batch

    def _distribution(
        self, inputs: ArrayTree, max_bytes: ByteSize
    ) -> tuple[OutputDistribution, tuple[int, ...]]:
        """The distribution of the outputs, ``(N, ..., C)``, and their own shape, maybe ``(N,)``."""
        budget = parse_bytes(max_bytes, name="max_bytes")
        objective = self.examples.objective
        shapes = jax.eval_shape(
            lambda params, state: objective.outputs(params, inputs, None, state)[0],
            self.params,
            self.state,
        )
        labels = jax.eval_shape(objective.sample, jax.random.key(0), shapes)
        targets = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), labels)  # values do not count
        batch = self.checked((inputs, targets))
        outputs = output_distribution(self, batch, max_bytes=budget)
        shape = jax.tree.leaves(shapes)[0].shape
        lead = shape[:-1] if len(shape) > 1 else shape
        mean, covariance = (x.reshape(*lead, *x.shape[2:]) for x in outputs)
        return OutputDistribution(mean, covariance), shape
