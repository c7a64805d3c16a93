"""The Fisher types: which gradients with respect to the outputs are squared and summed."""

import abc
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int, Key, PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import check_key, one_of
from jaxkfac._jaxpr_compat import varying_axes
from jaxkfac.factors._loss_terms import LossTerms
from jaxkfac.factors._model_call import Batch, check_array
from jaxkfac.factors._program import Linearised
from jaxkfac.interception import fast_convolutions
from jaxkfac.linalg import sum_over_chunks

# ---------------- the interface of a Fisher type


LABEL_FOLD = 0x6C61  # folded into the caller's key for sampled labels


@dataclasses.dataclass(frozen=True)
class Estimator(abc.ABC):
    """One Fisher type. A pytree: key and labels are its leaves.

    A new type is a frozen dataclass whose ``expectation`` says which cotangents of the outputs
    it propagates back. An instance can be passed as ``fisher=`` in place of a name; the
    library's own names are in ``FISHER_TYPES``.

    Attributes:
        samples: How many labels are sampled for each term, if labels are sampled.
        chunk: How many vector-Jacobian products run at once.
        key: The key for sampled labels, once the estimator is bound to a call.
        labels: ``(samples, *targets)`` in place of sampled ones, once bound to a call.
        prints: Whether it prints its cost where that is high.
        name: What ``fisher=`` calls it.
        samples_labels: Whether it draws labels, from a key or from ``labels=``.
        needs_outputs: Whether it needs the outputs of a model, which a scalar loss hides.
        unit_outputs: Whether gradients with respect to outputs count as orthonormal, so that
            none is gathered.
        of_examples: Whether it is correct for gradients of whole examples, which EKFAC measures.
    """

    samples: int = 1
    chunk: int = 1
    key: Any = None
    labels: Any = None
    prints: bool = True

    name: ClassVar[str]
    samples_labels: ClassVar[bool] = False
    needs_outputs: ClassVar[bool] = True
    unit_outputs: ClassVar[bool] = False
    of_examples: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node_class(cls)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[tuple[str, Any], ...]]:
        """Key and labels, and the static fields."""
        # Everything else is static: it decides how many backward passes a program has, and so its
        # shape.
        static = [(k, v) for k, v in vars(self).items() if k not in ("key", "labels")]
        return (self.key, self.labels), tuple(static)

    @classmethod
    def tree_unflatten(
        cls, static: Iterable[tuple[str, Any]], leaves: Sequence[PyTree]
    ) -> "Estimator":
        """The inverse of ``tree_flatten``."""
        return cls(**dict(static), key=leaves[0], labels=leaves[1])

    @abc.abstractmethod
    def expectation(
        self,
        objective: LossTerms,
        outputs: ArrayTree,
        batch: Batch,
        contribution: Callable[[ArrayTree], ArrayTree],
    ) -> ArrayTree:
        """Sum of contributions over the cotangents that stand for the expectation over labels.

        Args:
            objective: The objective: its ``loss``, ``scores``, ``sample`` and ``columns``.
            outputs: Outputs of the model: an array, or a tree of them in the form of the
                likelihoods.
            batch: The batch.
            contribution: Maps a cotangent of the outputs, for the *mean* loss, to the summands.
                ``scores`` gives such a cotangent for targets; with several outputs each one is
                scaled by its own number of terms.

        Memory:
            ``chunk`` times that of one backward pass and its summands, plus their sum.
        """

    def gathered(
        self,
        objective: Callable[..., ArrayTree],
        at: Linearised,
        batch: ArrayTree,
        outputs: Callable[[Mapping[str, Any]], ArrayTree],
    ) -> ArrayTree:
        """Compute the output sides of a linearized program.

        Args:
            objective: The objective, or a scalar loss.
            at: The program at one point; its own backward pass has run.
            batch: The batch.
            outputs: Maps the statistics that a backward pass emits to the output sides.
        """
        # The gradient's own pass (`at.emitted`) holds the loss's cotangents, those of the given
        # targets; other labels need passes of their own over the same linearization.
        assert at.terms_of is not None  # a scalar loss has no outputs to expect over
        return self.expectation(
            at.terms_of, at.outputs, at.batch, lambda cotangent: outputs(at.vjp(cotangent))
        )

    @property
    def concurrent(self) -> int:
        """How many backward passes' output sides are alive besides their sum."""
        return self.chunk

    def bound(
        self,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None,
        labels: ArrayTree,
        batch: Batch | None,
    ) -> "Estimator":
        """A copy with the key or the labels of one call.

        Raises:
            ValueError: neither key nor labels, where labels are drawn; labels for a type that
                draws none; or labels that do not fit the targets.
            TypeError: ``key`` is a seed.
        """
        if self.samples_labels and key is None and labels is None:
            raise ValueError(f'fisher="{self.name}" samples labels: pass key=, or labels=')
        if self.samples_labels and key is not None:
            check_key(key)
        if labels is not None:
            self._check_labels(labels, batch)
        return dataclasses.replace(self, key=key if self.samples_labels else None, labels=labels)

    def _check_labels(self, labels: ArrayTree, batch: Batch | None) -> None:
        if not self.samples_labels:
            raise ValueError(f'labels= are for fisher="mc", and this is fisher={self.name!r}')
        if batch is None:  # the loss marks its outputs
            return
        form = jax.tree.structure(batch.targets)
        if jax.tree_util.treedef_is_leaf(form):
            # First the type: comparing a list's structure with that of an array would give a
            # message about trees.
            check_array("labels", labels)
        if jax.tree.structure(labels) != form:
            raise ValueError(f"labels: expected the form of the targets, {form}")
        number = None
        for mine, targets in zip(*map(jax.tree.leaves, (labels, batch.targets)), strict=True):
            check_array("labels", mine)
            number = mine.shape[:1] if number is None else number
            if mine.shape[1:] != targets.shape or mine.shape[:1] != number or not len(mine):
                raise ValueError(
                    f"labels have shape {mine.shape}, expected (samples, *targets), "
                    f"(samples, {', '.join(map(str, targets.shape))})"
                )

    def check_values(self, objective: LossTerms, outputs: ArrayTree, batch: Batch) -> None:
        """Refuse targets and labels that the likelihood refuses, where values are concrete."""
        objective.check(outputs, batch.targets, batch.mask)
        if self.labels is not None:
            check_label_values(objective, outputs, self.labels, batch.mask)

    def by_example(self, number: int, axes: tuple[str, ...] = ()) -> "Estimator":
        """Estimators stacked over ``number`` examples, each for a batch of that example alone.

        Args:
            number: Number of examples.
            axes: Mapped axes whose devices have different examples.
        """
        key, labels = self.key, self.labels
        if labels is not None:
            # Labels are ``(samples, examples, ...)``. Mapped over examples, each estimator has its
            # samples and an axis of one example, the form of a batch of one.
            one_each = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], labels)
            return dataclasses.replace(self, key=None, labels=one_each)
        if key is None:
            return self
        # The fold keeps the labels independent of dropout, which uses the key itself.
        key = of_this_device(jax.random.fold_in(key, LABEL_FOLD), (), axes)
        keys = jax.random.split(key, number)
        return dataclasses.replace(self, key=keys)


