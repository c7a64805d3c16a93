"""The layer table as plain rows."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class CoverageRow(NamedTuple):
    """One layer of the table, or one parameter that no layer covers.

    Attributes:
        name: Layer name, or parameter path.
        kind: As in ``Layer.kind``, or ``"uncovered"``.
        inputs: Size of the input factor without the ones column; ``None`` if uncovered.
        outputs: Size of the output factor; ``None`` if uncovered.
        stack: Shape of the stacked axes.
        shares_input_with: Layer that stores the input factor, if another one.
        parameters: How many numbers the layer covers.
        share: Of all parameters, in [0, 1].
        reason: Why it is not covered; empty for a layer.
    """

    name: str
    kind: str
    inputs: int | None
    outputs: int | None
    stack: tuple[int, ...]
    shares_input_with: str | None
    parameters: int
    share: float
    reason: str = ""


def coverage_rows(layers: Any, sizes: Mapping[str, int]) -> list[CoverageRow]:
    """Rows of a layer table.

    Args:
        layers: What ``jk.find_layers`` returns.
        sizes: ``{parameter path: number of elements}`` of the whole model.

    Returns:
        The layers in their own order, then what is not covered.
    """
    total = sum(sizes.values())
    rows = [
        CoverageRow(
            name=layer.name,
            kind=layer.kind,
            inputs=layer.in_features,
            outputs=layer.out_features,
            stack=layer.stack,
            shares_input_with=layer.shares_input_with,
            parameters=layer.num_parameters,
            share=layer.num_parameters / total,
        )
        for layer in (layers[name] for name in layers)
    ]
    for path, reason in layers.uncovered:
        size = sizes.get(path, 0)
        rows.append(
            CoverageRow(path, "uncovered", None, None, (), None, size, size / total, reason)
        )
    return rows


def stack_text(stack: tuple[int, ...]) -> str:
    """``2 x 3`` for a stack of shape (2, 3), nothing for none."""
    return " × ".join(map(str, stack)) if math.prod(stack) != 1 or stack else ""
