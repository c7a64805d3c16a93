"""Multiple choice by likelihood, in the file format of OpenBookQA."""

from jaxkfac.jobs.data.choices._questions import (
    PromptStyle,
    Question,
    question_prompt,
    read_questions,
)
from jaxkfac.jobs.data.choices._scores import (
    VARIANTS,
    ChoiceScores,
    Comparison,
    ProportionInterval,
    Variant,
    compare,
    score_choices,
    target_log_likelihoods,
)

Interval = ProportionInterval  # its name in version 0.1

__all__ = [
    "VARIANTS",
    "ChoiceScores",
    "Comparison",
    "Interval",
    "PromptStyle",
    "ProportionInterval",
    "Question",
    "Variant",
    "compare",
    "question_prompt",
    "read_questions",
    "score_choices",
    "target_log_likelihoods",
]