def check_label_values(
    objective: LossTerms,
    outputs: ArrayTree,
    labels: ArrayTree,
    mask: ArrayTree,
) -> None:
    """Refuse labels that the likelihood refuses as targets, where values are concrete."""
    leaves = jax.tree.leaves(labels)
    if any(isinstance(x, Tracer) for x in leaves):
        return
    with jax.ensure_compile_time_eval():  # inside a trace, slices of concrete arrays are traced
        draws = [jax.tree.map(lambda x, n=n: x[n], labels) for n in range(len(leaves[0]))]
    for targets in draws:
        objective.check(outputs, targets, mask)


# ---------------- the five Fisher types


Fisher = Literal["empirical", "mc", "exact", "forward", "exact_if_terms_do_not_mix"]


class Empirical(Estimator):
    """The given targets; uses the gradient's own backward pass."""

    name = "empirical"
    needs_outputs = False

    def gathered(
        self,
        objective: Callable[..., ArrayTree],
        at: Linearised,
        batch: ArrayTree,
        outputs: Callable[[Mapping[str, Any]], ArrayTree],
    ) -> ArrayTree:
        # The loss's cotangents may need another factor for each output to become the Fisher's. The
        # emitted sums hold only their total, so the given targets then take a pass of their own.
        if at.own is not None:
            return outputs(at.vjp(at.own()))
        sums, scale = outputs(at.emitted), at.own_scale
        if scale is None:
            return sums
        return jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)

    def expectation(
        self,
        objective: LossTerms,
        outputs: ArrayTree,
        batch: Batch,
        contribution: Callable[[ArrayTree], ArrayTree],
    ) -> ArrayTree:
        return contribution(objective.scores(outputs, batch.targets, batch.mask))

    @property
    def concurrent(self) -> int:
        # The gradient's own pass emits the sums; nothing is alive beside them.
        return 0


