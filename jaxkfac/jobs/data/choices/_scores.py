"""The most likely choice, by several measures of likelihood."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._errors import one_of
from jaxkfac.jobs.data.choices._questions import (
    PromptStyle,
    Question,
    bare_examples,
    choice_examples,
)
from jaxkfac.jobs.data.text._encode import Example, TokenizerLike
from jaxkfac.jobs.data.text._rows import TokenBatch, pack, token_batch

# ---------------- intervals of accuracies, and tests of two models on the same questions


class ProportionInterval(NamedTuple):
    """An observed proportion of trials, with a confidence interval.

    Attributes:
        value: The observed proportion, in [0, 1].
        low: Lower end of the interval.
        high: Upper end of the interval.
        count: Number of trials.
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


class Comparison(NamedTuple):
    """Comparison of two models on the same questions.

    Attributes:
        gained: Number of questions that only the second model answers correctly.
        lost: Number of questions that only the first model answers correctly.
        p_value: McNemar's exact two-sided test: the probability of a split of the changed
            questions at least as uneven, if gains and losses are equally likely.
    """

    gained: int
    lost: int
    p_value: float


def wilson_interval(right: int, count: int, *, confidence: float = 0.95) -> ProportionInterval:
    """Wilson's score interval, which stays inside [0, 1] and is valid for few trials.

    Args:
        right: Number of successful trials.
        count: Number of trials, at least 1.
        confidence: Confidence level, in (0, 1).

    Raises:
        ValueError: ``right`` is not in ``0 .. count``.

    Example:
        >>> print(wilson_interval(8, 10))
        80.0% [49.0%, 94.3%]

    References:
        E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    from scipy.stats import binomtest

    if not 0 <= right <= count or count < 1:
        raise ValueError(f"expected 0 <= right <= count and a trial, got {right} of {count}")
    ends = binomtest(right, count).proportion_ci(confidence, method="wilson")
    return ProportionInterval(right / count, float(ends.low), float(ends.high), count)


def compare(
    before: Bool[np.ndarray, " questions"], after: Bool[np.ndarray, " questions"]
) -> Comparison:
    """McNemar's exact test on paired answers.

    Args:
        before: For each question, whether the first model is correct.
        after: The same for the second model, in the same order.

    Raises:
        ValueError: the arrays have different lengths.

    Example:
        >>> compare(np.array([True, False, False]), np.array([True, True, True]))
        Comparison(gained=2, lost=0, p_value=0.5)

    References:
        Q. McNemar, Note on the sampling error of the difference between correlated proportions
        or percentages, 1947.
    """
    from scipy.stats import binomtest

    if before.shape != after.shape:
        raise ValueError(f"expected the same questions, got {len(before)} and {len(after)} answers")
    gained, lost = int((~before & after).sum()), int((before & ~after).sum())
    changed = gained + lost
    p_value = float(binomtest(gained, changed).pvalue) if changed else 1.0
    return Comparison(gained, lost, p_value)


# ---------------- likelihoods of the choices


Variant = Literal["sum", "per_token", "per_byte", "pmi"]
LogLikelihoods = Callable[[TokenBatch], Float[np.ndarray | Array, "rows length"]]
_ROW = 128  # tokens: fits several choices, and limits the memory of logits
VARIANTS: tuple[Variant, ...] = ("sum", "per_token", "per_byte", "pmi")


class ChoiceScores(NamedTuple):
    r"""Log-likelihoods of all choices of all questions.

    With $\ell$ the sum over the tokens of the choice given the question: ``"sum"`` is $\ell$,
    ``"per_token"`` and ``"per_byte"`` divide it by the choice's tokens and UTF-8 bytes, and
    ``"pmi"`` is $\ell - \ell_0$, where $\ell_0$ is given only the words ``Answer:`` (pointwise
    mutual information).

    Attributes:
        questions: The questions.
        sums: $\ell$ of each choice in nats; an array for each question.
        bare: $\ell_0$ of each choice, in the same form.
        tokens: Number of tokens of each choice.

    References:
        A. Holtzman et al., Surface Form Competition: Why the Highest Probability Answer Isn't
        Always Right, 2021.
    """

    questions: tuple[Question, ...]
    sums: tuple[Float[np.ndarray, " choices"], ...]
    bare: tuple[Float[np.ndarray, " choices"], ...]
    tokens: tuple[Int[np.ndarray, " choices"], ...]

    def of(self, variant: Variant) -> list[Float[np.ndarray, " choices"]]:
        """The scores to compare; the largest wins."""
        one_of("variant", variant, VARIANTS)
        if variant == "pmi":
            return [x - y for x, y in zip(self.sums, self.bare)]
        if variant == "per_token":
            return [x / n for x, n in zip(self.sums, self.tokens)]
        if variant == "per_byte":
            sizes = [np.array([len(c.encode()) for c in q.choices]) for q in self.questions]
            return [x / n for x, n in zip(self.sums, sizes)]
        return list(self.sums)

    def correct(self, variant: Variant = "sum") -> Bool[np.ndarray, " questions"]:
        """Whether the correct choice has the highest score; the first one wins a tie."""
        scores = zip(self.of(variant), self.questions)
        return np.array([int(np.argmax(x)) == q.answer for x, q in scores])

    def accuracy(self, variant: Variant = "sum", *, confidence: float = 0.95) -> ProportionInterval:
        """The fraction of correct answers, with Wilson's interval."""
        right = self.correct(variant)
        return wilson_interval(int(right.sum()), len(right), confidence=confidence)


