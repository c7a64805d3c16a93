"""Evaluations: validation loss, questions or generated targets, and the nonlinearity."""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac._text import prompt_ids
from jaxkfac.jobs.data.choices import (
    VARIANTS,
    PromptStyle,
    compare,
    question_prompt,
    score_choices,
    target_log_likelihoods,
)
from jaxkfac.jobs.data.pairs import Pair, exact_match, rouge_l
from jaxkfac.jobs.data.text import Completion, Record, TokenBatch
from jaxkfac.jobs.models import generate, generate_targets
from jaxkfac.jobs.report import ExamRecord, FourierRecord, SampleRecord


class Examiner(abc.ABC):
    """Evaluates the model in the same way at several updates; compiles its programs once.

    Attributes:
        problem: The problem that is trained.
        arguments: Arguments of the command.
    """

    def __init__(self, problem: Any, arguments: Any) -> None:
        self.problem, self.arguments = problem, arguments
        config, self._probe = problem.config, None
        if config is not None and config.fourier_placement != "none":
            first = problem.family.batch(problem.train.first())
            self._probe = problem.devices.replicated(first[0])

        devices = problem.devices
        compiled = functools.partial(jax.jit, **devices.of_program())

        @compiled
        def each_token(params: ArrayTree, adapters: ArrayTree, batch: ArrayTree) -> jax.Array:
            inputs, targets, _ = batch
            return target_log_likelihoods(problem.adapted(params, adapters, inputs), targets)

        @compiled
        def nonlinearity(params: ArrayTree, adapters: ArrayTree, inputs: ArrayTree) -> Any:
            return jk.lslora.diagnose(adapters, problem.adapted, params, inputs)

        self._each_token, self._nonlinearity = each_token, nonlinearity

    @abc.abstractmethod
    def exam(self, step: int, adapters: ArrayTree) -> ExamRecord | None:
        """Measure loss and answers; ``None`` if there is nothing to evaluate."""

    @abc.abstractmethod
    def samples(self, step: int, adapters: ArrayTree, *, count: int) -> list[SampleRecord]:
        """Answers to the first prompts that fit the context."""

    def nonlinearity(self, adapters: ArrayTree) -> Any:
        """Measurements of every slice's nonlinearity, on the device; ``None`` for plain LoRA."""
        if self._probe is None:
            return None
        settled = self.problem.devices.processes.settled
        return settled(self._nonlinearity(self.problem.params, adapters, self._probe))

    def log_likelihoods(self, adapters: ArrayTree, batch: Any) -> np.ndarray:
        """Log-likelihoods of every target of a batch, on the host."""
        arrays = self.problem.devices.replicated(self.problem.family.batch(batch))
        return np.asarray(self._each_token(self.problem.params, adapters, arrays))

    def loss(self, adapters: ArrayTree) -> float | None:
        """Mean loss over the learned tokens of the validation text, nats."""
        if self.problem.validation is None:
            return None
        batches = list(self.problem.validation.in_order())
        sums = (self.log_likelihoods(adapters, x)[x.mask].sum(dtype=np.float64) for x in batches)
        return -sum(map(float, sums)) / sum(batch.num_terms for batch in batches)


def fourier_record(step: int, diagnoses: Any) -> FourierRecord:
    """The record of a result of :meth:`Examiner.nonlinearity` that is on the host."""
    layers = {}
    for name, diagnosis in diagnoses.items():
        values = diagnosis._asdict()
        coefficients = np.asarray(values.pop("coefficients"))
        slices = coefficients.reshape(-1, coefficients.shape[-1])
        layers[name] = {"coefficients": slices.tolist()} | {
            key: np.asarray(x).reshape(-1).tolist() for key, x in values.items()
        }
    return FourierRecord(step, layers)


# ---------------- evaluation of an encoder-decoder: generated targets


