"""Answers equal what the whole function says token by token."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import Decoder, DecoderConfig, Pretrained, generate

CONFIG = DecoderConfig(
    vocabulary=61,
    width=16,
    hidden=24,
    depth=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    context=64,
    sliding_window=6,
)
PROMPTS = [[5, 6, 7], list(range(8, 20))]


@functools.cache
def model(config=CONFIG):
    apply_fn, params = jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0)))
    return Pretrained(config, apply_fn, jax.tree.map(lambda x: 3 * x, params), None)


def by_argmax(read, prompt, steps, *operands):
    """One full forward pass for each token, over one padded length."""
    ids = list(prompt)
    for _ in range(steps):
        row = np.zeros((1, 32), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(read(*operands, row)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_greedy_answers_are_the_argmax_of_the_full_forward():
    pretrained = model()
    answers = generate(pretrained, PROMPTS, max_new_tokens=9)
    read = jax.jit(pretrained.apply_fn)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == by_argmax(read, prompt, 9, pretrained.params)
    assert len({tuple(answer) for answer in answers}) == 2
    assert generate(pretrained, PROMPTS[0], max_new_tokens=9) == answers[0]
    for array in (np.asarray(PROMPTS[0]), jnp.asarray(PROMPTS[0]), jnp.asarray(PROMPTS[:1])):
        found = generate(pretrained, array, max_new_tokens=9)
        assert found == (answers[0] if array.ndim == 1 else answers[:1])


def adapters_of(pretrained, config, seed):
    ids = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    found = jk.lslora.init(
        pretrained.apply_fn, config, pretrained.params, ids, key=jax.random.key(seed)
    )
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
    return jax.tree.map(noise, found)


@functools.cache
def pair():
    """The adapted model, and two of its adapters."""
    pretrained = model()
    config = jk.lslora.Config(rank=2, alpha=4.0, target=r"model/layers/.*/kernel")
    a, b = (adapters_of(pretrained, config, seed) for seed in (1, 2))
    return jk.lslora.attach(pretrained.apply_fn, config), a, b


@pytest.mark.exhaustive
def test_adapters_answer_through_the_same_program():
    pretrained, (adapted, a, b) = model(), pair()
    answers, read = {}, jax.jit(adapted)
    for name, own in (("a", a), ("b", b)):
        options = {"max_new_tokens": 5, "adapted": adapted, "adapters": own}
        answers[name] = generate(pretrained, PROMPTS, **options)
        expected = by_argmax(read, PROMPTS[0], 5, pretrained.params, own)
        assert answers[name][0] == expected
    assert answers["a"] != answers["b"]
    bank = jk.lslora.stack({"a": a, "b": b})
    rows = jnp.asarray([1, 0])
    mixed = generate(
        pretrained, PROMPTS, max_new_tokens=5, adapted=adapted, adapters=bank, adapter=rows
    )
    assert mixed == [answers["b"][0], answers["a"][1]]
    options = {"max_new_tokens": 5, "adapted": adapted, "adapters": bank}
    assert generate(pretrained, PROMPTS, **options, adapter=[1, 0]) == mixed
    base = generate(pretrained, PROMPTS, max_new_tokens=5)
    assert generate(pretrained, PROMPTS, **options, adapter=[0, -1]) == [answers["a"][0], base[1]]
    a_nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), a)
    broken = options | {"adapters": jk.lslora.stack({"a": a_nan, "b": b})}
    with pytest.raises(ValueError, match=r"logits of prompts \[1\] are not .* and the adapters"):
        generate(pretrained, PROMPTS, **broken, adapter=rows)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (5, "adapter=5: expected indices from -1 to 1"),
        ([0, 2], r"adapter=\[0, 2\]: expected indices"),
        (jnp.asarray(-2), "adapter=-2: expected indices"),
        (0.0, r"expected an integer, .* got float64\[\]"),
        (None, "a bank needs the slot's index"),
    ],
)
def test_an_adapter_that_the_bank_does_not_hold_is_refused(adapter, message):
    adapted, a, b = pair()
    options = {"adapted": adapted, "adapters": jk.lslora.stack({"a": a, "b": b})}
    with pytest.raises(ValueError, match=message):
        generate(model(), PROMPTS, max_new_tokens=5, **options, adapter=adapter)


@pytest.mark.slow
def test_an_answer_ends_with_an_end_token_and_others_go_on():
    pretrained = model()
    first, second = generate(pretrained, PROMPTS, max_new_tokens=9)
    end = next(i for i in first[1:] if i not in second)
    config = dataclasses.replace(CONFIG, eos_ids=(60, end))
    stopped = generate(pretrained._replace(config=config), PROMPTS, max_new_tokens=9)
    assert stopped == [first[: first.index(end) + 1], second]


@pytest.mark.slow
def test_drawing_follows_the_key_and_the_temperature():
    pretrained = model()
    draw = lambda seed, t: generate(
        pretrained, PROMPTS, max_new_tokens=9, temperature=t, key=jax.random.key(seed)
    )
    assert draw(1, 1.0) == draw(1, 1.0)
    assert len({str(draw(seed, 5.0)) for seed in range(4)}) == 4
    assert draw(1, 1e-4) == generate(pretrained, PROMPTS, max_new_tokens=9)


class Letters:
    """A tokenizer of one letter per token."""

    eos_ids = ()

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join(chr(i + ord("a")) for i in ids)


@pytest.mark.slow
def test_a_text_is_answered_with_a_text():
    pretrained = model()._replace(tokenizer=Letters())
    ids = generate(pretrained, [5, 6, 7], max_new_tokens=9)
    assert generate(pretrained, "fgh", max_new_tokens=9) == Letters().decode(ids)
    assert generate(pretrained, ["fgh", "i"], max_new_tokens=9)[0] == Letters().decode(ids)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 60, {}, "60 tokens and 9 new ones do not fit the context of 64: ask for at most 4"),
        ([1] * 65, {}, "65 tokens .* the context of 64: shorten it"),
        ([], {}, "no tokens"),
        ([5, 61], {}, r"expected ids in \[0, 61\), got ids from 5 to 61"),
        ("text", {}, "without a tokenizer"),
        (jnp.ones(3), {}, r"an array of integers, .* got float32\[3\]"),
        (np.asarray(5), {}, r"an array of integers, .* got int64\[\]"),
        ([5], {"temperature": 0.5}, "temperature=0.5: expected 0, or more with a key"),
        ([5], {"temperature": math.nan}, "temperature=nan: expected 0, or more with a key"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([5], {"adapters": {}}, "give adapted="),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_numbers(prompt, options, message):
    pretrained = Pretrained(CONFIG, None, {}, None)
    with pytest.raises(ValueError, match=message):
        generate(pretrained, prompt, **{"max_new_tokens": 9, **options})
