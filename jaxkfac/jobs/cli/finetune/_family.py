"""What a decoder and an encoder-decoder do differently in a run."""

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.data.choices import Question
from jaxkfac.jobs.data.readers import Bad, FileRows


class Text(NamedTuple):
    """What is read before any of it is tokens.

    Attributes:
        train: To learn: records, or pairs; of files, perhaps to be read as they are needed.
        validation: To measure with; may be empty.
        questions: To be examined with; may be empty.
        system: What the system says first in questions; may be empty.
        bad: Rows of the validation files that were left out.
    """

    train: Sequence[Any] | FileRows
    validation: Sequence[Any]
    questions: Sequence[Question] = ()
    system: str = ""
    bad: Sequence[Bad] = ()

    def some(self, count: int) -> list[Any]:
        """The first of what is validated with, and then of what is learnt."""
        train = self.train.peek(count) if isinstance(self.train, FileRows) else self.train
        return [*self.validation[:count], *train[:count]][:count]


class Held(NamedTuple):
    """Records or pairs that are held in memory.

    Attributes:
        good: Those.
        bad: Rows that were left out.
    """

    good: list[Any]
    bad: list[Bad]


def held_rows(rows: FileRows | None) -> Held:
    """What is measured with, all of it.

    Raises:
        ValueError: no row can be used.
    """
    found = Held([], [])
    if rows is not None:
        rows.peek()
        for _, row in rows.read():
            (found.bad if isinstance(row, Bad) else found.good).append(row)
    return found


class EncodedText(NamedTuple):
    """The same in tokens.

    Attributes:
        encoded: What is learnt, and how much of it was cut; ``None`` where it is read as it is
            needed.
        train: Batches of it.
        validation: Batches to measure with, or ``None``.
        reference: Names of other models and their loss on the validation text, nats a token.
    """

    encoded: Any
    train: Any
    validation: Any
    reference: dict[str, float]


class Family(abc.ABC):
    """Models of one kind.

    Attributes:
        target: Full-match pattern of the layers that are adapted by default.
        kernels: Of those that are quantised with ``"all"``.
        task_type: PEFT's word for what the model does.
        num_lengths: Row lengths of files that are read as they are needed, unless chosen.
    """

    target: ClassVar[str]
    kernels: ClassVar[str]
    task_type: ClassVar[str]
    num_lengths: ClassVar[int]

    @abc.abstractmethod
    def load(self, experiment: Finetuning) -> Any:
        """The model: ``.config``, ``.apply_fn``, ``.params``, ``.tokenizer`` (or ``None``)."""

    @abc.abstractmethod
    def shapes(self, experiment: Finetuning) -> Any:
        """The same with shapes for parameters; no weights are read."""

    @abc.abstractmethod
    def save(self, folder: Path, pretrained: Any) -> None:
        """Write a model whose parameters were all trained."""

    @abc.abstractmethod
    def text(self, experiment: Finetuning, *, strict: bool = False) -> Text:
        """What is learnt and measured with; what is wrong with it shows at once.

        Args:
            experiment: Which.
            strict: Whether a bad row is an error where it could be left out.
        """

    @abc.abstractmethod
    def tokens(self, experiment: Finetuning, pretrained: Any, text: Text) -> EncodedText:
        """Text in the model's tokens, and batches of it."""

    @abc.abstractmethod
    def rows(self, experiment: Finetuning, batches: Any) -> Any:
        """Zeros in the form of a batch of the longest rows: of ``batches``, or ``None``."""

    @abc.abstractmethod
    def batch(self, batch: Any, asarray: Callable[[Any], Any] = jnp.asarray) -> Any:
        """``(inputs, targets, mask)`` as an objective takes them, of what ``asarray`` makes."""

    @abc.abstractmethod
    def exist(self, batch: Any) -> jax.Array:
        """Which positions of such a batch exist."""

    @abc.abstractmethod
    def examiner(self, problem: Any, arguments: Any) -> Any:
        """An ``Examiner``, which asks the model the same things at several updates."""

    def dropout(self, experiment: Finetuning, config: Any) -> float | int:
        """Rate of the model's own dropout in training, whose config is given."""
        return 0.0

    def quantized(self, experiment: Finetuning) -> str | None:
        """Full-match pattern of the kernels in NF4."""
        return self.kernels if experiment.quantize == "all" else experiment.quantize


def dtype_of(experiment: Finetuning) -> Any:
    """The model's dtype; a CPU computes bfloat16 by way of float32, several times slower."""
    if experiment.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(experiment.dtype)


def check_ids(largest: int, vocabulary: int) -> None:
    """Refuse tokens that the model has not."""
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer gives id {largest}, and the model has {vocabulary} tokens: they are "
            "not of one checkpoint; put the model's own tokenizer beside it"
        )
