"""Examinations: validation loss, multiple choice, samples, and the adapter's nonlinearity."""

import functools
from typing import Any

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import FinetuneProblem, as_batch
from jaxkfac.data.choices import VARIANTS, compare, score_choices, target_log_likelihoods
from jaxkfac.data.text import Chat, Completion, Record, TokenBatch
from jaxkfac.models import generate
from jaxkfac.report import ExamRecord, FourierRecord, SampleRecord


class Examiner:
    """Asks the adapted model the same things at several updates; its programs are compiled once.

    Attributes:
        problem: What is trained.
    """

    def __init__(self, problem: FinetuneProblem, experiment: Finetuning) -> None:
        self.problem, self._experiment = problem, experiment
        has_fourier = experiment.adapter.fourier_placement != "none"
        self._probe = None
        if has_fourier:
            self._probe = problem.devices.whole(as_batch(problem.train.at(0))[0])

        devices = problem.devices
        compiled = functools.partial(jax.jit, **devices.of_program())

        @compiled
        def each_token(params: Any, adapters: Any, batch: Any) -> jax.Array:
            inputs, targets, _ = batch
            return target_log_likelihoods(problem.adapted(params, adapters, inputs), targets)

        @compiled
        def nonlinearity(params: Any, adapters: Any, inputs: Any) -> Any:
            return jk.lslora.diagnose(adapters, problem.adapted, params, inputs)

        self._each_token, self._nonlinearity = each_token, nonlinearity

    def exam(self, step: int, adapters: Any) -> ExamRecord | None:
        """Validation loss and accuracies, or ``None`` if there is nothing to ask."""
        problem = self.problem
        if problem.validation is None and not problem.text.questions:
            return None

        def ask(batch: TokenBatch) -> np.ndarray:
            given = problem.devices.whole(as_batch(batch))
            return np.asarray(self._each_token(problem.params, adapters, given))

        loss, accuracy, correct = None, {}, {}
        if problem.validation is not None:
            batches = list(problem.validation.in_order())
            total = sum(float(ask(x)[x.mask].sum(dtype=np.float64)) for x in batches)
            loss = -total / sum(batch.num_terms for batch in batches)
        if problem.text.questions:
            scores = score_choices(
                ask,
                problem.tokenizer,
                problem.text.questions,
                max_length=problem.context,
                style=self._experiment.style,
                system=problem.text.system,
            )
            for variant in VARIANTS:
                found = scores.accuracy(variant)
                accuracy[variant] = [found.value, found.low, found.high]
                correct[variant] = scores.correct(variant).tolist()
        return ExamRecord(step, loss, accuracy, correct)

    def nonlinearity(self, adapters: Any) -> Any:
        """Numbers of every slice's nonlinearity, on the device, or ``None`` for plain LoRA."""
        if self._probe is None:
            return None
        settled = self.problem.devices.processes.settled
        return settled(self._nonlinearity(self.problem.params, adapters, self._probe))

    def samples(self, step: int, adapters: Any, *, count: int, tokens: int) -> list[SampleRecord]:
        """Greedy answers to the first prompts: of the questions, or else of the records."""
        problem = self.problem
        prompts = _prompts(problem, count, room=problem.context - tokens)
        if not prompts:
            return []
        answers = generate(
            problem.pretrained,
            [ids for _, ids in prompts],
            max_new_tokens=tokens,
            adapted=problem.adapted,
            adapters=adapters,
        )
        decode = problem.tokenizer.decode
        return [
            SampleRecord(step, words, decode(ids).strip())
            for (words, _), ids in zip(prompts, answers, strict=True)
        ]


def fourier_record(step: int, found: Any) -> FourierRecord:
    """The record of what :meth:`Examiner.nonlinearity` has found, once it is on the host."""
    layers = {}
    for name, diagnosis in found.items():
        values = diagnosis._asdict()
        coefficients = np.asarray(values.pop("coefficients"))
        slices = coefficients.reshape(-1, coefficients.shape[-1])
        layers[name] = {"coefficients": slices.tolist()} | {
            key: np.asarray(x).reshape(-1).tolist() for key, x in values.items()
        }
    return FourierRecord(step, layers)


def compare_exams(first: ExamRecord, last: ExamRecord) -> dict[str, Any]:
    """``{variant: {"gained", "lost", "p_value"}}`` of the same questions at two updates."""
    return {
        variant: compare(np.array(first.correct[variant]), np.array(right))._asdict()
        for variant, right in last.correct.items()
    }


def _prompts(problem: FinetuneProblem, count: int, *, room: int) -> list[tuple[str, list[int]]]:
    """``(words, ids)`` of prompts of at most ``room`` tokens."""
    text, tokenizer = problem.text, problem.tokenizer
    if text.questions:
        first = [{"role": "system", "content": text.system}] if text.system else []
        asked = [
            (q.stem, tokenizer.chat([*first, {"role": "user", "content": q.stem}]))
            for q in text.questions[:count]
        ]
    else:
        records = [*text.validation, *text.train]
        asked = [prompt for r in records[: 4 * count] if (prompt := _asked(r, tokenizer))]
    fitting = [(words, list(ids)) for words, ids in asked if len(ids) <= room]
    return fitting[:count]


def _asked(record: Record, tokenizer: Any) -> tuple[str, list[int]] | None:
    """A record up to the first answer; ``None`` for text without a prompt."""
    if isinstance(record, Completion):
        return (record.prompt, tokenizer.encode(record.prompt)) if record.prompt else None
    turns = as_turns(record)
    first = next(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
    if not first:
        return None
    return turns[first - 1]["content"], tokenizer.chat(turns[:first])


def as_turns(record: Chat) -> list[dict[str, str]]:
    """Turns as the dictionaries that chat templates read."""
    return [turn._asdict() for turn in record.messages]
