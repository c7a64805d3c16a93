"""How near generated texts are to those that were asked for."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# ---------------- the bigram model: what a target's loss is without its source and all but its
# last token


_STRENGTH = 4.0  # tokens that the unigram counts for beside those seen after a token


def bigram_loss(
    train: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    *,
    vocabulary: int,
) -> float:
    r"""Mean negative log-likelihood of held-out tokens, each given the one before it.

    $p(j \mid i) = (n_{ij} + s\,q_j) / (n_i + s)$ with the counts $n$ of the training targets and
    $q_j = (n_j + 1) / (n + V)$. Each target begins with a start of its own.

    Args:
        train: Ids of each target that is counted, ``(T,)``.
        held_out: Ids of each target that is measured, likewise.
        vocabulary: Number $V$ of tokens.

    Returns:
        Nats per token.

    Raises:
        ValueError: there is no held-out token, or ids are beyond the vocabulary.

    Example:
        >>> bigram_loss([np.array([1, 2])] * 999, [np.array([1, 2])], vocabulary=3) < 0.01
        True
    """
    seen, asked = (_codes(targets, vocabulary) for targets in (train, held_out))
    if not len(asked):
        raise ValueError("held_out: expected at least one token")
    codes, counts = np.unique(seen, return_counts=True)
    before = np.bincount(seen // vocabulary, minlength=vocabulary + 1)
    unigram = np.bincount(seen % vocabulary, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    at = np.searchsorted(codes, asked)
    at = np.minimum(at, max(len(codes) - 1, 0))
    pairs = np.where(codes[at] == asked, counts[at], 0) if len(codes) else np.zeros(len(asked))
    first, second = asked // vocabulary, asked % vocabulary
    likelihood = (pairs + _STRENGTH * unigram[second]) / (before[first] + _STRENGTH)
    return float(-np.log(likelihood).mean())


def _codes(targets: Sequence[np.ndarray], vocabulary: int) -> np.ndarray:
    """One number for each token and the one before it; ``vocabulary`` is the start."""
    ids = [np.asarray(target, np.int64) for target in targets]
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    if flat.size and not 0 <= flat.min() <= flat.max() < vocabulary:
        raise ValueError(f"ids run from {flat.min()} to {flat.max()}, not in [0, {vocabulary})")
    before = np.roll(flat, 1)
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    before[starts[starts < len(flat)]] = vocabulary  # an empty target begins where the next does
    return before * vocabulary + flat


# ----------------


def exact_match(answers: Sequence[str], targets: Sequence[str]) -> float:
    """The share of answers that are the target, but for space around it.

    Raises:
        ValueError: there are not as many answers as targets, or none.

    Example:
        >>> exact_match(["Rain.", " Snow."], ["Rain", "Snow."])
        0.5
    """
    _check(answers, targets)
    pairs = zip(answers, targets, strict=True)
    return sum(answer.strip() == target.strip() for answer, target in pairs) / len(targets)


def rouge_l(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Mean ROUGE-L (F-measure, stems of words) by the package ``rouge-score``.

    Raises:
        ModuleNotFoundError: the package is not installed; how to install it is said.
        ValueError: there are not as many answers as targets, or none.

    References:
        C.-Y. Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004.
    """
    _check(answers, targets)
    scorer = rouge_package().RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(targets, answers, strict=True)
    return sum(scorer.score(*pair)["rougeL"].fmeasure for pair in pairs) / len(targets)


def rouge_package() -> Any:
    """The module ``rouge_score.rouge_scorer``, or how to get it."""
    try:
        return importlib.import_module("rouge_score.rouge_scorer")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'ROUGE-L needs {error.name}: pip install "jaxkfac[rouge]"', name=error.name
        ) from None


def _check(answers: Sequence[str], targets: Sequence[str]) -> None:
    if not targets or len(answers) != len(targets):
        raise ValueError(f"{len(answers)} answers and {len(targets)} targets: expected as many")
