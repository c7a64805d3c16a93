"""What a Fisher type is: whose gradients with respect to the outputs are squared and summed."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from jaxkfac._checks import check_key
from jaxkfac.factors._loss_terms import LossTerms
from jaxkfac.factors._objective import Batch, check_array
from jaxkfac.factors._program import Linearised
from jaxkfac.interception import Slot

LABEL_FOLD = 0x6C61  # folded into the caller's key for sampled labels


@dataclasses.dataclass(frozen=True)
class Estimator(abc.ABC):
    """One Fisher type. A pytree: key and labels are its leaves.

    A new type is a frozen dataclass that says in ``expectation`` which cotangents of the outputs
    it propagates back. An instance is passed as ``fisher=`` wherever a name is; the
    library's own names are in ``FISHER_TYPES``.

    Attributes:
        samples: How many labels are sampled for each term, where labels are.
        chunk: How many vector-Jacobian products run at once.
        key: For sampled labels, once it is bound to a call.
        labels: ``(samples, *targets)`` in place of sampled ones, likewise.
        prints: Whether it says what it costs, where that is much.
        name: What ``fisher=`` calls it.
        samples_labels: Whether it draws labels, from a key or from ``labels=``.
        needs_outputs: Whether it needs the outputs of a model, which a scalar loss hides.
        unit_outputs: Whether gradients with respect to outputs count as orthonormal, so that
            none is gathered.
        of_examples: Whether it is right for gradients of whole examples, as EKFAC measures.
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
        """Key and labels, and everything else."""
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
        outputs: PyTree,
        batch: Batch,
        contribution: Callable[[PyTree], PyTree],
    ) -> PyTree:
        """Sum of contributions over the cotangents that stand for the expectation over labels.

        Args:
            objective: The objective: its ``loss``, ``scores``, ``sample`` and ``columns``.
            outputs: Outputs of the model: an array, or a tree of them in the form of the
                likelihoods.
            batch: The batch.
            contribution: From a cotangent of the outputs, for the *mean* loss, to the summands.
                ``scores`` gives it for targets; of several outputs each is scaled by its own
                number of terms.

        Memory:
            ``chunk`` times that of one backward pass and its summands, plus their sum.
        """

    def gathered(
        self,
        objective: Callable[..., PyTree],
        at: Linearised,
        batch: PyTree,
        outputs: Callable[[Mapping[str, Slot]], PyTree],
    ) -> PyTree:
        """The output sides of a linearised program.

        Args:
            objective: The objective, or a scalar loss.
            at: The program at one point; its own backward pass has run.
            batch: The batch.
            outputs: From the statistics that a backward pass emits to the output sides.
        """
        assert at.terms_of is not None  # a scalar loss has no outputs to expect over
        return self.expectation(
            at.terms_of, at.outputs, at.batch, lambda cotangent: outputs(at.vjp(cotangent))
        )

    @property
    def concurrent(self) -> int:
        """How many backward passes' output sides are alive beside their sum."""
        return self.chunk

    def bound(
        self,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None,
        labels: PyTree,
        batch: Batch | None,
    ) -> "Estimator":
        """With the key or the labels of one call.

        Raises:
            ValueError: neither is there where labels are drawn; or labels that nothing wants,
                or that do not fit the targets.
            TypeError: ``key`` is a seed.
        """
        if self.samples_labels and key is None and labels is None:
            raise ValueError(f'fisher="{self.name}" samples labels: pass key=, or labels=')
        if self.samples_labels and key is not None:
            check_key(key)
        if labels is not None:
            self._check_labels(labels, batch)
        return dataclasses.replace(self, key=key if self.samples_labels else None, labels=labels)

    def _check_labels(self, labels: PyTree, batch: Batch | None) -> None:
        if not self.samples_labels:
            raise ValueError(f'labels= are for fisher="mc", and this is fisher={self.name!r}')
        if batch is None:  # of a loss that marks its outputs
            return
        form = jax.tree.structure(batch.targets)
        if jax.tree_util.treedef_is_leaf(form):
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

    def check_values(self, objective: LossTerms, outputs: PyTree, batch: Batch) -> None:
        """Refuse targets and labels that the likelihood refuses, where their values are known."""
        objective.check(outputs, batch.targets, batch.mask)
        if self.labels is not None:
            check_label_values(objective, outputs, self.labels, batch.mask)

    def by_example(self, number: int) -> "Estimator":
        """One for each of ``number`` examples, stacked: each for a batch of that example alone."""
        key, labels = self.key, self.labels
        if labels is not None:
            one_each = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], labels)
            return dataclasses.replace(self, key=None, labels=one_each)
        if key is None:
            return self
        keys = jax.random.split(jax.random.fold_in(key, LABEL_FOLD), number)
        return dataclasses.replace(self, key=keys)


def check_label_values(
    objective: LossTerms,
    outputs: PyTree,
    labels: PyTree,
    mask: PyTree,
) -> None:
    """Refuse labels that the likelihood refuses as targets, where their values are known."""
    leaves = jax.tree.leaves(labels)
    if any(isinstance(x, Tracer) for x in leaves):
        return
    with jax.ensure_compile_time_eval():  # inside a trace a slice of what is known is traced
        each = [jax.tree.map(lambda x, n=n: x[n], labels) for n in range(len(leaves[0]))]
    for targets in each:
        objective.check(outputs, targets, mask)
