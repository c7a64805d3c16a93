"""The Fisher matrix, the generalized Gauss-Newton matrix and the Hessian of a batch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxkfac._arguments import ArrayTree, check_arrays, check_function, leaves_by_path, with_leaves
from jaxkfac._errors import at_least_one
from jaxkfac._mapped_axes import AxisName, axes_apart, axis_names, check_mapped
from jaxkfac.curvature.operators._exact import (
    ExactOperator,
    checked_batch,
    chosen_paths,
    chosen_shapes,
    marked_gauss_newton,
)
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import (
    Chunk,
    Leaves,
    estimated_products,
    expected_products,
    gauss_newton,
    hessian_product,
    outer_products,
)
from jaxkfac.factors import (
    FISHER_TYPES,
    LABEL_FOLD,
    Estimator,
    ModelCall,
    Objective,
    estimator_of,
    returned,
)
from jaxkfac.interception import fast_convolutions
from jaxkfac.linalg import map_over_chunks, statistics_dtype

# ---------------- the Fisher matrix


FisherType = Literal["exact", "empirical", "mc"]

# Products with a vector on one chunk that are cheaper than ``estimated_products``.
_PRODUCTS: Mapping[type[Estimator], Callable[[Chunk, Leaves], Leaves]] = {
    FISHER_TYPES["exact"]: expected_products,
    FISHER_TYPES["empirical"]: outer_products,
    FISHER_TYPES["mc"]: outer_products,
}


def fisher(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: ArrayTree,
    *,
    fisher: FisherType | Estimator = "exact",
    key: Key[Array, ""] | None = None,
    labels: ArrayTree | None = None,
    samples: int = 1,
    chunk: int | None = None,
    only: str | None = None,
    state: ArrayTree | None = None,
    axis_name: AxisName = None,
) -> Operator:
    r"""The Fisher information of the mean loss, as an operator.

    Over $N$ examples with $R$ loss terms each (with a mask, the number of kept terms replaces
    $NR$), with $g_n$ the gradient of the *sum* of one example's negative log-likelihoods,

    $$ F = \frac{1}{NR} \sum_n \operatorname{E} \bigl[ g_n g_n^\top \bigr], $$

    which is the scale of the Kronecker factors. Labels are independent from term to term, so the
    expectation is $J^\top H J$ with $H$ the Fisher of the outputs. ``jk.Categorical()``,
    ``jk.Bernoulli()`` and ``jk.Gaussian()`` take natural parameters, for which this is
    :func:`ggn`. Other likelihoods use their ``fisher_column``, one column at a time.

    Args:
        objective: A ``jk.Objective``; or, for ``"exact"``, a scalar loss that marks its outputs
            (``jk.mark_outputs``).
        params: Parameters; integer leaves and keys are not differentiated.
        batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``.
        fisher: ``"exact"``: the expectation over the model's own labels. ``"empirical"``: the
            given targets in place of the expectation. ``"mc"``: labels sampled from the model,
            once, when the operator is built; unbiased, of rank at most ``samples * N``. Or an
            ``Estimator`` of your own, which runs on each example by itself.
        key: For dropout, and for the labels of ``"mc"``. An example's labels depend on the
            key and its place in the batch, not on the chunk. They differ from those that
            ``value_grad_and_factors`` samples with the same key; to compare, pass ``labels=`` to
            both.
        labels: ``(samples, *targets)`` for ``"mc"``, in place of sampled ones; with several
            likelihoods, a tree of them in the likelihoods' form.
        samples: How many labels ``"mc"`` samples for each term.
        chunk: Number of examples at once, as for :func:`ggn`.
        only: Full-match pattern over parameter paths, as for :func:`ggn`.
        state: What a call changes, as for :func:`ggn`.
        axis_name: Mapped axes, as for :func:`ggn`. Each device samples the labels of its own rows.

    Returns:
        A positive semi-definite :class:`Operator`. Two forward passes and one backward pass
        for each product; per-example gradients are never formed.

    Raises:
        TypeError: ``objective`` is no ``jk.Objective`` and marks no outputs.
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: an unknown type, ``"mc"`` without a key or labels, or a batch that does
            not fit.

    Memory:
        As for :func:`ggn`; ``"mc"`` holds its labels.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((4, 2))}, (jnp.eye(4), jnp.zeros((4, 2)))
        >>> empirical = jk.operators.fisher(objective, params, batch, fisher="empirical")
        >>> print((empirical @ {"w": 4 * jnp.ones((4, 2))})["w"][0])
        [2. 2.]

    References:
        James Martens, "New Insights and Perspectives on the Natural Gradient Method", 2020.
        Frederik Kunstner, Lukas Balles and Philipp Hennig, "Limitations of the Empirical
        Fisher Approximation", 2019.
    """
    at_least_one(samples=samples)
    axes = axis_names(axis_name) or ()
    check_mapped("jk.operators.fisher", axes)
    estimator = estimator_of(fisher, samples=samples, chunk=1, of_examples=True)
    # By the type itself: a subclass may propagate other cotangents.
    rule = _PRODUCTS.get(type(estimator), estimated_products)
    if not isinstance(objective, Objective):
        if rule is not expected_products:
            raise ValueError(
                f'fisher="{estimator.name}" needs gradients of examples, which a scalar loss does '
                'not show: give a jk.Objective, or take fisher="exact"'
            )
        return marked_gauss_newton(
            "fisher", objective, ModelCall(params, batch, key, state), chunk, only, axes
        )
    batch = objective.batch(batch)
    estimator = estimator.bound(key, labels, batch)
    checked = checked_batch(objective, ModelCall(params, batch, key, state), chunk, labels)
    paths = chosen_paths(only, params)
    arguments = params, checked, None, key, state, objective, rule, chunk, paths
    operator, apart = ExactOperator(*arguments, axes), axes_apart(axes, batch)
    if rule is estimated_products:
        by_example = estimator.by_example(batch.num_examples, apart)
    elif not estimator.samples_labels:
        return operator
    elif labels is None:
        by_example = _sample(operator, estimator.samples, apart)
    else:
        by_example = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), labels)
    return dataclasses.replace(operator, labels=by_example)


def _sample(operator: ExactOperator, samples: int, axes: tuple[str, ...]) -> ArrayTree:
    """Labels ``(N, samples, *targets)`` from the model's outputs, other ones on each device."""
    base = jax.random.fold_in(operator.key, LABEL_FOLD)
    for axis in axes:
        base = jax.random.fold_in(base, jax.lax.axis_index(axis))
    number = operator.batch.num_examples
    keys = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(base, n), samples))

    def sample(key: Key[Array, ""], outputs: ArrayTree) -> ArrayTree:
        """Labels of one example; its outputs have no example axis."""
        batch_of_one = jax.tree.map(lambda y: y[None], outputs)
        return jax.tree.map(lambda y: y[0], operator.objective.sample(key, batch_of_one))

    def labels(chunk: Chunk) -> ArrayTree:
        outputs = jax.lax.stop_gradient(chunk.outputs(chunk.leaves))
        # `examples` below has keys in the place of labels.
        return jax.vmap(lambda ks, y: jax.vmap(lambda k: sample(k, y))(ks))(chunk.labels, outputs)

    examples = (operator.batch, keys(jnp.arange(number)))
    per_chunk = operator.over_chunks(labels)
    return map_over_chunks(per_chunk, examples, operator.chunk, in_loop=fast_convolutions)


