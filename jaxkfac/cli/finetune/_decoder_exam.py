"""What a decoder is asked: multiple choice, and prompts to go on from."""

from typing import Any

import numpy as np

from jaxkfac.cli.finetune._exam import Examiner
from jaxkfac.data.choices import VARIANTS, compare, score_choices
from jaxkfac.data.text import Completion, Record, TokenBatch
from jaxkfac.models import generate
from jaxkfac.report import ExamRecord, SampleRecord

_SAMPLE_TOKENS = 12


class DecoderExaminer(Examiner):
    """Asks a decoder."""

    @property
    def context(self) -> int:
        """Most tokens that the model reads."""
        return self.problem.pretrained.config.longest

    def exam(self, step: int, adapters: Any) -> ExamRecord | None:
        """Validation loss and accuracies."""
        problem = self.problem
        if problem.validation is None and not problem.text.questions:
            return None

        def ask(batch: TokenBatch) -> np.ndarray:
            return self.log_likelihoods(adapters, batch)

        loss, accuracy, correct = self.loss(adapters), {}, {}
        if problem.text.questions:
            scores = score_choices(
                ask,
                problem.tokenizer,
                problem.text.questions,
                max_length=self.context,
                style=self.arguments.experiment.style,
                system=problem.text.system,
            )
            for variant in VARIANTS:
                found = scores.accuracy(variant)
                accuracy[variant] = [found.value, found.low, found.high]
                correct[variant] = scores.correct(variant).tolist()
        return ExamRecord(step, loss, accuracy, correct)

    def samples(self, step: int, adapters: Any, *, count: int) -> list[SampleRecord]:
        """Greedy answers to the first prompts: of the questions, or else of the records."""
        problem, tokens = self.problem, self.arguments.sample_tokens or _SAMPLE_TOKENS
        prompts = _prompts(problem, count, room=self.context - tokens)
        if not prompts:
            return []
        pretrained, called = problem.weights(adapters)
        answers = generate(pretrained, [ids for _, ids in prompts], max_new_tokens=tokens, **called)
        decode = problem.tokenizer.decode
        return [
            SampleRecord(step, words, decode(ids).strip())
            for (words, _), ids in zip(prompts, answers, strict=True)
        ]


def compare_exams(first: ExamRecord, last: ExamRecord) -> dict[str, Any]:
    """``{variant: {"gained", "lost", "p_value"}}`` of the same questions at two updates."""
    return {
        variant: compare(np.array(first.correct[variant]), np.array(right))._asdict()
        for variant, right in last.correct.items()
    }


def _prompts(problem: Any, count: int, *, room: int) -> list[tuple[str, list[int]]]:
    """``(words, ids)`` of prompts of at most ``room`` tokens."""
    text, tokenizer = problem.text, problem.tokenizer
    if text.questions:
        first = [{"role": "system", "content": text.system}] if text.system else []
        asked = [
            (q.stem, tokenizer.chat([*first, {"role": "user", "content": q.stem}]))
            for q in text.questions[:count]
        ]
    else:
        asked = [prompt for r in text.some(4 * count) if (prompt := _asked(r, tokenizer))]
    fitting = [(words, list(ids)) for words, ids in asked if len(ids) <= room]
    return fitting[:count]


def _asked(record: Record, tokenizer: Any) -> tuple[str, list[int]] | None:
    """A record up to the first answer; ``None`` for text without a prompt."""
    if isinstance(record, Completion):
        return (record.prompt, tokenizer.encode(record.prompt)) if record.prompt else None
    turns = [turn.to_plain() for turn in record.messages]
    first = next(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
    if not first:
        return None
    tools = {"tools": record.tools} if record.tools else {}
    return turns[first - 1]["content"], tokenizer.chat(turns[:first], **tools)
