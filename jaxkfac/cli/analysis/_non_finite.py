"""Where in a model numbers stop being finite."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.cli.analysis._parts import Part
from jaxkfac.cli.analysis._program import AnalyzedModel
from jaxkfac.interception import Layer, leaves_by_path


def raise_non_finite(
    analysis: AnalyzedModel, params: Any, batch: Any, exist: Any, bad: Part, texts: Sequence[int]
) -> NoReturn:
    """Name the first layer whose inputs are not finite, or else the part that is not.

    Raises:
        NonFiniteFactorError: always.
    """
    where = f"texts {texts[0] + 1} to {texts[-1] + 1}"
    for path, leaf in leaves_by_path(params).items():
        if not bool(jnp.isfinite(leaf).all()):
            count = int((~jnp.isfinite(leaf)).sum())
            raise NonFiniteFactorError(
                f"{count} weights of {path} are not finite: the checkpoint is damaged, or "
                f"{leaf.dtype} is too narrow for it"
            )
    dtype = jax.tree.leaves(params)[0].dtype
    remedy = "" if dtype == jnp.float32 else "; --dtype float32 reaches further"
    found = _first_inputs(analysis, params, batch, exist)
    if found is None:
        raise NonFiniteFactorError(
            f"{bad} is not finite over {where}, though the inputs of every layer are: the loss "
            f"or its gradient overflows in {dtype}{remedy}"
        )
    raise NonFiniteFactorError(
        f"the inputs of layer {found} are not finite over {where}, the first such in the model: "
        f"something before it overflows in {dtype}{remedy}"
    )


def _first_inputs(analysis: AnalyzedModel, params: Any, batch: Any, exist: Any) -> str | None:
    """The layer, in the order of the program, from the diagonals of all A alone."""
    collect = jk.value_grad_and_factors(
        analysis.objective, fisher="forward", max_dense=1, uncovered="ignore"
    )
    squares = collect(params, batch, positions=exist).factors
    found = []
    for number, layer in enumerate(squares.layers):
        if layer.is_diagonal:
            continue
        finite = np.isfinite(np.asarray(squares.a_sums[layer.input]))
        bad = np.flatnonzero(~finite.reshape(*layer.stack[:1], -1).all(-1))
        if bad.size:
            block = int(bad[0]) if layer.stack else None
            run = _run(squares.layers, number)
            name = layer.name + ("" if block is None else f"[{block}]")
            found.append((run, block or 0, number, name))
    return min(found)[-1] if found else None


def _run(layers: Sequence[Layer], number: int) -> int:
    """How many times the depth of the stack changes before a layer: blocks run in between."""
    depths = [layer.stack[:1] for layer in layers[: number + 1]]
    return sum(one != other for one, other in zip(depths, depths[1:], strict=False))
