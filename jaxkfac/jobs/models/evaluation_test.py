"""Requests as lm-eval sends them, against the whole function token by token."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkfac.flax import from_nnx
from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.jobs.models.decoder import Decoder, DecoderConfig, generate
from jaxkfac.jobs.models.evaluation import Requests, lm_eval_model
from jaxkfac.lslora import Config, attach, init

CONFIG = DecoderConfig(
    vocabulary=31, width=16, hidden=24, depth=2, num_heads=2, num_kv_heads=1, head_size=8,
    context=20, sliding_window=7,
)  # fmt: skip


class Letters:
    """A token for each letter, from 1; "<" begins a text."""

    eos_ids, bos_id, eos_id, pad_id = (29,), 28, 29, 0

    def encode(self, text, *, add_special_tokens=True):
        ids = [28 if c == "<" else 27 if c == " " else ord(c) - ord("a") + 1 for c in text]
        return [28, *ids] if add_special_tokens else ids

    def decode(self, ids, *, skip_special_tokens=True):
        special = {28: "<", 29: ">"} if not skip_special_tokens else {28: "", 29: ""}
        words = {0: "_", 27: " ", 30: "#", **special}
        return "".join(words[i] if i in words else chr(i + ord("a") - 1) for i in ids)


@pytest.fixture(scope="module")
def pretrained():
    apply_fn, params = from_nnx(Decoder(CONFIG, remat=False, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, jax.tree.map(lambda x: 3 * x, params), Letters())


def asked(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def brute(logits_of, given, scored):
    """Nats of the scored tokens, and whether each is the likeliest."""
    ids = [*given, *scored]
    logits = np.asarray(logits_of(jnp.asarray([ids[:-1]])), np.float64)[0]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = range(len(given) - 1, len(ids) - 1)
    best = all(logits[t].argmax() == ids[t + 1] for t in rows)
    return sum(logs[t, ids[t + 1]] for t in rows), best


def base(pretrained):
    return lambda ids: pretrained.apply_fn(pretrained.params, ids)


@pytest.mark.slow
def test_likelihoods_of_continuations_are_those_of_the_whole_function(pretrained):
    pairs = [("ab", "cd"), ("", "xyz"), ("hello ", "you"), ("", "<ab"), ("<ab", "c"), ("q", "r")]
    rows = [
        ([28, 1, 2], [3, 4]),
        ([28], [24, 25, 26]),
        ([28, 8, 5, 12, 12, 15], [27, 25, 15, 21]),
        ([28], [1, 2]),
        ([28, 1, 2], [3]),
        ([28, 17], [18]),
    ]
    long = ("a" * 30, "bcd")  # the beginning of what does not fit is left out
    rows.append(([1] * 18, [2, 3, 4]))
    found = Requests(pretrained, None, None, 3).loglikelihood(asked(*pairs, long))
    for (total, greedy), row in zip(found, rows, strict=True):
        expected, best = brute(base(pretrained), *row)
        assert total == pytest.approx(expected, abs=1e-4) and greedy == best
    first = int(pretrained.apply_fn(pretrained.params, jnp.asarray([[28, 1, 2]]))[0, -1].argmax())
    likeliest = Letters().decode([first], skip_special_tokens=False)
    assert Requests(pretrained, None, None, 3).loglikelihood(asked(("ab", likeliest)))[0][1]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [0, 1, 19, 20, 47])
def test_a_text_longer_than_the_context_is_scored_in_windows(pretrained, length):
    """Every token once, the last window with as many tokens before it as fit."""
    text = "abcdefghijklmnopqrstuvwxyz"[: length % 26] + "m" * (length - length % 26)
    ids = [28, *Letters().encode(text, add_special_tokens=False)]
    expected, start = 0.0, 0
    while start < len(ids):
        stop = min(start + 20, len(ids))
        given = [28] if start == 0 else ids[stop - 21 : start]
        expected += brute(base(pretrained), given, ids[start:stop])[0]
        start = stop
    (found,) = Requests(pretrained, None, None, 2).loglikelihood_rolling(asked((text,)))
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)


@pytest.mark.slow
def test_answers_end_before_the_strings_that_end_them(pretrained):
    model = Requests(pretrained, None, None, 2)
    prompts = ("ab", "xyz", "abcdefghijklmnopqrstuvwxyz")
    plain = model.generate_until(asked(*((p, {"max_gen_toks": 6}) for p in prompts)))
    for prompt, answer in zip(prompts, plain, strict=True):
        ids = Letters().encode(prompt)[-14:]
        assert answer == Letters().decode(generate(pretrained, ids, max_new_tokens=6))
    end = plain[0][2]
    options = {"max_gen_toks": 6, "until": [end]}
    ended = model.generate_until(asked(("xyz", {"max_gen_toks": 6}), ("ab", options)))
    assert ended == [plain[1], plain[0].split(end)[0]]
    assert model.generate_until(asked(("ab", options | {"until": end}))) == ended[1:]


@pytest.mark.parametrize("options", [{"max_gen_toks": 20}, {"do_sample": True}])
def test_requests_that_cannot_be_answered_are_refused(pretrained, options):
    with pytest.raises(ValueError, match="expected greedy answers within 20"):
        Requests(pretrained, None, None, 2).generate_until(asked(("ab", options)))


@pytest.mark.exhaustive
def test_an_adapted_model_is_evaluated_with_its_adapters(pretrained):
    config = Config(rank=2, target=".*_proj/kernel")
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    fresh = init(pretrained.apply_fn, config, pretrained.params, ids, key=jax.random.key(0))
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape, x.dtype)
    adapters, adapted = jax.tree.map(noise, fresh), attach(pretrained.apply_fn, config)
    model = Requests(pretrained, adapted, adapters, 2)
    plain = Requests(pretrained, None, None, 2)
    (found, _), (first, _) = (x.loglikelihood(asked(("ab", "cd")))[0] for x in (model, plain))
    expected, _ = brute(lambda ids: adapted(pretrained.params, adapters, ids), [28, 1, 2], [3, 4])
    assert found == pytest.approx(expected, abs=1e-4) and abs(found - first) > 1e-2
    prompt = (("ab", {"max_gen_toks": 4}),)
    ids = generate(pretrained, [28, 1, 2], max_new_tokens=4, adapted=adapted, adapters=adapters)
    assert model.generate_until(asked(*prompt)) == [Letters().decode(ids)]


def test_without_lm_eval_it_says_what_to_install(pretrained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxkfac\[eval\]"'):
        lm_eval_model(pretrained)
