"""Targets equal what the whole function says token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Pairs,
    Pretrained,
    generate_targets,
)

CONFIG = EncoderDecoderConfig(
    vocabulary=31, width=16, hidden=24, encoder_depth=2, decoder_depth=3, num_heads=2,
    head_size=6, num_buckets=4, max_distance=5,
)  # fmt: skip
SOURCES = [[5, 6, 7], list(range(8, 20))]
ADAPTERS = jk.lslora.Config(rank=2, target=r".*Attention/[kv]/kernel")


@functools.cache
def model():
    apply_fn, params = jk.from_nnx(EncoderDecoder(CONFIG, rngs=nnx.Rngs(1)))
    return Pretrained(CONFIG, apply_fn, jax.tree.map(lambda x: 3 * x, params), None)


def by_argmax(read, source, steps):
    """One full forward pass for each token."""
    ids = [CONFIG.start_id]
    for _ in range(steps):
        padded = jnp.asarray([ids + [0] * (steps - len(ids))], jnp.int32)
        logits = read(Pairs(jnp.asarray([source], jnp.int32), None, padded))
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    return ids[1:]


@pytest.mark.slow
def test_targets_are_the_argmax_of_the_full_forward():
    pretrained = model()
    read = jax.jit(functools.partial(pretrained.apply_fn, pretrained.params))
    answers = generate_targets(pretrained, SOURCES, max_new_tokens=6)
    assert answers == [by_argmax(read, source, 6) for source in SOURCES]
    assert answers[0] != answers[1] and len(set(answers[1])) > 1


@pytest.mark.exhaustive
def test_adapted_targets_are_those_of_the_adapted_forward():
    apply_fn, params = model()[1:3]
    pairs = Pairs(jnp.zeros((1, 3), int), None, jnp.zeros((1, 2), int))
    adapters = jk.lslora.init(apply_fn, ADAPTERS, params, pairs, key=jax.random.key(0))
    noise = lambda x: x + 0.5 * jax.random.normal(jax.random.key(1), x.shape, x.dtype)
    adapters = jax.tree.map(noise, adapters)
    adapted = jk.lslora.attach(apply_fn, ADAPTERS)
    options = {"max_new_tokens": 4, "adapted": adapted, "adapters": adapters}
    answers = generate_targets(model(), SOURCES, **options)
    read = jax.jit(lambda pairs: adapted(params, adapters, pairs))
    assert answers == [by_argmax(read, source, 4) for source in SOURCES]
    assert answers != generate_targets(model(), SOURCES, max_new_tokens=4)


@pytest.mark.exhaustive
def test_saved_adapters_load_onto_the_model(tmp_path):
    apply_fn, params = model()[1:3]
    pairs = Pairs(jnp.zeros((1, 3), int), None, jnp.zeros((1, 2), int))
    adapters = jk.lslora.init(apply_fn, ADAPTERS, params, pairs, key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.5, adapters)
    jk.lslora.save(tmp_path, adapters, ADAPTERS)
    for found, config in (jk.lslora.load(tmp_path), jk.lslora.load(tmp_path, model=model())):
        read = jk.lslora.attach(apply_fn, config)(params, found, pairs)
        expected = jk.lslora.attach(apply_fn, ADAPTERS)(params, adapters, pairs)
        np.testing.assert_allclose(read, expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_drawn_targets_follow_the_key_and_the_temperature():
    draw = functools.partial(generate_targets, model(), SOURCES, max_new_tokens=5)
    keys = jax.random.split(jax.random.key(0), 2)
    one, again, other = (draw(temperature=2.0, key=key) for key in (keys[0], keys[0], keys[1]))
    assert one == again != other
    assert draw(temperature=2.0, key=keys[0], top_k=1) == draw()


@pytest.mark.slow
def test_what_cannot_be_generated_is_refused():
    pretrained = model()
    for options, message in (
        ({"temperature": 1.0}, "temperature=1.0: expected 0, or more with a key"),
        ({"temperature": 1.0, "key": jax.random.key(0), "num_beams": 2}, "num_beams and a temp"),
        ({"num_beams": 0}, "num_beams"),
        ({"adapters": {}}, r"adapted=jk.lslora.attach"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_targets(pretrained, SOURCES, **options)
    for sources, message in (([[]], "got no tokens"), ([[31]], "got ids from 31 to 31")):
        with pytest.raises(ValueError, match=message):
            generate_targets(pretrained, sources)
    with pytest.raises(TypeError, match="sources: expected several"):
        generate_targets(pretrained, "a text")
    with pytest.raises(ValueError, match="without a tokenizer: give token ids"):
        generate_targets(pretrained, ["a text"])
    broken = pretrained._replace(params=jax.tree.map(lambda x: x * np.nan, pretrained.params))
    with pytest.raises(ValueError, match=r"logits of sources \[0, 1\] are not finite"):
        generate_targets(broken, SOURCES, max_new_tokens=2)
    assert generate_targets(pretrained, []) == []
