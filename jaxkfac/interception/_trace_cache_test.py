import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception import Staged, TraceCache


def product(x, y):
    return {"product": x @ y, "sine": jnp.sin(x)}


@pytest.fixture
def times_made():
    """From arguments to how often they, or others before them, were traced."""
    cache, made = TraceCache(), []

    def times(*args, static=None):
        def make():
            made.append(args)
            return Staged.of(product, *args)

        cache.get(args, make, static=static)
        return len(made)

    return times


def test_one_trace_serves_all_arguments_of_its_types(times_made):
    x = jnp.ones((2, 2))
    assert times_made(x, x) == 1
    assert times_made(x + 1, 2 * x) == 1
    assert times_made(jax.ShapeDtypeStruct(x.shape, x.dtype), x) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x, jnp.ones((2, 3))),
        lambda x: (x, x.astype(jnp.bfloat16)),
        lambda x: (jnp.ones(2), x),
    ],
)
def test_other_types_are_traced_anew(times_made, other):
    x = jnp.ones((2, 2))
    times_made(x, x)
    with jax.numpy_dtype_promotion("standard"):
        assert times_made(*other(x)) == 2


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.enable_x64(True),
        lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("d",))),
    ],
)
def test_other_settings_are_traced_anew_and_kept_beside(times_made, setting):
    x = jnp.ones((2, 2))
    times_made(x, x)
    with setting():
        assert times_made(x, x) == 2
        assert times_made(x, x) == 2
    assert times_made(x, x) == 2


def test_what_is_static_tells_traces_apart(times_made):
    x = jnp.ones((2, 2))
    assert [times_made(x, x, static=name) for name in ("a", "b", "a")] == [1, 2, 2]


@pytest.mark.slow
def test_a_trace_around_which_another_ends_is_not_kept():
    cache, x = TraceCache(), jnp.ones(3)

    @jax.jit
    def outer(y):
        return cache.get((x,), lambda: Staged.of(lambda x: x * y, x))(x)

    assert outer(2.0).tolist() == [2, 2, 2]
    jax.clear_caches()
    assert outer(3.0).tolist() == [3, 3, 3]


def test_a_staged_function_runs_no_python_and_gives_the_same_bits():
    ran = []

    def fn(x, y):
        ran.append(None)
        return jax.vjp(lambda x: product(x, y), x)[0]

    args = jax.random.normal(jax.random.key(0), (2, 4, 4))
    staged = Staged.of(fn, *args)
    ran.clear()
    found = staged(*args)
    assert not ran
    same = jax.tree.map(lambda a, b: (a == b).all(), found, fn(*args))
    assert jax.tree.all(same)


def test_no_argument_is_held():
    x = jnp.ones((2, 2))
    cache = TraceCache()
    staged = Staged.of(product, x, x)
    cache.get((x, x), lambda: staged)(x, x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
