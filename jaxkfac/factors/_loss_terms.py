r"""Loss terms of one output or of several, and the cotangents that stand for their Fisher.

The loss is $\sum_m \tfrac{w_m}{T_m} \sum_t -v_t \log p_m(y_t \mid x_t)$: each output $m$ has a
weight and the mean over its own terms, with weights $v_t$ and $T_m = \sum_t v_t$. A mask is weights
of 0 and 1, and $T_m$ then the number of kept terms. The Fisher sums
$\tfrac{w_m}{T_m} v_t s s^\top$ over terms, where $s$ is the gradient of one term. Factors are sums
over $T = \sum_m T_m$ terms, formed as $T^2$ times the products of what is propagated back. So a
cotangent here is $s \sqrt{v_t w_m / (T_m T)}$. For one output of weight one, and a mask, that is
$s / T$, the gradient of the mean loss itself; with weights the loss's own cotangent is $v_t s / T$.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac._mapped_axes import axes_apart, num_devices
from jaxkfac.linalg import statistics_dtype

Normalize = Literal["weight", "count"]


def _examples_do_not_meet() -> str:
    return ""


class Counts(NamedTuple):
    """How many terms an output has.

    Attributes:
        kept: Number of terms that the mask keeps, each counted once.
        weight: Sum of their weights.
    """

    kept: Any
    weight: Any


class Head(NamedTuple):
    """One output with its likelihood, targets, mask and weight.

    Attributes:
        likelihood: Its likelihood.
        outputs: ``(*terms, c)``, or ``(n,)`` for one number for each term; or their shape.
        targets: ``None`` if only labels sampled from the model are needed.
        mask: ``(*terms,)`` bool, or floating weights of terms; ``None`` for all.
        weight: Weight of its mean in the loss.
        name: For messages.
        meeting: Says where a term of one example may have a derivative in rows of another; the
            text is empty if none does. The program is analyzed when this is called.
        normalize: What the mean divides by: the sum of the terms' weights, or the number of terms
            whose weight is not 0.
        pooled: Its counts over all devices of mapped axes; ``None`` if the terms at hand are all.
            A mean is then this device's share of it: the sum of its terms over the pooled count.
        scale: A weight that every term has besides that of the mask, and that divides nothing.
    """

    likelihood: Any
    outputs: Any
    targets: Any = None
    mask: Any = None
    weight: Any = 1.0
    name: str = ""
    meeting: Callable[[], str] = _examples_do_not_meet
    normalize: Normalize = "weight"
    pooled: Counts | None = None
    scale: float = 1.0

    @property
    def coupled(self) -> bool:
        """Whether a term of one example has, or may have, a derivative in rows of another."""
        return bool(self.meeting())

    @property
    def terms_shape(self) -> tuple[int, ...]:
        """Shape of the terms: the outputs without their last axis, if they have one."""
        shape = self.outputs.shape
        # A vector of outputs is one number for each example (`Bernoulli` or `Gaussian` with one
        # output), so its only axis is that of the terms.
        return shape if len(shape) < 2 else shape[:-1]

    @property
    def terms_at_once(self) -> tuple[int, ...]:
        """Shape of the terms whose columns cannot share one backward pass."""
        # Independent examples share a pass, because no row receives cotangents of two of them.
        return self.terms_shape if self.coupled else self.terms_shape[1:]

    def with_one_output(self) -> "Head":
        """Outputs and targets with a last axis, added where there is none."""
        if len(self.outputs.shape) != 1:
            return self
        targets = self.targets
        if targets is not None and targets.shape == self.outputs.shape:
            targets = _expanded(targets)
        return self._replace(outputs=_expanded(self.outputs), targets=targets)

    @property
    def has_weights(self) -> bool:
        """Whether the mask holds weights of terms."""
        return self.mask is not None and self.mask.dtype != jnp.bool_

    @property
    def term_weights(self) -> Float[Array, "*terms"] | None:
        """The weights of terms, at least float32; NaN in place of a negative or infinite one."""
        if not self.has_weights:
            return None
        dtype = statistics_dtype(self.outputs.dtype)
        weights = jnp.asarray(self.mask).astype(dtype)
        valid = (weights >= 0) & (weights < jnp.inf)
        return jnp.where(valid, weights, jnp.full((), jnp.nan, dtype))

    @property
    def kept(self) -> Bool[Array, "*terms"] | None:
        """Which terms count, ``None`` for all; those of weight 0 do not."""
        if self.mask is None:
            return None
        weights = self.term_weights
        return jnp.asarray(self.mask) if weights is None else weights != 0

    @property
    def num_kept(self) -> Float[Array, ""]:
        """Number of terms that the mask keeps, each counted once."""
        if self.pooled is not None:
            return self.pooled.kept
        dtype, kept = statistics_dtype(self.outputs.dtype), self.kept
        if kept is None:
            return jnp.asarray(math.prod(self.terms_shape), dtype)
        return kept.sum(dtype=dtype)

    @property
    def total_weight(self) -> Float[Array, ""]:
        """Sum of the weights of terms; their number where they have none."""
        if self.pooled is not None:
            return self.pooled.weight
        weights = self.term_weights
        return self.num_kept if weights is None else weights.sum()

    @property
    def num_terms(self) -> Float[Array, ""]:
        """The number that stands for its terms in counts, and that its mean divides by."""
        return self.num_kept if self.normalize == "count" else self.total_weight

    @property
    def count(self) -> Float[Array, ""]:
        """``num_terms``, and 1 in place of 0."""
        # A batch whose mask drops everything has the mean 0, not 0 / 0.
        return self.num_terms if self.mask is None else or_one(self.num_terms)

    def mean(
        self, outputs: Float[Array, "..."], *, root: bool = False
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """``(mean over the kept terms, num_terms)``, without the output's own weight.

        Args:
            outputs: Outputs in place of its own.
            root: See ``kept_terms``.
        """
        head = self._replace(outputs=outputs)
        terms = head.kept_terms(root=root)
        if self.mask is None and self.pooled is None:
            return terms.mean(), jnp.asarray(terms.size, terms.dtype)
        if self.mask is None:
            # 16 bits hold no count, but they hold the devices' equal shares.
            return times(terms.mean(), terms.size / head.count), head.num_terms
        return terms.sum() / head.count.astype(terms.dtype), head.num_terms.astype(terms.dtype)

    def kept_terms(self, *, root: bool = False) -> Float[Array, "..."]:
        """Every loss term times its weight, 0 where the mask drops it.

        Args:
            root: Take the square root of the weight, with which a term's gradient enters a Fisher.
        """
        head = self.with_one_output()
        terms = self.likelihood.terms(head.outputs, kept_targets(head.targets, self.kept))
        return self.weighted(terms, 0.5 if root else 1.0)

    def weighted(self, x: Float[Array, "..."], power: float) -> Float[Array, "..."]:
        """``x``, ``(*terms, ...)``, times a power of each term's weight, 0 at dropped terms.

        Args:
            x: Values of terms.
            power: 1, 0.5 or -0.5.
        """
        kept, weights = self.kept, self.term_weights
        x = times(x, self.scale**power)
        if kept is None:
            return x
        further = range(kept.ndim, x.ndim)
        if weights is not None:
            factor = jnp.sqrt(weights) if abs(power) == 0.5 else weights
            x = times(x, jnp.expand_dims(factor if power > 0 else 1 / factor, further))
        # `where` and not a product: a dropped term may be NaN or infinite.
        return jnp.where(jnp.expand_dims(kept, further), x, jnp.zeros((), x.dtype))

    def check(self) -> None:
        """Refuse outputs, targets or a mask that do not fit each other."""
        where = f"{self.name}: " if self.name else ""
        if self.mask is not None and self.mask.shape != self.terms_shape:
            raise ValueError(
                f"{where}the mask has shape {self.mask.shape}, expected one entry per loss term, "
                f"{self.terms_shape}"
            )
        if self.targets is None:
            return
        shape = tuple(self.outputs.shape)
        if len(shape) == 1 and self.targets.shape != shape:
            raise ValueError(
                f"{where}targets have shape {self.targets.shape}, expected {shape}, as the outputs"
            )
        head = self.with_one_output()
        try:
            self.likelihood.check(head.outputs, head.targets, kept_values(self.mask))
        except ValueError as error:
            if not self.name:
                raise
            raise ValueError(f"{where}{error}") from None

    def sample(self, key: Key[Array, ""]) -> Array:
        """Labels drawn from the model."""
        head = self.with_one_output()
        # Targets have the outputs' shape where the caller left out the last axis, so labels drop it
        # again.
        labels = self.likelihood.sample(key, head.outputs)
        return labels[..., 0] if head is not self and labels.ndim > 1 else labels

    def column(self, index: Int[Array, ""]) -> Float[Array, "..."]:
        """A column of the square root of each term's Fisher, 0 at masked terms."""
        head = self.with_one_output()
        # A masked term has no loss, so its outputs have no Fisher either.
        column = self.weighted(self.likelihood.fisher_column(head.outputs, index), 0.5)
        return column.reshape(self.outputs.shape)

    def fisher_product(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiply each term's Fisher by a vector shaped like the outputs; 0 at masked terms."""
        if not _has_product(type(self.likelihood)):
            return self._product_by_columns(vector)
        head = self.with_one_output()
        product = self.likelihood.fisher_product(head.outputs, vector.reshape(head.outputs.shape))
        return self.weighted(product, 1.0).reshape(self.outputs.shape)

    def _product_by_columns(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        def add(index: Array, total: Array) -> Array:
            column = self.column(index)
            along = column * vector
            return total + column * (along if along.ndim < 2 else along.sum(-1, keepdims=True))

        # This is a loop, because all columns at once would be as many copies of the outputs as
        # there are classes.
        return jax.lax.fori_loop(0, self.columns, add, jnp.zeros_like(vector))

    @property
    def columns(self) -> int:
        """Number of columns of each term's Fisher root."""
        return 1 if len(self.outputs.shape) < 2 else self.outputs.shape[-1]


def _has_product(likelihood: type) -> bool:
    """Whether a class has a Fisher product that describes the same Fisher as its columns.

    A subclass that overrides ``fisher_column`` alone inherits a product of another Fisher.
    """

    def owner(name: str) -> type | None:
        return next((kind for kind in likelihood.__mro__ if name in vars(kind)), None)

    product, column = owner("fisher_product"), owner("fisher_column")
    return product is not None and (column is None or issubclass(product, column))


def _expanded(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape, 1), x.dtype)
    return x[..., None]


def or_one(number: Float[Array, ""]) -> Float[Array, ""]:
    """A divisor that may be 0, with 1 in its place; a sum of weights may be less than 1."""
    return jnp.where(number == 0, jnp.ones_like(number), number)


def kept_values(mask: Any) -> np.ndarray | Any:
    """Which terms a mask or weights keep, as NumPy values where there are some."""
    if mask is None or isinstance(mask, Tracer | jax.ShapeDtypeStruct):
        return mask
    return mask if mask.dtype == jnp.bool_ else np.asarray(mask) != 0


def kept_targets(targets: Any, mask: Any) -> Any:
    """``targets`` with 0 at masked terms, where a NaN would reach the gradient."""
    if mask is None or targets.shape[: mask.ndim] != mask.shape:  # not one target for each term
        return targets
    targets = jnp.asarray(targets)  # NumPy's 64 bits become those that JAX has
    mask = jnp.expand_dims(mask, tuple(range(mask.ndim, targets.ndim)))
    # `where` on the terms alone is not enough: its gradient multiplies the NaN of a dropped term's
    # derivative by zero.
    return jnp.where(mask, targets, jnp.zeros((), targets.dtype))


def total_count(heads: Sequence[Head]) -> Float[Array, ""]:
    """Number of terms of all outputs, as each counts them; 1 in place of 0."""
    return or_one(number_of_terms(heads))


def number_of_terms(heads: Sequence[Head]) -> Float[Array, ""]:
    """Number of terms of all outputs, as each counts them (``Head.num_terms``)."""
    return _sum([head.num_terms for head in heads])


def pooled_counts(heads: Sequence[Head], axes: tuple[str, ...]) -> list[Counts | None]:
    """The counts of outputs over all devices of some axes, for ``Head.pooled``.

    Without a mask every device has the same number of terms, and nothing is exchanged.
    """
    if not axes:
        return [None] * len(heads)
    local = [Counts(head.num_kept, head.total_weight) for head in heads]
    masked = [counts for counts, head in zip(local, heads, strict=True) if head.mask is not None]
    # Also values that are equal on all devices: each device has its own such terms.
    sums = iter(jax.lax.psum(masked, axes) if masked else [])
    number = num_devices(axes)
    return [
        Counts(counts.kept * number, counts.weight * number) if head.mask is None else next(sums)
        for counts, head in zip(local, heads, strict=True)
    ]


def shares(heads: Sequence[Head]) -> list[Float[Array, ""]]:
    """The fraction of all terms that belongs to each output."""
    total = total_count(heads)
    return [head.num_terms / total.astype(head.num_terms.dtype) for head in heads]


def common_scale(heads: Sequence[Head]) -> Float[Array, ""] | None:
    """The square of ``own_scales`` if it is one number for all terms, by shapes; else ``None``."""
    if any(head.has_weights for head in heads):
        return None
    if not all(_same_share(head, heads[0]) for head in heads[1:]):
        return None
    return jnp.square(own_scales(heads)[0])


def _same_share(x: Head, y: Head) -> bool:
    numbers = isinstance(x.weight, float) and isinstance(y.weight, float)
    # Arrays are compared by identity, because their values may be traced.
    weights = x.weight == y.weight if numbers else x.weight is y.weight
    return (
        weights
        and x.scale == y.scale
        and x.mask is y.mask
        and math.prod(x.terms_shape) == math.prod(y.terms_shape)
    )


def _sum(numbers: Sequence[Array]) -> Array:
    """The sum of scalars in the widest of their dtypes."""
    # Outputs may have unlike dtypes, and strict promotion refuses to add them.
    dtype = statistics_dtype(*[x.dtype for x in numbers])
    first, *more_numbers = [x.astype(dtype) for x in numbers]
    return sum(more_numbers, first)


class LossTerms(abc.ABC):
    """Outputs with likelihoods, as a Fisher type sees them.

    Attributes:
        axes: The mapped axes whose devices have different terms, over which counts are pooled.
    """

    axes: tuple[str, ...] = ()

    @abc.abstractmethod
    def heads(
        self, outputs: ArrayTree, targets: ArrayTree = None, mask: ArrayTree = None
    ) -> list[Head]:
        """Each output with its likelihood, targets, mask and weight."""

    def of_batch(
        self,
        outputs: ArrayTree,
        batch: Any,
        names: tuple[str, ...] = (),
        meeting: Callable[[], str] = _examples_do_not_meet,
    ) -> "LossTerms":
        """The terms of one batch, whose examples may meet, and which may be one device's.

        Args:
            outputs: The outputs, or their shapes.
            batch: The batch.
            names: Mapped axes whose devices hold the rest of the batch.
            meeting: Says where examples meet; see ``Head``.
        """
        return TermsOfBatch(self, outputs, batch, names, meeting)

    @abc.abstractmethod
    def tree(self, entries: Sequence[Any]) -> PyTree:
        """Put one entry for each output into the structure of the outputs."""

    def loss(
        self, outputs: ArrayTree, targets: ArrayTree, mask: ArrayTree
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """``(weighted sum of the means over kept terms, number of all terms)``."""
        heads = self.heads(outputs, targets, mask)
        means, counts = [], []
        for head in heads:
            head.check()
            mean, count = head.mean(head.outputs)
            means.append(times(mean, head.weight))
            counts.append(count)
        return _sum(means), _sum(counts)

    def check(self, outputs: ArrayTree, targets: ArrayTree, mask: ArrayTree) -> None:
        """Refuse targets or a mask that do not fit the outputs."""
        for head in self.heads(outputs, targets, mask):
            head.check()

    def scores(self, outputs: ArrayTree, targets: ArrayTree, mask: ArrayTree) -> ArrayTree:
        """The cotangents of the Fisher at given targets."""
        heads = self.heads(outputs, targets, mask)
        seeds, cotangents = _seeds(heads), []
        for head, seed in zip(heads, seeds, strict=True):
            # The mean without its weight: the seed holds the root of the weight, as the Fisher
            # wants it, and the loss would multiply by the weight itself.
            mean, vjp = jax.vjp(lambda y, head=head: head.mean(y, root=True)[0], head.outputs)
            cotangents.append(vjp(cast_varying(seed.astype(mean.dtype), mean))[0])
        return self.tree(cotangents)

    def rescaled(self, outputs: ArrayTree, cotangents: ArrayTree, mask: ArrayTree) -> ArrayTree:
        """Rescale the loss's own cotangents to those of its Fisher."""
        heads = self.heads(outputs, None, mask)
        # `heads` only takes the tree of cotangents apart, in the order of the outputs.
        flat = self.heads(cotangents, None, mask)
        scaled = [times(h.outputs, s) for h, s in zip(flat, own_scales(heads), strict=True)]
        if any(head.has_weights for head in heads):
            # The loss multiplies a term by its weight, the Fisher by the root of it.
            apart = [head._replace(scale=1.0) for head in heads]  # `own_scales` has the scale
            scaled = [h.weighted(c, -0.5) for h, c in zip(apart, scaled, strict=True)]
        return self.tree(scaled)

    def over_counts(
        self, cotangents: ArrayTree, mask: ArrayTree, counts: Sequence[Float[Array, ""]]
    ) -> ArrayTree:
        r"""Rescale one example's cotangents to its sum of terms over $\sqrt{T_m}$.

        With this scale the Fisher of a batch's mean loss is the sum of the outer products of its
        examples' cotangents.

        Args:
            cotangents: From ``scores`` or ``columns``, for the example alone.
            mask: The example's mask.
            counts: For each output, its number of terms in the batch.
        """
        heads = self.heads(cotangents, None, mask)
        total = total_count(heads)
        scales = [
            jnp.sqrt(head.count * total.astype(head.count.dtype) / count)
            for head, count in zip(heads, counts, strict=True)
        ]
        return self.tree([times(h.outputs, s) for h, s in zip(heads, scales, strict=True)])

    def sample(self, key: Key[Array, ""], outputs: ArrayTree) -> ArrayTree:
        """Labels drawn from the model, independently for each term of each output."""
        heads = self.heads(outputs)
        # With one output the key itself, so that its labels do not change if the model gets an
        # `Objective` with a dictionary of one.
        keys = [key] if len(heads) == 1 else list(jax.random.split(key, len(heads)))
        return self.tree([head.sample(k) for head, k in zip(heads, keys, strict=True)])

    def columns(
        self, outputs: ArrayTree, mask: ArrayTree
    ) -> list[tuple[int, int, Callable[[Any, Any], PyTree]]]:
        """The square root of the outputs' Fisher, output by output.

        Returns:
            For each output: its number of columns; its number of terms per example (over all
            examples where they are coupled); and a function of a column and a term (``None`` for
            all terms) that returns cotangents of all outputs, zero except at this output.
        """
        heads = self.heads(outputs, None, mask)
        seeds = _seeds(heads)

        def of(at: int) -> Callable[[Any, Any], PyTree]:
            # `count` is at least one, so a mask that drops all terms gives zeros.
            head, share = heads[at], seeds[at] / heads[at].count

            def column(index: Int[Array, ""], term: Int[Array, ""] | None) -> ArrayTree:
                one = cast_varying(times(head.column(index), share), head.outputs)
                if term is not None:
                    shape = head.terms_at_once
                    at_term = (jnp.arange(math.prod(shape)) == term).reshape(shape)
                    at_term = at_term if one.ndim < 2 else at_term[..., None]
                    one = jnp.where(at_term, one, jnp.zeros((), one.dtype))
                zeros = [
                    # Inside `shard_map` a cotangent must vary over the mesh axes of its output.
                    cast_varying(jnp.zeros(h.outputs.shape, h.outputs.dtype), h.outputs)
                    for h in heads
                ]
                return self.tree([*zeros[:at], one, *zeros[at + 1 :]])

            return column

        return [
            (head.columns, math.prod(head.terms_at_once), of(at)) for at, head in enumerate(heads)
        ]


def _seeds(heads: Sequence[Head]) -> list[Array]:
    r"""The factor $\sqrt{w_m T_m / T}$ of the gradient of the mean of each output."""
    return [jnp.sqrt(times(x, h.weight)) for h, x in zip(heads, shares(heads), strict=True)]


def own_scales(heads: Sequence[Head]) -> list[Array]:
    r"""The factor $\sqrt{T_m / (w_m T)}$ of the loss's own cotangent, for each output.

    The weight $w_m$ includes the scale of its terms. Where terms have weights, $1 / \sqrt{v_t}$
    comes to it. The factor is zero for an output of weight zero, whose cotangent is zero as well.
    """
    scales = []
    for head, share in zip(heads, shares(heads), strict=True):
        weight = times(jnp.ones((), share.dtype), head.weight)
        none = weight == 0
        weight = times(weight, head.scale)
        root = jnp.sqrt(share / jnp.where(none, jnp.ones_like(weight), weight))
        scales.append(jnp.where(none, jnp.zeros_like(root), root))
    return scales


def times(x: Float[Array, "..."], factor: Any) -> Float[Array, "..."]:
    """Multiply in at least float32, return the dtype of ``x``: 16 bits cannot hold a count."""
    if isinstance(factor, float) and factor == 1.0:
        return x
    dtype = statistics_dtype(x.dtype)
    return (x.astype(dtype) * jnp.asarray(factor).astype(dtype)).astype(x.dtype)


class TermsOfBatch(LossTerms):
    """See ``LossTerms.of_batch``; ``terms`` are those of the objective."""

    def __init__(
        self,
        terms: LossTerms,
        outputs: ArrayTree,
        batch: Any,
        names: tuple[str, ...],
        meeting: Callable[[], str],
    ) -> None:
        self._terms, self._meeting = terms, meeting
        self.axes = axes_apart(names, outputs, batch.targets, batch.mask)
        self._pooled = pooled_counts(terms.heads(outputs, None, batch.mask), self.axes)

    def heads(
        self, outputs: ArrayTree, targets: ArrayTree = None, mask: ArrayTree = None
    ) -> list[Head]:
        """Each output with its likelihood, targets, mask and weight."""
        return [
            head._replace(meeting=self._meeting, pooled=pooled)
            for head, pooled in zip(
                self._terms.heads(outputs, targets, mask), self._pooled, strict=True
            )
        ]

    def tree(self, entries: Sequence[Any]) -> PyTree:
        """Put one entry for each output into the structure of the outputs."""
        return self._terms.tree(entries)
