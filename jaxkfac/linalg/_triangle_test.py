import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.linalg._packed import fold_triangle, pack, packed_shape, unfold_triangle

SIZES = (1, 2, 63, 64, 65)


def symmetric(*shape):
    x = jax.random.normal(jax.random.key(shape[-1]), shape)
    return x + x.mT


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 33])
def test_the_rectangle_is_that_of_the_host(n):
    matrix = np.asarray(symmetric(n, n))
    expected = pack(matrix, np.empty(packed_shape(n), matrix.dtype))
    assert np.array_equal(fold_triangle(jnp.asarray(matrix)), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 5), (3, 6, 6), (2, 3, 5, 5), (0, 4, 4)])
def test_unfolding_gives_the_folded_matrices_back_bit_for_bit(shape):
    matrix = symmetric(*shape)
    folded = jax.jit(fold_triangle)(matrix)
    assert folded.shape == (*shape[:-2], *packed_shape(shape[-1]))
    assert jnp.array_equal(jax.jit(unfold_triangle)(folded), matrix)


def test_the_upper_triangle_is_never_read():
    matrix = symmetric(6, 6)
    marked = jnp.where(jnp.tri(6, dtype=bool), matrix, jnp.nan)
    assert jnp.array_equal(unfold_triangle(fold_triangle(marked)), matrix)


# ---------------- under every transformation


def over_two_devices(function, *, by_hand):
    """Each device has one matrix of a stack of two."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    if by_hand:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    divided = NamedSharding(mesh, P("x"))
    return lambda x: jax.jit(function)(jax.device_put(x, divided))


TRANSFORMED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, m: (carry, f(m)), None, x)[1],
    "remat": lambda f: jax.jit(jax.checkpoint(f)),
    "shard_map": lambda f: over_two_devices(f, by_hand=True),
    "sharded": lambda f: over_two_devices(f, by_hand=False),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", TRANSFORMED)
def test_folding_and_unfolding_are_exact_to_the_bit_under(how):
    transformed = TRANSFORMED[how]
    for n in SIZES:
        matrices = symmetric(2, n, n)
        out = np.empty((2, *packed_shape(n)), np.float32)
        expected = [pack(x, each) for x, each in zip(np.asarray(matrices), out, strict=True)]
        folded = transformed(fold_triangle)(matrices)
        np.testing.assert_array_equal(folded, expected)
        np.testing.assert_array_equal(transformed(unfold_triangle)(folded), matrices)


@pytest.mark.slow
def test_a_donated_rectangle_is_written_in_place():
    double = jax.jit(lambda x: fold_triangle(2 * unfold_triangle(x)), donate_argnums=0)
    for n in SIZES[1:]:
        folded = fold_triangle(symmetric(n, n))
        expected = 2 * np.array(folded)
        np.testing.assert_array_equal(double(folded), expected)
        assert folded.is_deleted()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_dtype_stays_and_keeps_its_bits(x64, dtype):
    for n in SIZES:
        matrix = symmetric(n, n).astype(dtype)
        for given in (matrix, np.asarray(matrix)):
            folded = fold_triangle(given)
            unfolded = unfold_triangle(folded)
            assert type(given) is np.ndarray or isinstance(unfolded, jax.Array)
            assert folded.dtype == unfolded.dtype == given.dtype
            np.testing.assert_array_equal(unfolded, given)


@pytest.mark.parametrize("unfold", [jax.jit(unfold_triangle), unfold_triangle])
def test_signed_zeros_infinities_and_nans_keep_their_bits(unfold):
    matrix = np.zeros((6, 6), np.float32)
    matrix[3, 1] = matrix[1, 3] = matrix[2, 2] = matrix[5, 4] = matrix[4, 5] = -0.0
    matrix[4, 0] = matrix[0, 4] = np.inf
    matrix[5, 5] = -np.inf
    matrix[5, 2] = matrix[2, 5] = np.nan
    unfolded = np.asarray(unfold(fold_triangle(matrix)))
    np.testing.assert_array_equal(unfolded.view(np.uint32), matrix.view(np.uint32))


@pytest.mark.slow
@pytest.mark.usefixtures("users_kernels")
def test_users_compile_large_matrices_as_fast_as_small_ones():
    """XLA 0.10 unrolls a select between a matrix and its transpose: 27 s at n = 500."""
    program = (
        "import jax, time\n"
        "from jaxkfac.linalg import packed_shape, unfold_triangle\n"
        "for n in (8, 500):\n"
        "    x, start = jax.ShapeDtypeStruct(packed_shape(n), float), time.process_time()\n"
        "    jax.jit(unfold_triangle).lower(x).compile()\n"
        "    print(time.process_time() - start)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(float, run.stdout.split())
    assert large < 5 * small + 1


@pytest.mark.slow
def test_derivatives_are_those_of_the_linear_maps(x64):
    """The transpose of a map T is the one with <T x, y> = <x, T' y>."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    for n in (4, 65):
        for function, shape in ((fold_triangle, (n, n)), (unfold_triangle, packed_shape(n))):
            x = normal(0, *shape)
            out, transposed = jax.vjp(function, x)
            y = normal(1, *out.shape)
            np.testing.assert_allclose((out * y).sum(), (x * transposed(y)[0]).sum(), rtol=1e-12)
            pushed = jax.jvp(function, (x,), (x,))[1]
            np.testing.assert_array_equal(pushed, out)
