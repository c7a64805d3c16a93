"""Every form of program on an NF4 base: the same numbers as on the decoded base."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from jaxkfac.flax import from_nnx
from jaxkfac.interception import find_layers
from jaxkfac.lslora import Config, attach, calibrate, init, nf4, stack


def weights(*shape):
    return jax.random.normal(jax.random.key(sum(shape) + len(shape)), shape) / 2


PARAMS = {
    "w": weights(4, 6),
    "v": weights(6, 4),
    "t": weights(6, 4),
    "q": weights(4, 2, 3),
    "o": weights(2, 3, 4),
    "e": weights(3, 4, 5),
    "s": weights(3, 4, 4),
    "ss": weights(2, 3, 4, 4),
    "o4": weights(4, 4),
}
X = jax.random.normal(jax.random.key(9), (3, 2, 4))  # examples, positions, features


def heads(p, x):
    return jnp.einsum("nsd,dhk->nshk", x, p["q"])


def looped(block, x, xs, **kwargs):
    return jax.lax.scan(lambda c, w: (block(c, w), None), x, xs, **kwargs)[0]


def layer(x, w):
    return jnp.tanh(x @ w)


def rolled(p, x):
    return looped(layer, x, p["s"])


def shared(p, x):
    return looped(lambda x, _: layer(x, p["w"]) @ p["v"], x, None, length=2)


def in_carry(p, x):
    def step(carry, _):
        x, w = carry
        return (layer(x, w), w), None

    return jax.lax.scan(step, (x, p["o4"]), None, length=2)[0][0]


def sharded(p, x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec
    each = jax.shard_map(layer, mesh=mesh, in_specs=(spec(None, "i"), spec(None, None)),
                         out_specs=spec(None, "i"))  # fmt: skip
    return each(x, p["w"])


PROGRAMS = {
    "dense layers": (lambda p, x: layer(x, p["w"]) @ p["v"], "w|v"),
    "kernel first": (lambda p, x: jnp.einsum("oi,nsi->nso", p["t"], x), "t"),
    "two contracted axes": (lambda p, x: jnp.einsum("nshk,hkd->nsd", heads(p, x), p["o"]), "q|o"),
    "contracted axes in another order": (
        lambda p, x: jax.lax.dot_general(
            heads(p, x).swapaxes(2, 3), p["o"], (((2, 3), (1, 0)), ((), ()))
        ),
        "q|o",
    ),
    "transposed view": (lambda p, x: x @ p["t"].T, "t"),
    "reshaped view": (lambda p, x: x @ p["q"].reshape(4, 6), "q"),
    "scaled by a parameter-free number": (lambda p, x: x @ (p["w"] / jnp.sqrt(6.0) * 2), "w"),
    "cast": (lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16), "w"),
    "barrier": (
        lambda p, x: layer(x, jax.lax.optimization_barrier((p["w"], x))[0]),
        "w",
    ),
    "used twice": (lambda p, x: layer(x, p["w"]) @ p["w"].T, "w"),
    "jit": (lambda p, x: jax.jit(layer)(x, p["w"]), "w"),
    "donated to a jit": (lambda p, x: jax.jit(layer, donate_argnums=1)(x, p["w"]), "w"),
    "remat": (lambda p, x: jax.checkpoint(layer)(x, p["w"]), "w"),
    "scan": (rolled, "s"),
    "reversed scan": (lambda p, x: looped(layer, x, p["s"], reverse=True), "s"),
    "scan of a remat": (lambda p, x: looped(jax.checkpoint(layer), x, p["s"]), "s"),
    "remat of a scan": (lambda p, x: jax.checkpoint(rolled)(p, x), "s"),
    "views before a scan": (
        lambda p, x: looped(
            layer, x, (0.5 * p["s"].astype(jnp.float32)).transpose(0, 2, 1).reshape(3, 4, 4)
        ),
        "s",
    ),
    "views before and in a scan": (
        lambda p, x: looped(
            lambda x, w: jnp.tanh(jnp.einsum("nsd,dhk->nshk", x, w.T.reshape(4, 2, 2))).reshape(
                x.shape
            ),
            x,
            p["s"].transpose(0, 2, 1) * 0.5,
        ),
        "s",
    ),
    "scan of a scan": (lambda p, x: looped(lambda x, w: looped(layer, x, w), x, p["ss"]), "ss"),
    "scan of a scan after views": (
        lambda p, x: looped(
            lambda x, w: looped(layer, x, w.transpose(0, 2, 1)),
            x,
            2 * p["ss"].transpose(0, 1, 3, 2),
        ),
        "ss",
    ),
    "constant of a scan": (shared, "w|v"),
    "carried unchanged": (in_carry, "o4"),
    "unrolled": (lambda p, x: layer(layer(x, p["s"][0]), p["s"][2]), r"s\[.*"),
    "index as data": (
        lambda p, x: looped(
            lambda x, i: layer(x, jax.lax.dynamic_index_in_dim(p["s"], i, keepdims=False)),
            x,
            jnp.arange(3),
        ),
        "s",
    ),
    "batched experts": (
        lambda p, x: jnp.einsum("nesi,eio->neso", jnp.stack([x, 2 * x, -x], 1), p["e"]),
        "e",
    ),
    "experts in a transposed view": (
        lambda p, x: jnp.einsum("nsi,oei->nseo", x, p["e"].transpose(2, 0, 1)),
        "e",
    ),
    "shard_map": (sharded, "w"),
    "vmap": (lambda p, x: jax.vmap(lambda x: layer(x, p["w"]))(x), "w"),
}


@functools.cache
def case(name):
    fn, pattern = PROGRAMS[name]
    table = find_layers(fn, PARAMS, X)
    params4 = nf4.quantize(PARAMS, pattern, table=table, block=2)
    config = Config(rank=2, alpha=3, target=pattern)
    adapters = init(fn, config, params4, X, key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    return fn, params4, attach(fn, config), adapters


def close(a, b, tolerance=1e-6):
    """Products are the same; only what XLA fuses around them may round differently."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