class MonteCarlo(Estimator):
    """Labels sampled from the model, independently for each term; the mean over samples."""

    name = "mc"
    samples_labels = True

    def expectation(
        self,
        objective: LossTerms,
        outputs: ArrayTree,
        batch: Batch,
        contribution: Callable[[ArrayTree], ArrayTree],
    ) -> ArrayTree:
        def at_labels(targets: ArrayTree) -> ArrayTree:
            return contribution(objective.scores(outputs, targets, batch.mask))

        samples, labels = self.samples, self.labels
        if labels is not None:
            # Labels that are passed count for themselves: `samples=` says how many would be drawn.
            samples = len(jax.tree.leaves(labels)[0])
            total = _sum(at_labels, labels, self.chunk)
        else:
            label_key = jax.random.fold_in(self.key, LABEL_FOLD)
            key = of_this_device(label_key, outputs, objective.axes)
            # One sample uses the key itself, so that `samples=1` draws what a single call of
            # `sample` draws.
            keys = key[None] if samples == 1 else jax.random.split(key, samples)
            total = _sum(lambda k: at_labels(objective.sample(k, outputs)), keys, self.chunk)
        # The sums are divided, and not the cotangents, which are squared: the sums would then be
        # divided by the square of the number.
        return jax.tree.map(lambda x: x / jnp.asarray(samples, x.dtype), total)

    @property
    def concurrent(self) -> int:
        given = jax.tree.leaves(self.labels)
        return 0 if (len(given[0]) if given else self.samples) == 1 else self.chunk


