"""Measurements of a fine-tuning run, as plain values that survive JSON."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.table import Table

from jaxkfac.jobs.report._page import terminal_table


class ExamRecord(NamedTuple):
    """Results on held-out text and questions at one update.

    Attributes:
        step: Number of updates made.
        loss: Mean over the learned tokens of the validation records, nats; ``None`` without any.
        accuracy: ``{variant: (value, low, high)}`` of the questions, with a 95 % interval; empty
            without any.
        correct: ``{variant: whether each question was answered correctly}``.
        scores: Scores of generated targets by name, from 0 to 1; ``None`` if none are generated.
    """

    step: int
    loss: float | None
    accuracy: dict[str, list[float]]
    correct: dict[str, list[bool]]
    scores: dict[str, float] | None = None


class FourierRecord(NamedTuple):
    """The adapter's nonlinearity at one update.

    Attributes:
        step: Number of updates made.
        layers: ``{layer: {"coefficients": a list for each slice, "sigma", "deviation",
            "nonlinearity", "saturated": a number for each slice}}``; see
            ``jaxkfac.lslora.diagnose``.
    """

    step: int
    layers: dict[str, dict[str, list[Any]]]


class SampleRecord(NamedTuple):
    """An answer of the model.

    Attributes:
        step: Number of updates made.
        prompt: The prompt.
        answer: The greedy answer.
        target: The correct answer, if known.
    """

    step: int
    prompt: str
    answer: str
    target: str | None = None


class FinetuneRecords(NamedTuple):
    """The history of a run.

    Attributes:
        losses: Loss of each update, before it, over its learned tokens, nats.
        penalties: The weighted regularizer of each update.
        tokens: Tokens read in each update, without padding.
        learnt: Tokens in the loss of each update.
        examples: Examples read in each update.
        seconds: Seconds of each update, without compilation.
        exams: Evaluations before, during and after training.
        fourier: The nonlinearity over time; empty for plain LoRA.
        samples: Sample answers before, during and after training.
        compile_seconds: Seconds spent compiling, over all sessions of the run.
        programs: Number of training programs compiled, one for each row length.
        skipped: Micro-batches and updates left out because something was not finite.
        gradient_norms: Norm of the gradient before clipping, averaged over the micro-batches of
            each update; ``None`` where it is not finite.
        learning_rates: Learning rate of each update.
    """

    losses: Sequence[float] = ()
    penalties: Sequence[float] = ()
    tokens: Sequence[int] = ()
    learnt: Sequence[int] = ()
    examples: Sequence[int] = ()
    seconds: Sequence[float] = ()
    exams: Sequence[ExamRecord] = ()
    fourier: Sequence[FourierRecord] = ()
    samples: Sequence[SampleRecord] = ()
    compile_seconds: float = 0.0
    programs: int = 0
    skipped: int = 0
    gradient_norms: Sequence[float | None] = ()
    learning_rates: Sequence[float] = ()

    @property
    def best(self) -> ExamRecord | None:
        """The evaluation with the least validation loss after the first update, or ``None``."""
        candidates = [
            x for x in self.exams if x.step and x.loss is not None and math.isfinite(x.loss)
        ]
        return min(candidates, key=lambda exam: exam.loss or 0.0, default=None)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all updates; 0 before the first."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Examples per second over all updates; 0 before the first."""
        return sum(self.examples) / sum(self.seconds) if self.seconds else 0.0

    @property
    def mean_losses(self) -> list[float]:
        """Mean loss of the first and of the last tenth of the updates, at least one update."""
        count = max(1, round(0.1 * len(self.losses)))
        return [sum(chosen) / count for chosen in (self.losses[:count], self.losses[-count:])]

    def to_plain(self) -> dict[str, Any]:
        """Dictionaries and lists only."""
        record_lists = {name: [x._asdict() for x in getattr(self, name)] for name in _KINDS}
        return {**self._asdict(), **record_lists}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "FinetuneRecords":
        """The inverse of :meth:`to_plain`."""
        record_lists = {name: [kind(**x) for x in plain[name]] for name, kind in _KINDS.items()}
        return cls(**{**plain, **record_lists})


_KINDS = {"exams": ExamRecord, "fourier": FourierRecord, "samples": SampleRecord}


# ---------------- tables for the terminal


def finetune_table(
    records: FinetuneRecords,
    comparison: Mapping[str, Any],
    reference: Mapping[str, float] = MappingProxyType({}),
) -> Table:
    """Loss, and accuracy by each measure of likelihood, before and after training.

    Args:
        records: Records of the run.
        comparison: ``{variant: {"gained", "lost", "p_value"}}``.
        reference: Names of baseline models and their validation loss.
    """
    ends = [f"{loss:.4f}" for loss in records.mean_losses]
    rows = [["training loss", *ends]]
    rows += held_out_rows(records, reference)
    rows += [[f"accuracy, {name}", *cells] for name, *cells in exam_rows(records, comparison)]
    head = ["", "before", "after", "gained", "lost", "p"][: max(map(len, rows))]
    return terminal_table("Result", head, rows, no_wrap=True)


def held_out_rows(records: FinetuneRecords, reference: Mapping[str, float]) -> list[list[str]]:
    """``[name, before, after]`` for validation loss, baselines and scores."""
    rows, losses = [], [e.loss for e in records.exams if e.loss is not None]
    if losses:
        rows.append(["validation loss", f"{losses[0]:.4f}", f"{losses[-1]:.4f}"])
        rows += [[f"that of a {name} model", "", f"{x:.4f}"] for name, x in reference.items()]
    scored = [e.scores for e in records.exams if e.scores is not None]
    if scored:
        rows += [[name, f"{scored[0][name]:.1%}", f"{x:.1%}"] for name, x in scored[-1].items()]
    return rows


def exam_rows(records: FinetuneRecords, comparison: Mapping[str, Any]) -> list[list[str]]:
    """``[variant, before, after, gained, lost, p]`` for each measure of likelihood."""
    if not records.exams:
        return []
    first, last = records.exams[0].accuracy, records.exams[-1].accuracy
    rows = []
    for variant in last:
        cells = [_interval(exam[variant]) for exam in (first, last) if variant in exam]
        change = comparison.get(variant, {})
        changes = [str(change[x]) for x in ("gained", "lost") if x in change]
        p_value = [f"{change['p_value']:.2g}"] if "p_value" in change else []
        rows.append([variant.replace("_", " "), *cells, *changes, *p_value])
    return rows


def _interval(ends: list[float]) -> str:
    value, low, high = ends
    return f"{value:.1%} [{low:.0%}, {high:.0%}]"
