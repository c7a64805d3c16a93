"""Do the examples of a batch meet?

Code that relies on independent examples silently computes wrong results if they are not: one
backward pass for all examples mixes them, and an example that runs alone has another output. Such
code therefore asks first, and names the question that matters to it (``Answers``). An answer that
is not proved is not no.

The program is followed from its inputs to its outputs (``_follow``). Every entry of every value has
as its label the one example that it depends on (``_labels``). There are rules for primitives
(``_first_order``, ``_indexing``), loops (``_loops``) and calls (``_calls``). Integers known when
the program is traced determine what an index picks (``_labels``).
"""

from jaxkfac.interception.coupling._answers import (
    NO,
    Answer,
    Answers,
    Word,
    answers,
    label_inputs,
    leading_labels,
)
from jaxkfac.interception.coupling._values import Question

__all__ = [
    "NO",
    "Answer",
    "Answers",
    "Question",
    "Word",
    "answers",
    "label_inputs",
    "leading_labels",
]
