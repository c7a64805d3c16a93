"""Factors of any layers at random, for tests that need no model. Other tests import from here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._factors import Factors
from jaxkfac.interception._layer import Layer, ParameterMatrix

pytestmark = pytest.mark.usefixtures("x64")


def matrix(path, shape, *, stack=0, index=(), inputs=None):
    """A parameter whose leading ``stack`` axes are stacked and whose last is the output."""
    axes = tuple(range(len(shape)))
    outputs = axes[-1:] if inputs is None else tuple(a for a in axes[stack:] if a not in inputs)
    inputs = axes[stack:-1] if inputs is None else inputs
    return ParameterMatrix(path, index, tuple(shape), axes[:stack], inputs, outputs)


def layer(
    path, shape, *, name=None, kind="dense", bias=None, stack=0, input=None, **kwargs
) -> Layer:
    index = kwargs.pop("index", ())
    weight = matrix(path, shape, stack=stack, index=index, inputs=kwargs.pop("inputs", None))
    out = weight.out_features
    if kind in ("scale", "bias"):  # a diagonal, unless a block is asked for
        kwargs = {"a_dense": False, "g_dense": False, **kwargs}
    bias_shape = (*shape[:stack], out)
    return Layer(
        name=name or path,
        kind=kind,
        weight=weight,
        bias=None if bias is None else matrix(bias, bias_shape, stack=stack, index=index),
        in_features=weight.in_features,
        out_features=out,
        stack=tuple(shape[:stack]),
        uses=1,
        input=input or name or path,
        **kwargs,
    )


def random_factors(layers, key, *, bias="joint", rows=50, dtype=None) -> Factors:
    """Factors of the given layers from random rows; counts differ from 1 and each other."""
    a_sums, a_counts, g_sums, diagonals = {}, {}, {}, {}
    ones = {x.input for x in layers if bias == "joint" and x.bias is not None}

    def outer(key, stack, n, dense):
        x = jax.random.normal(key, (*stack, rows, n), dtype)
        return x.mT @ x if dense else jnp.square(x).sum(-2)

    for i, each in enumerate(layers):
        k_a, k_g = jax.random.split(jax.random.fold_in(key, i))
        if each.is_diagonal:
            diagonals[each.name] = jnp.square(jax.random.normal(k_g, each.weight.atoms, dtype)) + 1
            continue
        if each.input not in a_sums:
            n = each.in_features + (each.input in ones)
            a_sums[each.input] = outer(k_a, each.stack, n, each.a_dense)
            a_counts[each.input] = jnp.full(each.stack, rows, dtype or float)
        g_sums[each.name] = outer(k_g, each.stack, each.out_features, each.g_dense)
    terms = jnp.asarray(rows // 2, dtype or float)
    return Factors(a_sums, a_counts, g_sums, diagonals, terms, tuple(layers), bias)


def test_layers_of_one_input_share_its_sums_and_stacks_have_sums_of_their_own():
    layers = (
        layer("left", (2, 3, 4), stack=1, bias="left/bias", input="x"),
        layer("right", (2, 3, 5), stack=1, bias="right/bias", input="x"),
    )
    factors = random_factors(layers, jax.random.key(0))
    assert {name: x.shape for name, x in factors.a_sums.items()} == {"x": (2, 4, 4)}
    assert {name: x.shape for name, x in factors.g_sums.items()} == {
        "left": (2, 4, 4),
        "right": (2, 5, 5),
    }
    assert (np.linalg.eigvalsh(factors.a_sums["x"]) > 0).all()
