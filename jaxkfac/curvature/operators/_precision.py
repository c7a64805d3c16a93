"""Algorithms in full precision, around products as their maker has them."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def full_precision() -> Any:
    """A context in which float32 products are full on every device.

    The default is a bfloat16 pass on a TPU and TF32 on a GPU: fine for a model, and too coarse
    for the inner products of an algorithm that subtracts them.
    """
    return jax.default_matmul_precision("highest")


def as_outside(product: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose products have the precision that holds here, wherever it is called."""
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(product)
    def call(*args: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return product(*args)

    return call
