"""Negative log-likelihoods of loss terms, their Fisher matrices, and labels sampled from them."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, SupportsIndex, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, Num

Outputs = Array | jax.ShapeDtypeStruct  # a check reads only their shape and dtype
Targets = Array | np.ndarray  # NumPy's too, outside of ``jit``


@runtime_checkable
class Likelihood(Protocol):
    """What an ``Objective`` needs from a likelihood; the last axis of outputs belongs to one term.

    Four more members are optional. A class attribute ``one_output`` is true if outputs may lack
    that last axis, with one number for each term. ``kept(targets)`` is the mask of terms, or their
    weights, by the targets alone (``Categorical(ignore_index=, class_weights=)``).
    ``fisher_product(outputs, vector)`` multiplies each term's Fisher by a vector shaped like the
    outputs, where that is cheaper than all columns.
    ``are_probabilities(outputs)`` says whether outputs could be probabilities where the likelihood
    expects logits, as a traced bool if the outputs are traced; the attribute ``link`` names what
    makes them so.
    """

    def check(self, outputs: Outputs, targets: Targets, mask: Targets | None = None) -> None:
        """Raise ``ValueError`` if targets do not fit the outputs.

        Shapes and dtypes are checked at trace time. Values are checked where they are concrete,
        for the terms that the mask keeps.
        """
        ...

    def terms(self, outputs: Float[Array, "*terms c"], targets: Targets) -> Float[Array, "*terms"]:
        """Negative log-likelihood of each term, at least float32."""
        ...

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        """Targets drawn from the model, independently for each term."""
        ...

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        r"""Column ``index`` of $S$, where $S S^\top$ is each term's Fisher matrix.

        The Fisher is that of the outputs, ``(c, c)``; $S$ has as many columns as rows.
        """
        ...


def _wide(x: Array) -> Array:
    """At least float32: a bfloat16 logarithm loses the small terms."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _expect(what: str, targets: Targets, shape: tuple[int, ...], kind: type, expected: str) -> None:
    if targets.shape != shape:
        raise ValueError(f"{what}: targets have shape {targets.shape}, expected {shape}")
    if not jnp.issubdtype(targets.dtype, kind):
        raise ValueError(f"{what}: targets have dtype {targets.dtype}, expected {expected}")


def _concrete_targets(targets: Targets, mask: Targets | None) -> np.ndarray | None:
    """The targets that the mask keeps, or ``None`` if either is traced and has no values yet."""
    for x in (targets, mask):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return None
    return np.asarray(targets) if mask is None else np.asarray(targets)[np.asarray(mask)]


def _labels_equal(labels: Any, index: int) -> Any:
    """Which integer labels are equal to an index: none if their dtype cannot hold the index.

    NumPy labels are compared in NumPy, with the values that they had before JAX narrows 64 bits.
    """
    holds = jnp.iinfo(labels.dtype)
    numpy = np if isinstance(labels, np.ndarray) else jnp
    # Converted to the labels' dtype, another index would wrap: -100 is 156 in uint8.
    if not holds.min <= index <= holds.max:
        return numpy.zeros(labels.shape, bool)
    return labels == numpy.asarray(index, labels.dtype)


def _wide_index(labels: Any) -> Any:
    """Labels in at least 32 bits: int8 may not hold the number of classes, which would wrap."""
    return labels if labels.dtype.itemsize >= 4 else labels.astype(jnp.int32)


def _checked_index(index: Any) -> int:
    try:
        if isinstance(index, bool):
            raise TypeError
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"Categorical: ignore_index={index!r}, expected an integer or None"
        ) from None


def _checked_weights(weights: Any) -> tuple[float, ...]:
    if isinstance(weights, Tracer):
        raise TypeError(
            "Categorical: class_weights is traced, and a likelihood is static: give numbers, or "
            "put weights[targets] in the place of the batch's mask"
        )
    x = np.asarray(weights, np.float64)
    if x.ndim != 1 or not (np.isfinite(x) & (x >= 0)).all() or not x.any():
        raise ValueError(
            f"Categorical: class_weights={weights!r}, expected one finite number for each class, "
            "none negative and not all zero"
        )
    return tuple(map(float, x))


def _values(outputs: Any) -> Any:
    """Outputs in NumPy's float64, or in at least float32 where they are traced."""
    return _wide(outputs) if isinstance(outputs, Tracer) else np.asarray(outputs, np.float64)


