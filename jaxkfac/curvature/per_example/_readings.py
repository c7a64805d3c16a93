"""Whether gradients of single examples exist: examples that meet, and readings left out."""

import itertools
from typing import Any

from jaxkfac._errors import CoupledExamplesError
from jaxkfac.curvature import covered_indices, uncovered_mask
from jaxkfac.factors import apart_remedy
from jaxkfac.interception import Layer, Traced


def refuse_meeting(names: str, met: str) -> None:
    """Refuse gradients of single examples if an example's output depends on other examples.

    Args:
        names: The layers, for the message.
        met: Where examples meet; empty if nowhere.

    Raises:
        CoupledExamplesError: with a remedy.
    """
    if not met:
        return
    if "without an example axis" in met:
        raise CoupledExamplesError(
            f"{names}: gradients of single examples are asked for, and {met}, as in a "
            "batched graph, whose nodes do not show their graph: give each example rows "
            "of its own, padded to the largest one (jax.vmap of the model over (N, nodes, "
            f"...)){apart_remedy(met)}"
        )
    raise CoupledExamplesError(
        f"{names}: gradients of single examples are asked for, and {met}. Where that is in "
        "batch statistics, use evaluation mode (Linen: use_running_average=True; NNX: "
        f"model.eval()){apart_remedy(met)}"
    )


def leaves_out_readings(traced: Traced, layers: tuple[Layer, ...]) -> bool:
    """Whether a parameter of the layers is also read outside of them."""
    paths = covered_indices(layers).keys()
    return any(
        name is None and view.path in paths
        for use in traced.analysis.plan.all_uses()
        if use.join is None  # a joint bias belongs to the layer of its product
        for view, name in itertools.zip_longest(use.view.members or (use.view,), use.layers)
    )


def check_readings(layers: tuple[Layer, ...], full_trace: Traced) -> None:
    """Refuse layers that leave out another reading of the same elements."""
    mine = covered_indices(layers)
    names = {layer.name for layer in layers}
    for layer in full_trace.table.layers:
        if layer.name in names:
            continue
        for path, indices in covered_indices([layer]).items():
            if path in mine and overlap(full_trace.shapes[path], mine[path], indices):
                raise ValueError(
                    f"layer {layer.name!r} reads the same elements of {path!r}, and is not among "
                    "the layers, so that the gradient would lack its part: choose it too, here "
                    f"and for the factors (layers={path!r} matches both of a weight), or neither"
                )


def overlap(shape: tuple[int, ...], some: set[Any], more: set[Any]) -> bool:
    """Whether slices of a parameter, given by their indices, have a common element."""
    return bool((~uncovered_mask(shape, some) & ~uncovered_mask(shape, more)).any())
