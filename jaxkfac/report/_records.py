"""What a training run measures, as plain values that survive JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class EpochRecord(NamedTuple):
    """Measured after an epoch.

    Attributes:
        step: Updates made.
        examples: Training examples seen, with repetition.
        seconds: Spent in training steps so far; no compilation, no evaluation.
        train_loss: Mean over the whole training set, nats, without augmentation.
        train_accuracy: Likewise, in [0, 1].
        test_loss: Mean over the test set, nats.
        test_accuracy: In [0, 1].
        validation_loss: Mean over the validation set, nats; ``None`` in older records.
        validation_accuracy: In [0, 1]; likewise.
    """

    step: int
    examples: int
    seconds: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None


class RunRecords(NamedTuple):
    """The history of one optimizer.

    Attributes:
        losses: One for each update, before it, over its examples, nats.
        epochs: One for each epoch.
        compile_seconds: Spent compiling, over all sessions of the run.
        skipped: Micro-batches and updates left out because something was not finite.
        gradient_norms: Of each update, before clipping: the mean over its micro-batches, ``None``
            where that is not finite. Runs of older versions lack those of their first updates.
        learning_rates: Of as many updates, the last ones.
    """

    losses: list[float]
    epochs: list[EpochRecord]
    compile_seconds: float = 0.0
    skipped: int = 0
    gradient_norms: Sequence[float | None] = ()
    learning_rates: Sequence[float] = ()

    @property
    def samples_per_second(self) -> float:
        """Training examples, without compilation and evaluation; 0 before the first epoch."""
        return self.epochs[-1].examples / self.epochs[-1].seconds if self.epochs else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Dictionaries and lists only."""
        return {**self._asdict(), "epochs": [epoch._asdict() for epoch in self.epochs]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RunRecords":
        """The inverse of :meth:`to_plain`."""
        return cls(**{**plain, "epochs": [EpochRecord(**epoch) for epoch in plain["epochs"]]})