# ---------------- the generalized Gauss-Newton matrix


def ggn(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: ArrayTree,
    *,
    key: Key[Array, ""] | None = None,
    chunk: int | None = None,
    only: str | None = None,
    state: ArrayTree | None = None,
    axis_name: AxisName = None,
) -> Operator:
    r"""The generalized Gauss-Newton matrix of the mean loss, as an operator.

    With $J$ the Jacobian of the outputs and $H$ the Hessian of the mean loss in the outputs,

    $$ \mathrm{GGN} = J^\top H J , $$

    It is positive semi-definite if the loss is convex in the outputs, as those of
    ``jk.Categorical()``, ``jk.Bernoulli()`` and ``jk.Gaussian()`` are; for these it is the
    exact :func:`fisher`.

    Args:
        objective: A ``jk.Objective``, with or without ``has_aux``; or a scalar loss that marks
            its outputs (``jk.mark_outputs``); the marks then define the matrix.
        params: Parameters; integer leaves and keys are not differentiated.
        batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``; masked terms are in no
            sum and no count.
        key: For dropout, with the same masks at every product. With ``chunk`` each chunk draws its
            own masks, so the chunk size then changes the result.
        chunk: Number of examples at once; ``None`` for all. It changes the result only by rounding.
        only: Full-match pattern over parameter paths: the operator acts on those leaves
            (adapters), its vectors are ``{path: leaf}`` of them alone, and nothing else is
            differentiated.
        state: What a call changes (batch statistics), for an ``apply_fn`` with a ``state=``
            argument; the changes are dropped.
        axis_name: The mapped axes whose devices hold the rest of the batch, as for
            :func:`jaxkfac.value_grad_and_factors`. Products are then those of the batch of all
            devices.

    Returns:
        An :class:`Operator`. Two forward passes and one backward pass for each product.

    Raises:
        TypeError: ``objective`` is no ``jk.Objective`` and marks no outputs.
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: a batch that does not fit, or cannot be split into chunks; or an ``axis_name``
            that no map around the call has.

    Memory:
        Activations of one chunk for the backward pass, and two trees like the vectors.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (3 * jnp.eye(3), jnp.zeros((3, 2)))
        >>> product = jk.operators.ggn(objective, params, batch) @ params
        >>> print(product["w"][0])
        [3. 3.]

    References:
        Nicol Schraudolph, "Fast Curvature Matrix-Vector Products for Second-Order Gradient
        Descent", 2002.
    """
    call, axes = ModelCall(params, batch, key, state), axis_names(axis_name) or ()
    check_mapped("jk.operators.ggn", axes)
    if not isinstance(objective, Objective):
        return marked_gauss_newton("ggn", objective, call, chunk, only, axes)
    checked = checked_batch(objective, call, chunk)
    arguments = params, checked, None, key, state, objective, gauss_newton, chunk
    return ExactOperator(*arguments, chosen_paths(only, params), axes)


