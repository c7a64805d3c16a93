"""Algorithms are in full precision on every device, and products stay as they were made."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.curvature import operators

N = 97
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.float32)
VECTOR = {"w": jax.ShapeDtypeStruct((N,), jnp.float32)}
_DOT = re.compile(r"stablehlo\.dot_general (.*?) : \((.*?)\) ->")


def of_matrix(matrix):
    return operators.from_function(lambda m, v: {"w": m @ v["w"]}, matrix, VECTOR)


ALGORITHMS = {
    "xtrace": lambda o, k: operators.trace(o, key=k, num_samples=8),
    "xnystrace": lambda o, k: operators.trace(o, key=k, num_samples=8, method="xnystrace"),
    "hutchinson": lambda o, k: operators.trace(o, key=k, method="hutchinson"),
    "spectrum": lambda o, k: operators.spectrum(o, key=k, num_eigenvalues=3, vectors=True),
    "density": lambda o, k: operators.spectral_density(o, key=k),
    "log determinant": lambda o, k: operators.log_determinant(o, key=k, damping=0.1),
    "solve": lambda o, k: operators.solve(o, {"w": jax.random.normal(k, (N,))}, damping=0.1),
}


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_the_operators_own_products_have_the_default_precision(name):
    """As a TPU would run it, whose default is one bfloat16 pass."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = jax.jit(lambda m, k: ALGORITHMS[name](of_matrix(m), k))
    text = jax.export.export(step, platforms=["tpu"])(MATRIX, key).mlir_module()
    found = {True: set(), False: set()}
    for line in text.splitlines():
        if dot := _DOT.search(line):
            asked = re.search(r"precision = \[(\w+),", line)
            own = f"tensor<{N}x{N}xf32>" in dot[2]
            found[own].add(asked[1] if asked else "DEFAULT")
    assert found == {True: {"DEFAULT"}, False: {"HIGHEST"}}
