"""Layouts have the known numbers of parameters, and their programs run."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception import find_layers
from jaxkfac.planning import DecoderLayout, EncoderDecoderLayout, preset, shaped


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-1b", 1.26e9),
        ("llama-7b", 6.74e9),
        ("phi-3-mini", 3.82e9),
        ("t5-xl", 2.85e9),
        ("flan-t5-xl", 2.85e9),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, total):
    training = preset(name, examples=1, tokens=8, dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(training.params)
    assert sum(math.prod(x.shape) for x in leaves) == pytest.approx(total, rel=0.01)
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        DecoderLayout(2, 8, 2, 12, 11, fused=False),
        DecoderLayout(2, 8, 2, 12, 11, fused=True),
        EncoderDecoderLayout(2, 8, 2, 12, 11),
    ],
    ids=["decoder", "fused", "encoder-decoder"],
)
def test_a_layouts_program_runs_and_every_parameter_is_in_a_layer(layout):
    objective, params, batch = shaped(layout, examples=2, tokens=5)
    table = find_layers(objective.apply_fn, params, batch[0])
    assert not table.uncovered and table.num_covered == sum(table.sizes.values())
    keys = iter(jax.random.split(jax.random.key(0), 64))
    filled = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), params)
    ids = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape) % 11, batch)
    value, grads = jax.jit(jax.value_and_grad(objective))(filled, ids)
    assert jnp.isfinite(value)
    assert all(bool((g != 0).any()) for g in jax.tree.leaves(grads))
    if isinstance(layout, DecoderLayout):  # no position sees what comes after it
        logits = objective.apply_fn(filled, ids[0])
        changed = objective.apply_fn(filled, ids[0].at[:, 3].set(7))
        assert (logits[:, :3] == changed[:, :3]).all() and (logits[:, 3:] != changed[:, 3:]).any()


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="preset='lama-7b' is not known.*'llama-7b'"):
        preset("lama-7b", examples=1, tokens=8)