# ---------------- the Hessian


def hessian(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: ArrayTree,
    *,
    key: Key[Array, ""] | None = None,
    chunk: int | None = None,
    only: str | None = None,
    has_aux: bool = False,
    state: ArrayTree | None = None,
) -> Operator:
    r"""The Hessian $\nabla^2 L$ of the mean loss, as an operator; it may be indefinite.

    Args:
        objective: A ``jk.Objective``, or any scalar loss ``fn(params, batch)``, with or without a
            ``key=`` argument.
        params: Parameters; integer leaves and keys are not differentiated.
        batch: As for :func:`ggn`; for a scalar loss, whatever the function takes.
        key: For dropout, as for :func:`ggn`.
        chunk: Number of examples at once, as for :func:`ggn`; not for a scalar loss, whose terms
            cannot be counted.
        only: Full-match pattern over parameter paths, as for :func:`ggn`.
        has_aux: Whether a scalar loss returns ``(value, aux)``; an ``Objective`` has its own
            ``has_aux``.
        state: What a call changes, as for :func:`ggn`; for a scalar loss, its ``state=``.

    Returns:
        An :class:`Operator`. Each product differentiates one gradient forward.

    Raises:
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: a batch that does not fit, or ``chunk`` with a scalar loss.

    Memory:
        About twice that of one chunk's gradient.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> cubes = lambda params, batch: (params["w"] ** 3).sum() * batch
        >>> hessian = jk.operators.hessian(cubes, {"w": jnp.arange(3.0)}, 2.0)
        >>> print((hessian @ {"w": jnp.ones(3)})["w"])
        [ 0. 12. 24.]

    References:
        Barak Pearlmutter, "Fast Exact Multiplication by the Hessian", 1994.
    """
    paths = chosen_paths(only, params)
    if isinstance(objective, Objective):
        checked = checked_batch(objective, ModelCall(params, batch, key, state), chunk)
        return ExactOperator(
            params, checked, None, key, state, objective, hessian_product, chunk, paths
        )
    check_function("objective", objective, "loss(params, batch), or a jk.Objective")
    check_arrays("params", params)
    if chunk is not None:
        raise ValueError(
            "chunk: a scalar loss does not show how many terms a chunk holds; give a "
            "jk.Objective, or pass chunk=None"
        )
    return ScalarHessian(params, batch, key, state, objective, has_aux, paths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScalarHessian(Operator):
    """The Hessian of a scalar loss ``fn(params, batch)``; attributes as in ``hessian``."""

    params: Any
    batch: Any
    key: Any
    state: Any
    function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    has_aux: bool = dataclasses.field(metadata={"static": True})
    only: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> ArrayTree:
        return chosen_shapes(self.params, self.only)

    def product(self, leaves: Leaves) -> Leaves:
        return _product(self, leaves)


@jax.jit
def _product(operator: ScalarHessian, leaves: Leaves) -> Leaves:
    by_path = leaves_by_path(operator.params)
    chosen = {path: by_path[path] for path in operator.leaves}
    vector = {path: leaves[path].astype(x.dtype) for path, x in chosen.items()}

    def loss(chosen: Leaves) -> Array:
        params = with_leaves(operator.params, chosen)
        args = (params, operator.batch)
        return returned(
            "the loss", operator.function, args, operator.key, operator.state, operator.has_aux
        )[0]

    out = jax.jvp(jax.grad(loss), (chosen,), (vector,))[1]
    return {path: x.astype(statistics_dtype(x.dtype)) for path, x in out.items()}