class Exact(Estimator):
    r"""The expectation over labels.

    For each loss term $r$ and each column $c$ of the square root of that term's Fisher, the
    cotangent that is this column at $r$ and zero at every other term is propagated back. One
    backward pass serves all examples at once. If examples are coupled (batch statistics), or may
    be, each example takes its own.
    """

    name = "exact"

    def expectation(
        self,
        objective: LossTerms,
        outputs: ArrayTree,
        batch: Batch,
        contribution: Callable[[ArrayTree], ArrayTree],
    ) -> ArrayTree:
        totals, every = [], objective.columns(outputs, batch.mask)
        heads = objective.heads(outputs, None, batch.mask)
        meeting = next(filter(None, (head.meeting() for head in heads)), "")
        if meeting and self.prints:
            number = sum(columns * rows for columns, rows, _ in every)
            remedy = ' (examples="apart" asserts that they do not)' * ("not known" in meeting)
            print(
                f"jaxkfac: {meeting}, so that fisher={self.name!r} takes {number} backward "
                f'passes; "mc" takes one{remedy}',
                file=sys.stderr,
            )
        for columns, rows, column in every:

            def at_column(index: Int[Array, ""], columns=columns, column=column) -> ArrayTree:
                # One column at one term: two terms of an example in a pass would add the cross
                # products of their columns, which the expectation does not have.
                return contribution(column(index % columns, index // columns))

            totals.append(_sum(at_column, jnp.arange(columns * rows), self.chunk))
        return _added(totals)


class ExactIfTermsDoNotMix(Estimator):
    """One vector-Jacobian product for each column, shared by all terms of an example.

    This drops the products of different terms' columns. It is right only if no output row of a
    layer affects two terms.
    """

    name = "exact_if_terms_do_not_mix"
    of_examples = False

    def gathered(
        self,
        objective: Callable[..., ArrayTree],
        at: Linearised,
        batch: ArrayTree,
        outputs: Callable[[Mapping[str, Any]], ArrayTree],
    ) -> ArrayTree:
        heads = [] if at.terms_of is None else at.terms_of.heads(at.outputs)
        if meeting := next(filter(None, (head.meeting() for head in heads)), ""):
            raise ValueError(
                f"fisher={self.name!r}: {meeting}, and one product for all of them would mix their "
                'terms: choose "mc" or "exact"'
            )
        return super().gathered(objective, at, batch, outputs)

    def expectation(
        self,
        objective: LossTerms,
        outputs: ArrayTree,
        batch: Batch,
        contribution: Callable[[ArrayTree], ArrayTree],
    ) -> ArrayTree:
        totals = [
            _sum(lambda i, column=column: contribution(column(i, None)), jnp.arange(n), self.chunk)
            for n, _, column in objective.columns(outputs, batch.mask)
        ]
        return _added(totals)


class Forward(Empirical):
    """G is the identity; the gradient's own backward pass, with no output side gathered."""

    name = "forward"
    needs_outputs = True
    unit_outputs = True
    of_examples = False

    def gathered(
        self,
        objective: Callable[..., ArrayTree],
        at: Linearised,
        batch: ArrayTree,
        outputs: Callable[[Mapping[str, Any]], ArrayTree],
    ) -> ArrayTree:
        # Without output sides the loss's cotangents do not matter, so they need no pass of their
        # own, and none of them is refused.
        return outputs(at.emitted)


FISHER_TYPES: Mapping[str, type[Estimator]] = {
    cls.name: cls for cls in (Empirical, MonteCarlo, Exact, Forward, ExactIfTermsDoNotMix)
}


def estimator_of(
    fisher: str | Estimator, *, samples: int, chunk: int, of_examples: bool = False
) -> Estimator:
    """The estimator of a Fisher type; an ``Estimator`` is returned unchanged.

    Args:
        fisher: A Fisher type, by name or as an ``Estimator``.
        samples: Number of samples of the estimator that is built.
        chunk: Chunk size of the estimator that is built.
        of_examples: Whether it has to be correct for gradients of whole examples.

    Raises:
        ValueError: an unknown name; a type that is not correct for whole examples, if it has to
            be; or ``samples`` or ``chunk`` beside an ``Estimator``, which has its own.
        TypeError: a field of the estimator cannot be hashed.
    """
    choices = [name for name, cls in FISHER_TYPES.items() if cls.of_examples or not of_examples]
    if isinstance(fisher, Estimator):
        if (samples, chunk) != (1, 1):
            raise ValueError(
                f"samples={samples}, chunk={chunk} beside an Estimator: give them to "
                f"{type(fisher).__name__} itself"
            )
        if of_examples and not fisher.of_examples:
            # Not `one_of`: a subclass that keeps its parent's name would pass as a choice.
            raise ValueError(
                f"fisher={fisher.name!r}: expected one of {', '.join(map(repr, choices))}; "
                f"{type(fisher).__name__} is not correct for gradients of whole examples "
                "(of_examples)"
            )
        _check_hashable(fisher)
        return fisher
    one_of("fisher", fisher, choices)
    return FISHER_TYPES[fisher](samples=samples, chunk=chunk)


def _check_hashable(fisher: Estimator) -> None:
    """Refuse unhashable fields: all fields but key and labels are static under ``jit``."""
    for name, value in fisher.tree_flatten()[1]:
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"fisher: {type(fisher).__name__}.{name} is a {type(value).__name__}, which has no "
                "hash, and the fields of an Estimator are static: give a tuple or a number"
            ) from None


def of_this_device(
    key: Key[Array, ""], outputs: ArrayTree, axes: tuple[str, ...] = ()
) -> Key[Array, ""]:
    """The key with the device index folded in, if outputs differ between devices.

    Args:
        key: The key.
        outputs: What may differ.
        axes: Mapped axes over which it differs, besides those that its types show.
    """
    differing = {*axes}.union(*map(varying_axes, jax.tree.leaves(outputs)))
    # A set of names has another order in each process; the keys must be the same.
    for axis in sorted(differing):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def _added(totals: list[ArrayTree]) -> ArrayTree:
    first, *more = totals
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), first, *more)


def _sum(fn: Callable[[Any], ArrayTree], xs: ArrayTree, chunk: int) -> ArrayTree:
    """Sum of ``fn`` over the leading axes of ``xs``, ``chunk`` entries at a time."""
    # One entry at a time needs no `vmap`, which refuses a model with an operation that JAX cannot
    # batch.
    one_by_one = min(chunk, len(jax.tree.leaves(xs)[0])) == 1

    def sum_of_chunk(xs: ArrayTree, _: Int[Array, ""] | None) -> ArrayTree:
        if one_by_one:
            return fn(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(fn)(xs))

    return sum_over_chunks(sum_of_chunk, xs, chunk, in_loop=fast_convolutions)
