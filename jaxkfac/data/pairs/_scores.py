"""How near generated texts are to those that were asked for."""

import importlib
from collections.abc import Sequence
from typing import Any


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
