"""The program run again is the program: value, gradient, effects, policies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxkfac._jaxpr_compat import call_kind
from jaxkfac.interception._trace import trace
from jaxkfac.interception.values._slots import Slot


def identity(site, operands):
    return site.bind(*operands)


def rewritten(fn):
    """The function traced and run again with a handler that changes nothing."""

    def new(params, *args):
        traced = trace(fn, params, *args)
        slots = {name: Slot() for name in traced.table}
        return traced.run(identity, params, slots, *args)

    return new


def slotted(fn):
    """``new(params, slot, x)`` where every layer's product is ``slot`` times as large."""

    def handler(site, operands):
        return site.bind(*operands) * site.slots[0].constants

    def new(params, slot, x):
        traced = trace(fn, params, x)
        slots = {
            layer.name: Slot(constants=jnp.broadcast_to(slot, layer.stack))
            for layer in traced.table.values()
        }
        return traced.run(handler, params, slots, x)

    return new


class Block(nn.Module):
    """Attention and a gated layer."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.silu(nn.Dense(16)(x))), None


class Stack(nn.Module):
    """A scanned and rematted stack behind an embedding."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(11, 8)(ids)
        block = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.Dense(5)(block()(x, None)[0])


def mlp(p, x):
    h = jax.checkpoint(lambda x: jax.nn.gelu(x @ p["w"] + p["b"]))(x)
    return jnp.einsum("no,oh->hn", h, p["v"])


def in_scan(p, x, **options):
    def step(c, w):
        return jnp.tanh(c @ w), c.sum()

    x, sums = jax.lax.scan(step, x, p["s"], **options)
    return x @ p["v"] + sums.sum()


PARAMS = {
    "w": jnp.linspace(-1, 1, 16).reshape(4, 4),
    "b": jnp.linspace(0, 1, 4),
    "v": jnp.linspace(-1, 2, 8).reshape(4, 2),
    "s": jnp.linspace(-1, 1, 48).reshape(3, 4, 4),
}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fn",
    [
        mlp,
        in_scan,
        functools.partial(in_scan, reverse=True),
        functools.partial(in_scan, unroll=2),
        jax.jit(mlp),
        lambda p, x: jax.vmap(mlp, (None, 1))(p, jnp.stack([x, 2 * x], 1)),
        lambda p, x: jax.lax.map(lambda r: jnp.tanh(r @ p["w"]), x),
        lambda p, x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["s"][i]), x),
    ],
)
def test_value_and_gradient_are_equal_bit_for_bit_operation_by_operation(fn):
    with jax.disable_jit():
        want = jax.value_and_grad(lambda p: jnp.sin(fn(p, X)).sum())(PARAMS)
        got = jax.value_and_grad(lambda p: jnp.sin(rewritten(fn)(p, X)).sum())(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_a_scanned_rematted_transformer_is_equal_under_jit():
    ids = jnp.arange(8).reshape(2, 4)
    params = Stack().init(jax.random.key(0), ids)
    want = jax.jit(jax.value_and_grad(lambda p: Stack().apply(p, ids).var()))(params)
    got = jax.jit(jax.value_and_grad(lambda p: rewritten(Stack().apply)(p, ids).var()))(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), got, want)


def test_slots_reach_every_layer_of_the_program_they_scale():
    """Twice the product of a linear three-layer scan and a head: 2 ** 4."""

    def linear(p, x):
        return jax.lax.scan(lambda c, w: (c @ w, None), x, p["s"])[0] @ p["v"]

    np.testing.assert_allclose(
        slotted(linear)(PARAMS, jnp.asarray(2.0), X), 16 * linear(PARAMS, X), rtol=1e-5
    )


def structures(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        kind = call_kind(eqn)
        if kind is not None:
            found.append((kind, eqn.params.get("policy"), eqn.params.get("prevent_cse")))
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                found += structures(getattr(sub, "jaxpr", sub))
    return found


def test_remat_policies_survive():
    policy = jax.checkpoint_policies.dots_saveable

    def fn(p, x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ p["w"]), policy=policy, prevent_cse=False)(x)

    before = structures(jax.make_jaxpr(fn)(PARAMS, X).jaxpr)
    after = structures(jax.make_jaxpr(rewritten(fn))(PARAMS, X).jaxpr)
    assert before == after
    assert ("checkpoint", policy, False) in [(k, p, c) for k, p, c in after]


def test_every_parameter_of_the_product_survives():
    def fn(p, x):
        return jax.lax.dot_general(
            x.astype(jnp.bfloat16),
            p["w"].astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    (eqn,) = [
        e
        for e in jax.make_jaxpr(rewritten(fn))(PARAMS, X).jaxpr.eqns
        if e.primitive.name == "dot_general"
    ]
    assert eqn.params["preferred_element_type"] == jnp.float32
    assert eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_effects_inside_a_scan_happen_once_per_iteration(capfd):
    def fn(p, x):
        def step(c, w):
            jax.debug.print("iteration")
            return jnp.tanh(c @ w), None

        return jax.lax.scan(step, x, p["s"])[0]

    jax.block_until_ready(jax.jit(rewritten(fn))(PARAMS, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("iteration") == 3


def test_functions_that_close_over_tracers_are_rewritten_inside_the_trace():
    @jax.jit
    def outer(p, x, offset):
        return rewritten(lambda p, x: x @ p["w"] + offset)(p, x)

    np.testing.assert_allclose(outer(PARAMS, X, 3.0), X @ PARAMS["w"] + 3.0, rtol=1e-6)
