"""A child process says of a program what compiling it directly says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxkfac._errors import CompilerError, CompilerNotFoundError
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.planning import TARGETS, CompiledBytes, compiled_bytes

F32 = jnp.float32


def directly(fn, *args, donate_argnums=()):
    """What XLA says of the same function in this process; the CPU's time is not compared."""
    step = jax.jit(fn, donate_argnums=donate_argnums, keep_unused=True)
    m = step.lower(*args).compile().memory_analysis()
    return CompiledBytes(
        m.temp_size_in_bytes,
        m.argument_size_in_bytes,
        m.output_size_in_bytes,
        m.alias_size_in_bytes,
        0.0,
    )


def in_child(fn, *args, **options):
    return compiled_bytes(fn, *args, target="cpu", **options)._replace(cpu_seconds=0.0)


def of(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def curvature_step(dtype):
    """Value, gradient and sampled factors of a dense net, keys and integers among its leaves."""

    def apply(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return (hidden @ params["down"]).astype(F32)

    stats = value_grad_and_factors(Objective(apply, Categorical()), fisher="mc")
    params = {"up": of(64, 96, dtype=dtype), "down": of(96, 10, dtype=dtype)}
    batch = (of(32, 64, dtype=dtype), of(32, dtype=jnp.int32))
    return stats, (params, batch, jax.eval_shape(lambda: jax.random.key(0)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
def test_bytes_equal_those_of_a_direct_compilation(dtype):
    step, args = curvature_step(dtype)
    told = in_child(step, *args)
    assert told == directly(step, *args)
    assert told.temporaries > 0


@pytest.mark.slow
def test_donated_arguments_are_counted_once_in_the_peak():
    def step(x, y):
        return x + 1.0, y.sum()

    args = of(1000), of(500)
    kept, donated = in_child(step, *args), in_child(step, *args, donate_argnums=0)
    assert donated == directly(step, *args, donate_argnums=0)
    assert kept.donated == 0 and donated.donated == 4000
    assert kept.peak - donated.peak == 4000
    assert in_child(step, *args, donate_argnums=-2) == donated


@pytest.mark.exhaustive
def test_a_gradient_of_integers_and_an_unused_argument_go_along():
    step = jax.grad(lambda p, unused: p["w"].sum().astype(F32), allow_int=True)
    args = {"w": of(7, dtype=jnp.int32)}, of(3)
    assert in_child(step, *args) == directly(step, *args)


@pytest.mark.slow
def test_a_compiler_that_is_not_installed_is_named_with_what_to_install():
    absent = dataclasses.replace(TARGETS["h100"], module="no_such_plugins.xla_cuda")
    with pytest.raises(CompilerNotFoundError, match=r"/no/python does not start \(No such file"):
        compiled_bytes(jnp.sin, of(3), target="cpu", python="/no/python")
    with pytest.raises(CompilerNotFoundError, match=r"H100.*no_such_plugins.*jax-cuda12-plugin=="):
        compiled_bytes(jnp.sin, of(3), target=absent)


def test_an_unknown_target_is_refused_by_name():
    with pytest.raises(ValueError, match="'b200': expected one of 'cpu', 'h100', 'v5e'"):
        compiled_bytes(jnp.sin, of(3), target="b200")


@pytest.mark.slow
def test_a_compiler_that_fails_or_takes_too_long_is_a_compiler_error():
    bad = dataclasses.replace(TARGETS["cpu"], topology={"platform": "nowhere"})
    with pytest.raises(CompilerError, match="this CPU ended with status 1: .*nowhere"):
        compiled_bytes(jnp.sin, of(3), target=bad)
    with pytest.raises(CompilerError, match=r"no result after 0.01 s; raise timeout="):
        compiled_bytes(jnp.sin, of(3), target="cpu", timeout=0.01)