class PairExaminer(Examiner):
    """Evaluates an encoder-decoder."""

    def exam(self, step: int, adapters: ArrayTree) -> ExamRecord | None:
        """Validation loss, and scores of the targets generated for the first pairs."""
        if self.problem.validation is None:
            return None
        pairs, scores = self.problem.text.validation[: self.arguments.generate], None
        if pairs:
            answers, targets = self._answers(adapters, pairs), [pair.target for pair in pairs]
            scores = {"exact match": exact_match(answers, targets)}
            if self.arguments.rouge:
                scores["ROUGE-L"] = rouge_l(answers, targets)
        return ExamRecord(step, self.loss(adapters), {}, {}, scores)

    def samples(self, step: int, adapters: ArrayTree, *, count: int) -> list[SampleRecord]:
        """Generated targets of the first distinct sources, of the validation pairs if any."""
        text, first = self.problem.text, dict[str, Pair]()
        for one_pair in text.validation or text.train:
            if len(first) == count:
                break
            first.setdefault(one_pair.source, one_pair)
        pairs = list(first.values())
        answers = zip(pairs, self._answers(adapters, pairs), strict=True)
        return [
            SampleRecord(step, one_pair.source, answer, one_pair.target)
            for one_pair, answer in answers
        ]

    def _answers(self, adapters: ArrayTree, pairs: Sequence[Pair]) -> list[str]:
        """Generate targets, with as many sources at a time as a batch has rows."""
        arguments, problem = self.arguments, self.problem
        experiment, tokenizer = arguments.experiment, problem.tokenizer
        pretrained, called = problem.weights(adapters)
        encoded = problem.family.sources(experiment, tokenizer, pairs)
        size, answers = min(experiment.batch_size, len(encoded)), []
        for start in range(0, len(encoded), size):
            sources = encoded[start : start + size]
            generated = generate_targets(
                pretrained,
                sources + sources[:1] * (size - len(sources)),  # one shape, so one program
                max_new_tokens=arguments.sample_tokens or experiment.max_target_length,
                num_beams=arguments.num_beams,
                **called,
            )
            answers += [tokenizer.decode(ids).strip() for ids in generated[: len(sources)]]
        return answers


# ---------------- evaluation of a decoder: multiple choice and sample answers


_SAMPLE_TOKENS = 12


class DecoderExaminer(Examiner):
    """Evaluates a decoder."""

    @property
    def context(self) -> int:
        """Largest number of tokens that the model reads."""
        return self.problem.pretrained.config.longest

    def exam(self, step: int, adapters: ArrayTree) -> ExamRecord | None:
        """Validation loss, and accuracy of the multiple-choice questions."""
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
                accuracy_interval = scores.accuracy(variant)
                accuracy[variant] = [
                    accuracy_interval.value,
                    accuracy_interval.low,
                    accuracy_interval.high,
                ]
                correct[variant] = scores.correct(variant).tolist()
        return ExamRecord(step, loss, accuracy, correct)

    def samples(self, step: int, adapters: ArrayTree, *, count: int) -> list[SampleRecord]:
        """Greedy answers to the first prompts: questions if there are any, else records."""
        problem, tokens = self.problem, self.arguments.sample_tokens or _SAMPLE_TOKENS
        style = self.arguments.experiment.style
        prompts = _prompts(problem, count, style=style, room=self.context - tokens)
        if not prompts:
            return []
        pretrained, called = problem.weights(adapters)
        answers = generate(pretrained, [ids for _, ids in prompts], max_new_tokens=tokens, **called)
        decode = problem.tokenizer.decode
        return [
            SampleRecord(step, prompt, decode(ids).strip())
            for (prompt, _), ids in zip(prompts, answers, strict=True)
        ]


def compare_exams(first: ExamRecord, last: ExamRecord) -> dict[str, Any]:
    """``{variant: {"gained", "lost", "p_value"}}``, comparing two updates question by question."""
    return {
        variant: compare(np.array(first.correct[variant]), np.array(right))._asdict()
        for variant, right in last.correct.items()
    }


def _prompts(
    problem: Any, count: int, *, style: PromptStyle, room: int
) -> list[tuple[str, list[int]]]:
    """``(text, ids)`` of prompts of at most ``room`` tokens."""
    text, tokenizer = problem.text, problem.tokenizer
    if text.questions:
        candidates = [
            (q.stem, question_prompt(q.stem, tokenizer, style=style, system=text.system))
            for q in text.questions[:count]
        ]
    else:
        candidates = [prompt for r in text.some(4 * count) if (prompt := _prompt_of(r, tokenizer))]
    fitting = [(prompt, list(ids)) for prompt, ids in candidates if len(ids) <= room]
    return fitting[:count]


def _prompt_of(record: Record, tokenizer: Any) -> tuple[str, list[int]] | None:
    """A record up to its first answer; ``None`` for text without a prompt."""
    if isinstance(record, Completion):
        return (record.prompt, prompt_ids(tokenizer, record.prompt)) if record.prompt else None
    turns = [turn.to_plain() for turn in record.messages]
    first = next(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
    if not first:
        return None
    tools = {"tools": record.tools} if record.tools else {}
    return turns[first - 1]["content"], tokenizer.chat(turns[:first], **tools)
