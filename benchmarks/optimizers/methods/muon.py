"""Muon of optax: kernels by orthogonalised momentum; embeddings, heads and the rest by Adam."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from benchmarks.optimizers._method import Method, first_order

_BY_ADAM = ("bytes", "positions", "head")  # as its authors do


def _kernels(params: Any) -> Any:
    """Which axes of a kernel are its inputs and its outputs; ``None`` for Adam."""

    def of(path: Any, leaf: jax.Array) -> MuonDimensionNumbers | None:
        if leaf.ndim < 2 or str(getattr(path[-1], "key", "")) in _BY_ADAM:
            return None
        return MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def _muon(learning_rate: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(
        learning_rate, adam_learning_rate=1e-3, muon_weight_dimension_numbers=_kernels
    )


MUON = Method(
    name="muon",
    title="Muon",
    settings=tuple({"learning_rate": rate} for rate in (1e-2, 3e-2, 1e-1, 3e-1)),
    run=first_order(lambda setting: _muon(setting["learning_rate"])),
)