def target_log_likelihoods(
    logits: Float[Array, "rows length vocabulary"], targets: Int[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """The log-likelihood of each target in nats, in float32 or wider."""
    wide = logits if logits.dtype.itemsize >= 4 else logits.astype(jnp.float32)
    picked = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(wide, axis=-1)


def score_choices(
    log_likelihoods: LogLikelihoods,
    tokenizer: TokenizerLike,
    questions: Sequence[Question],
    *,
    max_length: int,
    style: PromptStyle = "chat",
    system: str = "",
    batch_size: int = 8,
) -> ChoiceScores:
    r"""Score the choices of all questions by their likelihood after the question.

    Args:
        log_likelihoods: The model: :func:`target_log_likelihoods` of a batch. A row contains
            several choices, which must not attend to each other (``batch.segments``). All batches
            have the same shape.
        tokenizer: Tokenizer of the model.
        questions: The questions.
        max_length: Context of the model in tokens.
        style: ``"chat"``: the stem is the user's turn and the choice the assistant's;
            ``"plain"``: ``stem\nAnswer: choice``.
        system: System message of a chat.
        batch_size: Number of rows at once, of 128 tokens or the longest question.

    Returns:
        The scores, on the host.

    Raises:
        ValueError: there are no questions, or one is longer than ``max_length``.
    """
    if not questions:
        raise ValueError("there are no questions to score")
    options: dict[str, Any] = {"style": style, "system": system}
    chosen = choice_examples(questions, tokenizer, max_length=max_length, **options)
    bare = bare_examples(questions, tokenizer, **options)
    flat = [example for of_question in chosen for example in of_question]
    sums = _sums(log_likelihoods, [*flat, *bare.values()], batch_size, tokenizer.pad_id)
    bare_sums = dict(zip(bare, sums[len(flat) :], strict=True))
    ends = np.cumsum([len(q.choices) for q in questions])
    return ChoiceScores(
        questions=tuple(questions),
        sums=tuple(np.split(sums[: len(flat)], ends[:-1])),
        bare=tuple(np.array([bare_sums[c] for c in q.choices]) for q in questions),
        tokens=tuple(np.array([e.learnt.sum() for e in of_question]) for of_question in chosen),
    )


def _sums(
    log_likelihoods: LogLikelihoods, examples: Sequence[Example], batch_size: int, pad_id: int
) -> Float[np.ndarray, " examples"]:
    """The summed log-likelihood of the marked tokens of each example."""
    lengths = [len(example.ids) - 1 for example in examples]
    capacity = -(-max(_ROW, *lengths) // 8) * 8
    rows = pack(lengths, capacity)
    rows += [[] for _ in range(-len(rows) % batch_size)]  # so that all batches have one shape
    sums = np.zeros(len(examples))
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        batch_rows = [[examples[i] for i in row] for row in chosen]
        batch = token_batch(batch_rows, length=capacity, pad_id=pad_id)
        log_probs = np.where(batch.mask, np.asarray(log_likelihoods(batch), np.float64), 0.0)
        for row, indices in enumerate(chosen):
            for segment, index in enumerate(indices, start=1):
                sums[index] = log_probs[row, batch.segments[row] == segment].sum()
    return sums
