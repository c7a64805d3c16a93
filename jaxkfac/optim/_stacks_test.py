import flax
import jax
import jax.numpy as jnp
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose, natural_gradient
from jaxkfac.linalg import statistics_dtype
from jaxkfac.optim import kfac
from jaxkfac.optim._stacks import LARGEST_SIDE, Stacks

pytestmark = pytest.mark.usefixtures("x64")


def block(i):
    """Queries and keys of one input, a scanned pair of layers, a scale."""
    return (
        layer(f"{i}/q", (4, 3), bias=f"{i}/b"),
        layer(f"{i}/k", (4, 3), input=f"{i}/q"),
        layer(f"{i}/experts", (2, 3, 5), stack=1, bias=f"{i}/experts_b"),
        layer(f"{i}/scale", (4,), kind="scale", inputs=()),
    )


LONE = (
    layer("lone", (4, 4)),
    layer("both", (4, 3)),  # read in two orientations
    layer("both", (4, 3), name="both@turned", inputs=(1,)),
    layer("slices", (4, 3), name="slices[0]", index=(0,)),
    layer("table", (9, 4), kind="embedding", a_dense=False),
)
LAYERS = (*block(0), LONE[0], *block(1), *LONE[1:])


def tree(key, dtype=None, layers=LAYERS):
    shapes = {m.path: m.atoms for x in layers for m in (x.weight, x.bias) if m is not None}
    shapes |= {"slices": (2, 4, 3), "uncovered": (7,)}
    keys = jax.random.split(key, len(shapes))
    return {
        path: jax.random.normal(k, s, dtype)
        for k, (path, s) in zip(keys, shapes.items(), strict=True)
    }


@pytest.fixture
def factors():
    return random_factors(LAYERS, jax.random.key(0))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(map(jnp.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.slow
def test_layers_are_stacked_that_differ_in_names_alone(factors):
    groups = {tuple(x.name for x in group.members) for group in Stacks.of(factors).groups}
    blocks = {tuple(f"{i}/{name}" for i in range(2)) for name in ("q", "k", "experts", "scale")}
    assert groups == blocks | {(x.name,) for x in LONE}


@pytest.mark.exhaustive
def test_what_is_stacked_reads_as_it_was(factors):
    stacks = Stacks.of(factors)
    stacked = stacks.factors(factors)
    same(stacks.unstacked(stacked), factors)
    assert len(jax.tree.leaves(stacked)) < len(jax.tree.leaves(factors))
    for dtype in (None, jnp.bfloat16):
        leaves = tree(jax.random.key(1), dtype)
        same(stacks.unstacked_tree(stacks.tree(leaves), leaves), leaves)


@pytest.mark.slow
def test_the_stacked_model_is_preconditioned_as_the_model(factors):
    stacks, grads = Stacks.of(factors), tree(jax.random.key(1))
    bases = eigendecompose(stacks.factors(factors))
    options = {"damping": 0.1, "missing": "identity"}
    found = stacks.unstacked_tree(natural_gradient(stacks.tree(grads), bases, **options), grads)
    expected = natural_gradient(grads, eigendecompose(factors), **options)
    for path, x in expected.items():
        assert jnp.allclose(found[path], x, rtol=1e-12, atol=1e-12), path
    own = natural_gradient(grads, stacks.unstacked(bases), **options)
    for path, x in expected.items():
        assert jnp.allclose(own[path], x, rtol=1e-12, atol=1e-12), path


@pytest.mark.slow
def test_leaves_that_are_not_there_count_as_zeros_and_stay_away(factors):
    stacks, grads = Stacks.of(factors), tree(jax.random.key(1))
    some = {k: x for k, x in grads.items() if k not in ("1/q", "0/k", "1/k")}
    stacked = stacks.tree(some)
    assert stacked["0/q and 1 more"].shape == (2, 4, 3) and not stacked["0/q and 1 more"][1].any()
    assert not any("/k" in path for path in stacked)
    same(stacks.unstacked_tree(stacked, some), some)


@pytest.mark.exhaustive
def test_mixed_dtypes_of_one_stack_come_back(factors):
    stacks, grads = Stacks.of(factors), tree(jax.random.key(1), jnp.float32)
    grads["1/q"] = grads["1/q"].astype(jnp.bfloat16)
    same(stacks.unstacked_tree(stacks.tree(grads), grads), grads)
    assert statistics_dtype(stacks.tree(grads)["0/q and 1 more"].dtype) == jnp.float32


def test_a_large_layer_stays_by_itself():
    wide = LARGEST_SIDE + 1
    alike = tuple(layer(f"{i}", (2, wide), a_dense=False, g_dense=False) for i in range(2))
    like = jax.eval_shape(lambda: random_factors(alike, jax.random.key(0)))
    assert len(Stacks.of(like).groups) == 2


@pytest.mark.exhaustive
def test_states_of_several_seeds_read_as_each():
    """``vmap`` puts an axis before that of a stack."""
    alike = tuple(layer(f"{i}/experts", (2, 3, 4), stack=1) for i in range(2))
    factors, params = random_factors(alike, jax.random.key(0)), tree(jax.random.key(1), None, alike)
    tx = kfac(0.1, like=factors, damping=0.1)
    scales = jnp.array([1.0, 2.0])  # as many as members, and as slices of each

    def step(scale):
        _, state = tx.update(params, tx.init(params), params, factors=scale * factors)
        return state

    together = jax.jit(jax.vmap(step))(scales)
    for i, scale in enumerate(scales):
        one = jax.jit(step)(scale)
        for name in ("average", "bases"):
            each = jax.tree.map(lambda x, i=i: x[i], getattr(together, name))
            for x, y in zip(*map(jax.tree.leaves, (each, getattr(one, name))), strict=True):
                assert jnp.allclose(jnp.abs(x), jnp.abs(y), rtol=1e-9, atol=1e-9)


def test_shapes_of_a_state_read_as_shapes(factors):
    params = tree(jax.random.key(1))
    state = jax.eval_shape(kfac(0.1, like=factors).init, params)
    shapes = lambda x: jax.tree.map(lambda leaf: leaf.shape, x)
    assert jax.tree.leaves(shapes(state.average)) == jax.tree.leaves(shapes(factors))
    assert state.bases.layers == factors.layers


@pytest.mark.slow
def test_a_state_of_before_there_were_stacks_is_refused(factors):
    params = tree(jax.random.key(1))
    tx = kfac(0.1, like=factors)
    state = tx.init(params)
    written = flax.serialization.to_state_dict(state)
    written |= {"average": {}, "bases": {}}
    with pytest.raises(ValueError, match="stacked_average"):
        flax.serialization.from_state_dict(
            state, {k: x for k, x in written.items() if not k.startswith("stack")}
        )
    with pytest.raises(ValueError, match="earlier version"):
        tx.update(
            params, state._replace(stacked_average=state.average, stacks=()), params, factors=None
        )
