"""What decoders and encoder-decoders do differently in a run."""

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._arguments import ArrayTree
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.data.choices import Question
from jaxkfac.jobs.data.readers import Bad, FileRows
from jaxkfac.jobs.models import Pretrained


class Text(NamedTuple):
    """The texts of a run, before tokenization.

    Attributes:
        train: Training records or pairs; rows of files may be streamed.
        validation: Validation records or pairs; may be empty.
        questions: Multiple-choice questions for the evaluations; may be empty.
        system: System message of the questions; may be empty.
        bad: Rows of the validation files that were left out.
    """

    train: Sequence[Any] | FileRows
    validation: Sequence[Any]
    questions: Sequence[Question] = ()
    system: str = ""
    bad: Sequence[Bad] = ()

    def some(self, count: int) -> list[Any]:
        """The first validation examples, then training examples, ``count`` in all."""
        train = self.train.peek(count) if isinstance(self.train, FileRows) else self.train
        return [*self.validation[:count], *train[:count]][:count]


class Held(NamedTuple):
    """Records or pairs in memory.

    Attributes:
        good: The usable ones.
        bad: Rows that were left out.
    """

    good: list[Any]
    bad: list[Bad]


def held_rows(rows: FileRows | None) -> Held:
    """Read all validation rows into memory.

    Raises:
        ValueError: no row can be used.
    """
    held_text = Held([], [])
    if rows is not None:
        rows.peek()
        for _, row in rows.read():
            (held_text.bad if isinstance(row, Bad) else held_text.good).append(row)
    return held_text


class EncodedText(NamedTuple):
    """The texts of a run in tokens.

    Attributes:
        encoded: Training examples and how much of them was cut; ``None`` for streamed files.
        train: Training batches.
        validation: Validation batches, or ``None``.
        reference: Names of baseline models and their loss on the validation text, nats a token.
    """

    encoded: Any
    train: Any
    validation: Any
    reference: dict[str, float]


class Family(abc.ABC):
    """One kind of model.

    Attributes:
        target: Full-match pattern of the layers to adapt by default.
        kernels: Full-match pattern of the kernels that ``"all"`` quantizes.
        task_type: PEFT's name for the task.
        num_lengths: Default number of row lengths for streamed files.
        unread: Options that this kind of model has no use for.
    """

    target: ClassVar[str]
    kernels: ClassVar[str]
    task_type: ClassVar[str]
    num_lengths: ClassVar[int]
    unread: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def check(self, experiment: Finetuning) -> None:
        """Refuse options of another kind of model; reads no file.

        Raises:
            ValueError: names the option.
        """

    @abc.abstractmethod
    def load(self, experiment: Finetuning) -> Any:
        """The model: ``.config``, ``.apply_fn``, ``.params``, ``.tokenizer`` (or ``None``)."""

    @abc.abstractmethod
    def shapes(self, experiment: Finetuning) -> Any:
        """Like :meth:`load`, with shapes as parameters; reads no weights."""

    @abc.abstractmethod
    def save(self, folder: Path, pretrained: Pretrained) -> None:
        """Write a model of which every parameter was trained."""

    @abc.abstractmethod
    def text(self, experiment: Finetuning, *, strict: bool = False) -> Text:
        """Read training and validation text; errors in the data show at once.

        Args:
            experiment: Options of the run.
            strict: Whether a bad row raises instead of being left out.
        """

    @abc.abstractmethod
    def tokens(self, experiment: Finetuning, pretrained: Any, text: Text) -> EncodedText:
        """The text in the model's tokens, and its batches."""

    @abc.abstractmethod
    def rows(self, experiment: Finetuning, batches: Any) -> Any:
        """Zeros shaped like a batch of the longest rows of ``batches``, or by the options if
        None.
        """

    @abc.abstractmethod
    def batch(self, batch: Any, asarray: Callable[[Any], Any] = jnp.asarray) -> Any:
        """``(inputs, targets, mask)`` for an objective, with arrays made by ``asarray``."""

    @abc.abstractmethod
    def exist(self, batch: ArrayTree) -> jax.Array:
        """Mask of the positions of such a batch that hold a token."""

    @abc.abstractmethod
    def examiner(self, problem: Any, arguments: Any) -> Any:
        """The ``Examiner`` of this kind of model."""

    def dropout(self, experiment: Finetuning, config: Any) -> float | int:
        """Dropout rate of the model itself in training."""
        return 0.0

    def quantized(self, experiment: Finetuning) -> str | None:
        """Full-match pattern of the kernels to keep in NF4."""
        return self.kernels if experiment.quantize == "all" else experiment.quantize


def dtype_of(experiment: Finetuning) -> Any:
    """The model's dtype; a CPU emulates bfloat16 through float32, several times slower."""
    if experiment.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(experiment.dtype)


def check_ids(largest: int, vocabulary: int) -> None:
    """Refuse token ids that the model does not have."""
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer gives id {largest}, and the model has {vocabulary} tokens: they are "
            "not of one checkpoint; put the model's own tokenizer beside it"
        )
