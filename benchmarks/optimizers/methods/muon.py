"""Muon of optax: kernels by orthogonalised momentum; embeddings, heads and the rest by Adam."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from benchmarks.optimizers._method import Method, Setting, constant, first_order

_BY_ADAM = ("bytes", "positions", "head")  # as its authors do


def _kernels(params: Any) -> Any:
    """Which axes of a kernel are its inputs and its outputs; ``None`` for Adam."""

    def of(path: Any, leaf: jax.Array) -> MuonDimensionNumbers | None:
        if leaf.ndim < 2 or str(getattr(path[-1], "key", "")) in _BY_ADAM:
            return None
        return MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def _muon(setting: Setting) -> optax.GradientTransformation:
    options: dict[str, Any] = {"adam_learning_rate": 1e-3, **setting}
    return optax.contrib.muon(**options, muon_weight_dimension_numbers=_kernels)


RATES = (1e-2, 3e-2, 1e-1, 3e-1)
CHOICES = tuple(
    {"learning_rate": rate, "adam_learning_rate": adam} for adam in (1e-3, 1e-2) for rate in RATES
)
AUTHORS = {  # https://github.com/KellerJordan/Muon, the README's example
    "learning_rate": 0.02, "weight_decay": 0.01,
    "adam_learning_rate": 3e-4, "adam_b2": 0.95, "adam_weight_decay": 0.01,
}  # fmt: skip

MUON = Method(
    name="muon",
    title="Muon",
    settings=tuple({"learning_rate": rate} for rate in RATES),
    run=first_order(_muon, traced=("learning_rate", "adam_learning_rate")),
    documented=constant([AUTHORS]),
    choices=CHOICES + constant(CHOICES),
)
