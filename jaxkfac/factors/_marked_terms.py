"""The loss terms of a scalar loss that marks its outputs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from jaxkfac.factors._loss_terms import Head, LossTerms
from jaxkfac.interception import OutputMark


@dataclasses.dataclass(frozen=True)
class MarkedTerms(LossTerms):
    """What marks say of their outputs; trees are lists with an entry for each mark.

    Attributes:
        marks: The marks.
        weights: Weights that are arrays, by mark.
        masks: Masks, by mark.
        meeting: By mark, where its terms depend on rows of several examples, in words.
    """

    marks: Sequence[OutputMark]
    weights: Mapping[int, Any]
    masks: Mapping[int, Any]
    meeting: Callable[[int], str] = lambda mark: ""

    def heads(self, outputs: PyTree, targets: PyTree = None, mask: PyTree = None) -> list[Head]:
        """The mask is the marks' own, whatever is given."""
        return [
            Head(
                one.likelihood,
                x,
                None if targets is None else targets[k],
                self.masks.get(k),
                self.weights[k] if one.weight is None else one.weight,
                f"jk.mark_outputs: mark {k}",
                functools.partial(self.meeting, k),
            )
            for k, (one, x) in enumerate(zip(self.marks, outputs, strict=True))
        ]

    def tree(self, parts: Sequence[Any]) -> PyTree:
        return list(parts)