LONG = {  # each is like another one, or close to one
    "batched experts",
    "carried unchanged",
    "constant of a scan",
    "contracted axes in another order",
    "dense layers",
    "index as data",
    "remat of a scan",
    "reshaped view",
    "reversed scan",
    "scan",
    "scan of a scan",
    "used twice",
    "views before a scan",
}


@pytest.mark.default(0)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in PROGRAMS]
)
def test_outputs_and_gradients_are_those_on_the_decoded_base(name):
    fn, params4, adapted, adapters = case(name)

    @jax.jit
    def outputs_and_gradients(adapters, params, decoded):
        def loss(adapters, params):
            out = adapted(params, adapters, X).astype(jnp.float32)
            return jnp.square(out).sum(), out

        both = [jax.grad(loss, has_aux=True)(adapters, p) for p in (params, decoded)]
        return both, (adapted(params, {}, X), fn(decoded, X))

    adapted_, plain = outputs_and_gradients(adapters, params4, nf4.dequantize(params4))
    # In bfloat16 a fused product keeps bits that a stored one loses.
    tolerance = 1e-2 if name == "cast" else 1e-5
    close(*adapted_, tolerance)
    close(*plain, tolerance)


class AttentionBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.DenseGeneral((2, 4), name="q_proj")(x)
        return x + nn.DenseGeneral(4, axis=(-2, -1), name="o_proj")(jnp.tanh(h)), None


class AttentionNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(AttentionBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return nn.Dense(4, name="head")(layers(name="layers")(x, None)[0])


class FeedForward(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("linen", marks=pytest.mark.slow),
        pytest.param("nnx", marks=pytest.mark.exhaustive),
    ],
)
def test_a_flax_model_with_every_kernel_quantised(framework):
    if framework == "linen":
        fn = AttentionNet().apply
        params = AttentionNet().init(jax.random.key(0), X)
    else:
        fn, params = from_nnx(FeedForward(nnx.Rngs(0)))
    params4 = nf4.quantize(params, table=find_layers(fn, params, X), block=4)
    leaves = jax.tree.leaves(params4, is_leaf=lambda x: isinstance(x, nf4.NF4))
    assert sum(isinstance(x, nf4.NF4) for x in leaves) == (3 if framework == "linen" else 2)
    config = Config(rank=2, target=".*kernel")
    adapters = init(fn, config, params4, X, key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    adapted = attach(fn, config)
    both = jax.jit(lambda *bases: [adapted(base, adapters, X) for base in bases])
    close(*both(params4, nf4.dequantize(params4)))


def test_a_table_of_the_quantised_tree_is_the_table_of_the_tree():
    fn, params4, _, _ = case("scan of a remat")
    assert str(find_layers(fn, params4, X)) == str(find_layers(fn, PARAMS, X))


def test_shapes_suffice_to_lower():
    fn, params4, adapted, adapters = case("scan of a remat")
    shapes = jax.eval_shape(lambda: (params4, adapters, X))
    lowered = jax.jit(adapted.__call__).lower(*shapes)
    assert lowered.out_info.shape == adapted(params4, adapters, X).shape


def test_a_base_from_shapes_has_the_shapes_of_a_base_from_arrays():
    shapes = jax.eval_shape(lambda: PARAMS)
    quantised = nf4.quantize(shapes, "s", stack=1, block=2)
    real = nf4.quantize(PARAMS, "s", stack=1, block=2)
    assert jax.tree.structure(quantised) == jax.tree.structure(real)
    pairs = zip(jax.tree.leaves(quantised), jax.tree.leaves(real), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@pytest.mark.exhaustive
def test_a_bank_by_row_and_forward_mode_work_on_a_quantised_base():
    fn, params4, adapted, adapters = case("scan of a remat")
    bank = stack({"a": adapters, "b": jax.tree.map(lambda x: -x, adapters)})
    rows, bases = jnp.array([0, 1, -1]), (params4, nf4.dequantize(params4))
    close(*[adapted(base, bank, X, adapter=rows) for base in bases])
    forward = attach(fn, adapted.config, forward_mode=True)
    tangents = [
        jax.jvp(lambda a, base=base: forward(base, a, X), (adapters,), (adapters,))[1]
        for base in bases
    ]
    close(*tangents, 1e-5)


@pytest.mark.exhaustive
def test_sigma_is_measured_on_a_quantised_base():
    _, params4, adapted, adapters = case("scan of a remat")
    found = [calibrate(adapted, p, adapters, X) for p in (params4, nf4.dequantize(params4))]
    close(*found)


def count(name, jaxpr):
    """How often a primitive occurs, every call counted."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            total += count(name, inner) if hasattr(inner, "eqns") else 0
    return total


def test_a_policy_of_the_program_still_sees_the_products():
    def policied(p, x):
        block = jax.checkpoint(
            lambda x, w: jnp.sin(jnp.sin(x @ w)), policy=jax.checkpoint_policies.dots_saveable
        )
        return looped(block, x, p["s"])

    config = Config(rank=2, target="s")
    params4 = nf4.quantize(PARAMS, "s", stack=1, block=2)
    adapters = init(policied, config, params4, X, key=jax.random.key(0))
    adapted = attach(policied, config)

    def products(params):
        loss = lambda adapters: adapted(params, adapters, X).sum()
        return count("dot_general", jax.make_jaxpr(jax.grad(loss))(adapters).jaxpr)

    assert products(params4) == products(PARAMS)


@pytest.mark.slow
def test_the_backward_pass_keeps_codes_and_no_weights():
    def saved(params):
        _, _, adapted, adapters = case("scan of a remat")
        pull = jax.vjp(lambda x: attach(rolled, adapted.config)(params, adapters, x), X)[1]
        return [x.shape for x in jax.tree.leaves(pull) if jnp.issubdtype(x.dtype, jnp.floating)]

    assert PARAMS["s"].shape in saved(PARAMS)
    assert PARAMS["s"].shape not in saved(case("scan of a remat")[1])
