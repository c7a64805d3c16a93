"""The program run again is the program: value, gradient, effects, policies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxkfac._interpreter import Segment
from jaxkfac._jaxpr_compat import call_kind
from jaxkfac.interception import _plan
from jaxkfac.interception._plan import plan_steps
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


# ---------------- equal runs of equations between the layers


def layers(*scales):
    """A program of layers that differ in a literal."""

    def fn(params, x):
        for w, scale in zip(params, scales, strict=True):
            x = jnp.tanh(scale * jnp.sin(x @ w)) * x
        return x

    return fn, [jnp.full((3, 3), 0.1 * (1 + k)) for k, _ in enumerate(scales)]


def runs(fn, params, x):
    steps = plan_steps(trace(fn, params, x).analysis.plan, frozenset())
    return [step.run for step in steps if isinstance(step, Segment)]


ROWS = jnp.arange(6.0).reshape(2, 3)


def test_equal_runs_between_the_layers_are_one_function():
    first, second, third = runs(*layers(2.0, 2.0, 2.0), ROWS)
    assert first is second is third


def test_runs_that_differ_in_a_literal_are_two_functions():
    first, second, third = runs(*layers(2.0, 3.0, 2.0), ROWS)
    assert first is third and first is not second


def test_runs_with_operands_in_other_places_are_two_functions():
    def fn(params, x):
        first, second = x @ params[0], x @ params[1]
        x = (jnp.sin(first) - x) @ params[2]
        return (x - jnp.sin(second)) @ params[2]

    assert len(set(runs(fn, [jnp.ones((3, 3))] * 3, ROWS))) == 2


def test_runs_that_differ_in_a_parameter_of_an_equation_are_two_functions():
    fn = lambda params, x: ((x @ params[0]) ** 3 @ params[1]) ** 4
    assert len(set(runs(fn, [jnp.ones((3, 3))] * 2, ROWS))) == 2


def test_runs_of_which_other_results_are_read_are_two_functions():
    def fn(params, x):
        x = jnp.cos(jnp.sin(x @ params[0]))
        sine = jnp.sin(x @ params[1])
        return jnp.cos(sine) @ params[2], sine

    assert len(set(runs(fn, [jnp.ones((3, 3))] * 3, ROWS))) == 2


def test_runs_in_scopes_of_their_own_keep_their_names():
    def fn(params, x):
        for k, w in enumerate(params):
            with jax.named_scope(f"layer{k}"):
                x = jnp.sin(x @ w) * x
        return x

    params = [jnp.ones((3, 3))] * 2
    assert len(set(runs(fn, params, ROWS))) == 2
    text = jax.jit(jax.grad(lambda p: rewritten(fn)(p, ROWS).sum())).lower(params).compile()
    assert "layer1" in text.as_text()


def test_runs_with_effects_are_not_shared(capfd):
    def fn(params, x):
        for w in params:
            x = x @ w
            jax.debug.print("layer", ordered=True)
            x = jnp.sin(x)
        return x

    params = [jnp.ones((3, 3))] * 2
    assert len(set(runs(fn, params, ROWS))) == 2
    jax.jit(rewritten(fn))(params, ROWS).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("layer") == 2


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.checkpoint], ids=["plain", "remat"])
def test_shared_runs_leave_the_differentiated_program_as_it_is(transform, monkeypatch):
    fn, params = layers(2.0, 2.0, 2.0)
    fn = transform(fn)
    grad = lambda: jax.grad(lambda p, x: rewritten(fn)(p, x).sum(), (0, 1))
    shared = jax.jit(grad()).lower(params, ROWS).as_text()
    monkeypatch.setattr(_plan, "with_shared_runs", list)
    assert jax.jit(grad()).lower(params, ROWS).as_text() == shared
