"""What an encoder-decoder is asked: the targets of pairs."""

from collections.abc import Sequence
from typing import Any

from jaxkfac.cli.finetune._exam import Examiner
from jaxkfac.data.pairs import Pair, exact_match, rouge_l
from jaxkfac.models import generate_targets
from jaxkfac.report import ExamRecord, SampleRecord


class PairExaminer(Examiner):
    """Asks an encoder-decoder."""

    def exam(self, step: int, adapters: Any) -> ExamRecord | None:
        """Validation loss, and how near generated targets are to those of the first pairs."""
        if self.problem.validation is None:
            return None
        asked, scores = self.problem.text.validation[: self.arguments.generate], None
        if asked:
            answers, targets = self._answers(adapters, asked), [pair.target for pair in asked]
            scores = {"exact match": exact_match(answers, targets)}
            if self.arguments.rouge:
                scores["ROUGE-L"] = rouge_l(answers, targets)
        return ExamRecord(step, self.loss(adapters), {}, {}, scores)

    def samples(self, step: int, adapters: Any, *, count: int) -> list[SampleRecord]:
        """Targets of the first sources, of those to validate with where there are any."""
        text, first = self.problem.text, dict[str, Pair]()
        for pair in text.validation or text.train:
            if len(first) == count:
                break
            first.setdefault(pair.source, pair)
        asked = list(first.values())
        answers = zip(asked, self._answers(adapters, asked), strict=True)
        return [SampleRecord(step, pair.source, answer, pair.target) for pair, answer in answers]

    def _answers(self, adapters: Any, pairs: Sequence[Pair]) -> list[str]:
        """The targets that the model gives, as many sources at a time as a batch has rows."""
        arguments, problem = self.arguments, self.problem
        experiment, tokenizer = arguments.experiment, problem.tokenizer
        pretrained, called = problem.weights(adapters)
        encoded = problem.family.sources(experiment, tokenizer, pairs)
        size, answers = min(experiment.batch_size, len(encoded)), []
        for start in range(0, len(encoded), size):
            sources = encoded[start : start + size]
            found = generate_targets(
                pretrained,
                sources + sources[:1] * (size - len(sources)),  # one program for all of them
                max_new_tokens=arguments.sample_tokens or experiment.max_target_length,
                num_beams=arguments.num_beams,
                **called,
            )
            answers += [tokenizer.decode(ids).strip() for ids in found[: len(sources)]]
        return answers