def _answer(x: Any) -> Any:
    return x if isinstance(x, Tracer) else bool(x)


def _in_unit_interval(x: Any) -> Any:
    return ((x >= 0) & (x <= 1)).all()  # false for NaN


def _poisoned(
    terms: Float[Array, "*terms"], valid: Bool[Targets, "*terms"]
) -> Float[Array, "*terms"]:
    """NaN where a target is invalid. It is a product, so that the gradient is NaN there too."""
    one = jnp.ones((), terms.dtype)
    return terms * jnp.where(valid, one, jnp.full((), jnp.nan, terms.dtype))


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross entropy with logits: outputs ``(..., classes)``, targets ``(...)`` of integers.

    Classes out of range raise if their values are concrete. Inside ``jit`` they make value,
    gradient and factors NaN. Targets of masked terms may be anything.

    Args:
        ignore_index: Terms with this target are masked: they are in no sum and no count, as if
            the batch's mask left them out. ``-100`` in PyTorch's convention. An index that the
            targets' dtype cannot hold (-100 in uint8) is the target of no term.
        class_weights: A weight for each class, ``(classes,)``, not negative. A term has the weight
            of its target in the batch, as if it stood in the batch's mask, times the weight there.
            Labels sampled for a Fisher do not change it. The mean is that of PyTorch's ``weight=``.
    """

    ignore_index: SupportsIndex | None = None
    class_weights: Sequence[float | int] | Array | np.ndarray | None = dataclasses.field(
        default=None, repr=False
    )
    link: ClassVar[str] = "softmax"

    def __post_init__(self) -> None:
        # Set as Python numbers, which have a hash: a likelihood is static under ``jit``.
        if self.ignore_index is not None:
            object.__setattr__(self, "ignore_index", _checked_index(self.ignore_index))
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", _checked_weights(self.class_weights))

    def kept(self, targets: Any) -> Any:
        """The mask or the weights of terms by their targets; ``None`` if all terms count alike.

        Args:
            targets: Classes of any integer dtype, or their shape, which gives a shape.

        Returns:
            Bool, False for ``ignore_index``; with ``class_weights``, their numbers, 0 for
            ``ignore_index``.
        """
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            return None  # ``check`` refuses such targets
        if isinstance(targets, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.kept, targets)
        is_kept = None
        if self.ignore_index is not None:
            is_kept = ~_labels_equal(targets, operator.index(self.ignore_index))
        if self.class_weights is None:
            return is_kept
        weights, last = jnp.asarray(self.class_weights), len(self.class_weights) - 1
        index = _wide_index(targets)
        # A class out of range has weight 1, so that it is refused, or its loss is NaN.
        valid, one = (index >= 0) & (index <= last), jnp.ones((), weights.dtype)
        of_terms = jnp.where(valid, weights[index.clip(0, last)], one)
        return of_terms if is_kept is None else jnp.where(is_kept, of_terms, jnp.zeros_like(one))

    def check(self, outputs: Outputs, targets: Targets, mask: Targets | None = None) -> None:
        _expect("Categorical", targets, outputs.shape[:-1], jnp.integer, "integers (classes)")
        if self.class_weights is not None and len(self.class_weights) != outputs.shape[-1]:
            raise ValueError(
                f"Categorical: class_weights has {len(self.class_weights)} entries, expected one "
                f"for each of the {outputs.shape[-1]} classes of the outputs"
            )
        y = _concrete_targets(targets, mask)
        if y is None or not y.size:
            return
        # Python numbers: NumPy would compare in the targets' dtype, which may not hold the classes.
        low, high, classes = int(y.min()), int(y.max()), outputs.shape[-1]
        if low < 0 or high >= classes:
            raise ValueError(
                f"Categorical: targets run from {low} to {high}, expected classes from 0 to "
                f"{classes - 1}; a term that has no class is left out by the batch's mask"
            )

    def are_probabilities(self, outputs: Float[Array, "*terms c"]) -> bool | Bool[Array, ""]:
        """Whether all outputs are in [0, 1] and those of each term sum to 1 within 1e-5."""
        x = _values(outputs)
        # Probabilities that were rounded to bfloat16 add up to 1 less exactly.
        within = max(1e-5, 2 * float(jnp.finfo(outputs.dtype).eps))
        return _answer(_in_unit_interval(x) & (abs(x.sum(-1) - 1) <= within).all())

    def terms(self, outputs: Float[Array, "*terms c"], targets: Targets) -> Float[Array, "*terms"]:
        logs = jax.nn.log_softmax(_wide(outputs), axis=-1)
        index = _wide_index(targets)
        valid = (index >= 0) & (index < outputs.shape[-1])
        # Clipped, so that the program reads in bounds; the default mode would fill NaN into the
        # value but leave the gradient finite.
        picked = jnp.take_along_axis(logs, index[..., None], axis=-1, mode="clip")
        return _poisoned(-picked[..., 0], valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return jax.random.categorical(key, _wide(outputs), axis=-1)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        # The columns sqrt(p_c) (e_c - p) are as many as the classes, and the sum of their outer
        # products is diag(p) - p p'.
        p = jax.nn.softmax(_wide(outputs), axis=-1)
        one = jax.nn.one_hot(index, p.shape[-1], dtype=p.dtype)
        root = jnp.sqrt(jax.lax.dynamic_index_in_dim(p, index, -1))
        return (root * (one - p)).astype(outputs.dtype)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        p, wide = jax.nn.softmax(_wide(outputs), axis=-1), _wide(vector)
        return (p * (wide - (p * wide).sum(-1, keepdims=True))).astype(vector.dtype)


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Binary cross entropy with logits, summed over the last axis; targets in ``[0, 1]``.

    Outputs ``(N,)`` are one logit for each example. Targets out of range raise if their values are
    concrete. Inside ``jit`` they make value, gradient and factors NaN. Targets of masked terms may
    be anything.
    """

    one_output: ClassVar[bool] = True
    link: ClassVar[str] = "sigmoid"

    def check(self, outputs: Outputs, targets: Targets, mask: Targets | None = None) -> None:
        _expect("Bernoulli", targets, outputs.shape, jnp.floating, "floating")
        y = _concrete_targets(targets, mask)
        if y is not None and not ((y >= 0) & (y <= 1)).all():
            raise ValueError(
                f"Bernoulli: targets run from {y.min()} to {y.max()}, expected probabilities "
                "from 0 to 1; a term that has no target is left out by the batch's mask"
            )

    def are_probabilities(self, outputs: Float[Array, "*terms c"]) -> bool | Bool[Array, ""]:
        """Whether all outputs are in [0, 1], as some logits are too, and not all equal."""
        x = _values(outputs)
        return _answer(_in_unit_interval(x) & (x != x.ravel()[0]).any())

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Num[Targets, "*terms c"]
    ) -> Float[Array, "*terms"]:
        logits = _wide(outputs)
        targets = jnp.asarray(targets).astype(logits.dtype)
        valid = ((targets >= 0) & (targets <= 1)).all(-1)
        # softplus(z) - y z is the cross entropy for any y in [0, 1], finite where a sigmoid has
        # rounded to 0 or 1.
        return _poisoned((jax.nn.softplus(logits) - targets * logits).sum(-1), valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        logits = _wide(outputs)
        # Floating labels, because targets of this likelihood are probabilities.
        return jax.random.bernoulli(key, jax.nn.sigmoid(logits)).astype(logits.dtype)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        p = jax.nn.sigmoid(_wide(outputs))
        one = jax.nn.one_hot(index, p.shape[-1], dtype=p.dtype)
        return (jnp.sqrt(p * (1 - p)) * one).astype(outputs.dtype)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        p = jax.nn.sigmoid(_wide(outputs))
        return (p * (1 - p) * _wide(vector)).astype(vector.dtype)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    r"""Unit-variance Gaussian: $\tfrac12 \lVert f - y \rVert^2$ over the last axis, no constant.

    Outputs ``(N,)`` are one number for each example.
    """

    one_output: ClassVar[bool] = True

    def check(self, outputs: Outputs, targets: Targets, mask: Targets | None = None) -> None:
        _expect("Gaussian", targets, outputs.shape, jnp.floating, "floating")

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Float[Targets, "*terms c"]
    ) -> Float[Array, "*terms"]:
        wide = _wide(outputs)
        return 0.5 * jnp.square(wide - targets.astype(wide.dtype)).sum(-1)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        wide = _wide(outputs)
        return wide + jax.random.normal(key, wide.shape, wide.dtype)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        one = jax.nn.one_hot(index, outputs.shape[-1], dtype=outputs.dtype)
        return jnp.broadcast_to(one, outputs.shape)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        return vector
