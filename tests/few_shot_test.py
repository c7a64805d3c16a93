"""Few-shot training: episodes accumulate like a batch of them, and K-FAC trains them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.data.few_shot import Episodes, load_glyphs
from jaxkfac.models import Conv4, CosineTransformer, CosineTransformerConfig, PrototypicalNetwork
from tests._checks import assert_tree_close

WAY, SHOT, QUERIES = 3, 2, 2
EPISODES = Episodes(load_glyphs().train, WAY, SHOT, QUERIES, seed=3)


def build(name, width=4):
    rngs = nnx.Rngs(0)
    if name == "prototypes":
        return PrototypicalNetwork(Conv4(28, width=width, rngs=rngs))
    config = CosineTransformerConfig(WAY, SHOT, num_heads=2, head_size=4, hidden=8)
    return CosineTransformer(Conv4(28, width=width, rngs=rngs), config, rngs=rngs)


def drawn(number, count, dtype):
    support, query, targets = EPISODES.at(number, count)
    return (support.astype(dtype), query.astype(dtype)), targets


@pytest.mark.standard_promotion  # flax.nnx.LayerNorm in float64
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["prototypes", "cosine"])
def test_accumulated_episodes_are_one_batch_of_them(x64, name):
    """Gradient, factors and the optimizer's step; only the running statistics go in turns."""
    apply_fn, params = jk.from_nnx(build(name), mutable=nnx.BatchStat)
    params, held = jax.tree.map(lambda x: x.astype(float), (params, apply_fn.state))
    stats = jax.jit(jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical())))
    batch, parts = drawn(0, 2, float), [drawn(n, 1, float) for n in range(2)]
    like = stats(params, batch, state=held).factors
    # SGD in disguise: so much damping that no eigenvalue is divided by rounding
    kfac = jk.kfac(0.1, like=like, damping=1.0, refresh_every=1)
    whole, cut = jk.multi_steps(kfac, 1), jk.multi_steps(kfac, 2)

    def step(tx, params, state, batch):
        _, grads, factors = stats(params, batch, state=held)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    expected, _ = step(whole, params, whole.init(params), batch)
    found, state = params, cut.init(params)
    for part in parts:
        found, state = step(cut, found, state, part)
    assert_tree_close(found, expected, 1e-10)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), expected, params)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.exhaustive
def test_kfac_of_drawn_labels_fits_its_episodes():
    apply_fn, params = jk.from_nnx(build("prototypes", width=8), mutable=nnx.BatchStat)
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()), fisher="mc")
    held, batch = apply_fn.state, jax.tree.map(jnp.asarray, drawn(0, 2, np.float32))
    like = stats.factor_shapes(params, batch, state=held)
    tx = jk.kfac(3e-2, like=like, damping=1e-2, norm_constraint=1e-2)

    @jax.jit
    def step(params, held, state, key):
        (value, held), grads, factors = stats(params, batch, key, state=held)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), held, state, value

    state, values = tx.init(params), []
    for number in range(20):
        params, held, state, value = step(params, held, state, jax.random.key(number))
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]
    assert int(state.skipped) == 0
