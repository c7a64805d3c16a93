"""Which choice is the likeliest, by several measures of likelihood."""

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

# ---------------- intervals of accuracies, and whether two models differ on the same questions


class ProportionInterval(NamedTuple):
    """A part of some number of trials, and where the true part may lie.

    Attributes:
        value: The part that was seen, in [0, 1].
        low: Lower end.
        high: Upper end.
        count: Trials.
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


class Comparison(NamedTuple):
    """Two models on the same questions.

    Attributes:
        gained: Wrong before, right after.
        lost: Right before, wrong after.
        p_value: McNemar's exact test, two sides: how likely so uneven a split of the questions
            that changed is, if gains and losses are equally likely.
    """

    gained: int
    lost: int
    p_value: float


def wilson_interval(right: int, count: int, *, confidence: float = 0.95) -> ProportionInterval:
    """Wilson's score interval: it stays inside [0, 1], and holds for few trials too.

    Args:
        right: Trials that went well.
        count: All of them, at least 1.
        confidence: In (0, 1).

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
        before: Which questions one model answered rightly.
        after: Which the other one did, in the same order.

    Raises:
        ValueError: they are not of the same questions.

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


# ----------------


Variant = Literal["sum", "per_token", "per_byte", "pmi"]
LogLikelihoods = Callable[[TokenBatch], Float[np.ndarray | Array, "rows length"]]
_ROW = 128  # tokens: enough for several choices, little enough for a vocabulary of logits
VARIANTS: tuple[Variant, ...] = ("sum", "per_token", "per_byte", "pmi")


class ChoiceScores(NamedTuple):
    r"""Log-likelihoods of all choices of all questions.

    With $\ell$ the sum over the choice's tokens given the question: ``"sum"`` is $\ell$,
    ``"per_token"`` and ``"per_byte"`` divide it by the choice's tokens and UTF-8 bytes, and
    ``"pmi"`` is $\ell - \ell_0$, where $\ell_0$ is given the words ``Answer:`` alone (pointwise
    mutual information).

    Attributes:
        questions: What was asked.
        sums: $\ell$ of each choice, nats; an array for each question.
        bare: $\ell_0$ likewise.
        tokens: Of each choice.

    References:
        A. Holtzman et al., Surface Form Competition: Why the Highest Probability Answer Isn't
        Always Right, 2021.
    """

    questions: tuple[Question, ...]
    sums: tuple[Float[np.ndarray, " choices"], ...]
    bare: tuple[Float[np.ndarray, " choices"], ...]
    tokens: tuple[Int[np.ndarray, " choices"], ...]

    def of(self, variant: Variant) -> list[Float[np.ndarray, " choices"]]:
        """The scores that are compared; the largest wins."""
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
        """Whether the right choice scores highest; the first of equal ones counts."""
        scores = zip(self.of(variant), self.questions)
        return np.array([int(np.argmax(x)) == q.answer for x, q in scores])

    def accuracy(self, variant: Variant = "sum", *, confidence: float = 0.95) -> ProportionInterval:
        """The part that is right, with Wilson's interval."""
        right = self.correct(variant)
        return wilson_interval(int(right.sum()), len(right), confidence=confidence)


def target_log_likelihoods(
    logits: Float[Array, "rows length vocabulary"], targets: Int[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """The log-likelihood of each target, nats, float32 at least."""
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
    r"""Ask a model every question: the likelihood of each choice after the question.

    Args:
        log_likelihoods: The model: :func:`target_log_likelihoods` of a batch. A row holds
            several choices, which must not see each other (``batch.segments``). All batches
            have one shape.
        tokenizer: Of the model.
        questions: What is asked.
        max_length: The model's context, tokens.
        style: ``"chat"``: the stem is the user's turn and the choice the assistant's;
            ``"plain"``: ``stem\nAnswer: choice``.
        system: What the system says first, in a chat.
        batch_size: Rows at once, of 128 tokens or the longest question.

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
    flat = [example for each in chosen for example in each]
    found = _sums(log_likelihoods, [*flat, *bare.values()], batch_size, tokenizer.pad_id)
    alone = dict(zip(bare, found[len(flat) :], strict=True))
    ends = np.cumsum([len(q.choices) for q in questions])
    return ChoiceScores(
        questions=tuple(questions),
        sums=tuple(np.split(found[: len(flat)], ends[:-1])),
        bare=tuple(np.array([alone[c] for c in q.choices]) for q in questions),
        tokens=tuple(np.array([e.learnt.sum() for e in each]) for each in chosen),
    )


def _sums(
    log_likelihoods: LogLikelihoods, examples: Sequence[Example], batch_size: int, pad_id: int
) -> Float[np.ndarray, " examples"]:
    """The summed log-likelihood of each example's marked tokens."""
    lengths = [len(example.ids) - 1 for example in examples]
    capacity = -(-max(_ROW, *lengths) // 8) * 8
    rows = pack(lengths, capacity)
    rows += [[] for _ in range(-len(rows) % batch_size)]  # so that all batches have one shape
    sums = np.zeros(len(examples))
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        held = [[examples[i] for i in row] for row in chosen]
        batch = token_batch(held, length=capacity, pad_id=pad_id)
        found = np.where(batch.mask, np.asarray(log_likelihoods(batch), np.float64), 0.0)
        for row, indices in enumerate(chosen):
            for segment, index in enumerate(indices, start=1):
                sums[index] = found[row, batch.segments[row] == segment].sum()
    return sums
