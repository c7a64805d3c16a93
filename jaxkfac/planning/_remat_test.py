"""A rematted program computes the same, and keeps less for its backward pass."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.planning._options import has_scans_to_remat, remat_scans

DEPTH, WIDTH = 6, 8


def stacked(params, x):
    """A scan inside jit, with a constant, a counter, a result nobody reads, and literals."""
    scale = jnp.arange(1.0, WIDTH + 1)

    @jax.jit
    def inner(x):
        def step(carry, w):
            x, count = carry
            y = jnp.tanh(x @ w * scale)
            return (y, count + 1), (y.sum(), 2.0 * x)

        (x, count), (sums, _) = jax.lax.scan(step, (x, 0), params["w"], reverse=True)
        return x, sums, count

    y, sums, count = inner(x)
    return (y**2).sum() + sums.sum() + count.astype(y.dtype)


def values():
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / WIDTH
    return {"w": w}, jax.random.normal(keys[1], (16, WIDTH))


def compiled(fn, args):
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile()


def test_value_and_gradient_are_those_of_the_program_and_less_is_kept(x64):
    args = values()
    plain, again = compiled(stacked, args), compiled(remat_scans(stacked), args)
    (value, grad), (value_again, grad_again) = plain(*args), again(*args)
    assert float(value) == pytest.approx(float(value_again), rel=1e-13)
    assert jnp.abs(grad["w"] - grad_again["w"]).max() < 1e-12 * jnp.abs(grad["w"]).max()
    kept = [program.memory_analysis().temp_size_in_bytes for program in (plain, again)]
    # tanh's result and the product of each iteration are no longer kept for the backward pass
    assert kept[1] < kept[0] - DEPTH * 16 * WIDTH * 8 / 2


def test_every_outermost_scan_that_holds_no_checkpoint_is_found():
    shapes = jax.eval_shape(values)
    assert has_scans_to_remat(stacked, *shapes)
    assert not has_scans_to_remat(remat_scans(stacked), *shapes)
    assert not has_scans_to_remat(lambda p, x: x @ p["w"][0], *shapes)

    def inside_jit(p, x):
        block = jax.jit(jax.checkpoint(lambda x, w: jnp.tanh(x @ w)))
        return jax.lax.scan(lambda x, w: (block(x, w), None), x, p["w"])[0]

    assert not has_scans_to_remat(inside_jit, *shapes)


def test_arguments_by_name_and_the_key_argument_stay():
    from jaxkfac.factors._model_call import takes_key

    def fn(x, key=None):
        return x if key is None else x + jax.random.normal(key, x.shape)

    again = remat_scans(fn)
    key = jax.random.key(1)
    assert takes_key(again) and (again(jnp.ones(3), key=key) == fn(jnp.ones(3), key=key)).all()
    assert (again(jnp.ones(3)) == 1).all()
