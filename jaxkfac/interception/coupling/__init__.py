"""Do the examples of a batch meet?

What relies on examples being apart is wrong without a word where they are not: one backward pass
for all examples mixes them, and an example that runs alone has another output. So whoever relies on
it asks, by the name of the question that matters to it (``Answers``), and what is not proved is
not no.

The program is followed from its inputs to its outputs (``_follow``), every entry of every value
with the label of the one example that it depends on (``_labels``). Primitives have rules
(``_first_order``, ``_indexing``), and so have loops (``_loops``) and calls (``_calls``). Integers
that are known when the program is traced say what an index picks (``_known``).
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
