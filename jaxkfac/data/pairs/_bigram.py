"""The bigram model: what a target's loss is without its source and all but its last token."""

from collections.abc import Sequence

import numpy as np

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
