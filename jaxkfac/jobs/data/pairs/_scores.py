"""Scores of generated texts against their targets."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkfac._errors import installed_by

# ---------------- the bigram model
#
# A bigram model: the loss of a target without its source and with only the token before.


_STRENGTH = 4.0  # weight of the unigram, in tokens


def bigram_loss(
    train: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    *,
    vocabulary: int,
) -> float:
    r"""Mean negative log-likelihood of held-out tokens, each given the previous one.

    $p(j \mid i) = (n_{ij} + s\,q_j) / (n_i + s)$ with the counts $n$ of the training targets and
    $q_j = (n_j + 1) / (n + V)$. Each target starts with a separate start token.

    Args:
        train: Ids of each target to count, ``(T,)``.
        held_out: Ids of each target to evaluate, ``(T,)``.
        vocabulary: Number $V$ of tokens.

    Returns:
        Nats per token.

    Raises:
        ValueError: there is no held-out token, or ids are outside the vocabulary.

    Example:
        >>> bigram_loss([np.array([1, 2])] * 999, [np.array([1, 2])], vocabulary=3) < 0.01
        True
    """
    train_codes, held_out_codes = (_codes(targets, vocabulary) for targets in (train, held_out))
    if not len(held_out_codes):
        raise ValueError("held_out: expected at least one token")
    codes, counts = np.unique(train_codes, return_counts=True)
    before = np.bincount(train_codes // vocabulary, minlength=vocabulary + 1)
    unigram = np.bincount(train_codes % vocabulary, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    at = np.searchsorted(codes, held_out_codes)
    at = np.minimum(at, max(len(codes) - 1, 0))
    pairs = (
        np.where(codes[at] == held_out_codes, counts[at], 0)
        if len(codes)
        else np.zeros(len(held_out_codes))
    )
    first, second = held_out_codes // vocabulary, held_out_codes % vocabulary
    likelihood = (pairs + _STRENGTH * unigram[second]) / (before[first] + _STRENGTH)
    return float(-np.log(likelihood).mean())


def _codes(targets: Sequence[np.ndarray], vocabulary: int) -> np.ndarray:
    """A code for each pair of a token and the previous one; ``vocabulary`` is the start token."""
    ids = [np.asarray(target, np.int64) for target in targets]
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    if flat.size and not 0 <= flat.min() <= flat.max() < vocabulary:
        raise ValueError(f"ids run from {flat.min()} to {flat.max()}, not in [0, {vocabulary})")
    before = np.roll(flat, 1)
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    before[starts[starts < len(flat)]] = vocabulary  # an empty target starts where the next does
    return before * vocabulary + flat


# ---------------- scores of generated texts


def exact_match(answers: Sequence[str], targets: Sequence[str]) -> float:
    """The fraction of answers that equal the target, ignoring surrounding white space.

    Raises:
        ValueError: the numbers of answers and targets differ, or are 0.

    Example:
        >>> exact_match(["Rain.", " Snow."], ["Rain", "Snow."])
        0.5
    """
    _check(answers, targets)
    pairs = zip(answers, targets, strict=True)
    return sum(answer.strip() == target.strip() for answer, target in pairs) / len(targets)


def rouge_l(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Mean ROUGE-L (F-measure, with stemming) from the package ``rouge-score``.

    Raises:
        ModuleNotFoundError: the package is not installed; says how to install it.
        ValueError: the numbers of answers and targets differ, or are 0.

    References:
        C.-Y. Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004.
    """
    _check(answers, targets)
    scorer = rouge_package().RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(targets, answers, strict=True)
    return sum(scorer.score(*pair)["rougeL"].fmeasure for pair in pairs) / len(targets)


def rouge_package() -> Any:
    """The module ``rouge_score.rouge_scorer``, or an error that says how to install it."""
    with installed_by("rouge", needs="ROUGE-L needs rouge_score"):
        return importlib.import_module("rouge_score.rouge_scorer")


def _check(answers: Sequence[str], targets: Sequence[str]) -> None:
    if not targets or len(answers) != len(targets):
        raise ValueError(f"{len(answers)} answers and {len(targets)} targets: expected as many")
