"""Logits, gradients and answers of transformers' T5, on small random checkpoints written here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.jobs.models.encoder_decoder._blocks import buckets
from jaxkfac.models import Pairs, generate_targets, load_encoder_decoder, save_encoder_decoder
from tests._transformers import torch, transformers

BASE = {
    "vocab_size": 61,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CASES = {
    "version 1.0": {"feed_forward_proj": "relu"},
    "version 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated, tied and scaled": {"feed_forward_proj": "gated-gelu"},
    "relu, untied and not scaled": {"tie_word_embeddings": False, "num_decoder_layers": 3},
    "gated silu": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}
SOURCES, TARGETS, LENGTHS = 14, 9, (14, 6)  # beyond the distance that shares a bucket


def oracle(name):
    """A random model whose every parameter matters."""
    torch.manual_seed(0)
    options = CASES[name]
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**BASE, **options}))
    if "tie_word_embeddings" in options:  # transformers 5 ties all heads, and loads two tensors
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            scale = 1.0 if "relative_attention_bias" in path else 0.15
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


def pairs_of(seed=1):
    """Two sources, the second padded."""
    rng = np.random.default_rng(seed)
    source, target = (rng.integers(3, 61, size=(2, n)) for n in (SOURCES, TARGETS))
    mask = np.arange(SOURCES) < np.asarray(LENGTHS)[:, None]
    return Pairs(*(x.astype(t) for x, t in ((source, np.int32), (mask, bool), (target, np.int32))))


def tensors(pairs):
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return {n: torch.from_numpy(np.asarray(x, np.int64)) for n, x in zip(names, pairs)}


def logits_of(model, pairs):
    with torch.no_grad():
        return model(**tensors(pairs)).logits.numpy()


def assert_logits(ours, theirs):
    # The bound is the contract's; logits here have a spread of 1 to 4.
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    model, pairs = oracle(name), pairs_of()
    model.save_pretrained(tmp_path)
    theirs = logits_of(model, pairs)
    assert theirs.std() > 0.3
    loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32)
    assert_logits(jax.jit(loaded.apply_fn)(loaded.params, pairs), theirs)


@pytest.mark.slow
def test_shards_of_half_precision_are_read_as_transformers_reads_them(tmp_path):
    oracle("version 1.1").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="4kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    loaded, pairs = load_encoder_decoder(tmp_path, dtype=jnp.float32), pairs_of()
    assert_logits(jax.jit(loaded.apply_fn)(loaded.params, pairs), logits_of(model.eval(), pairs))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["version 1.0", "relu, untied and not scaled"])
def test_what_is_saved_is_what_transformers_reads(name, tmp_path):
    oracle(name).save_pretrained(tmp_path)
    loaded, pairs = load_encoder_decoder(tmp_path, dtype=jnp.float32), pairs_of()
    params = jax.tree.map(lambda x: 1.1 * x, loaded.params)
    save_encoder_decoder(tmp_path / "new", loaded._replace(params=params))
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert_logits(jax.jit(loaded.apply_fn)(params, pairs), logits_of(model.eval(), pairs))


@pytest.mark.parametrize(("num", "farthest"), [(32, 128), (16, 100), (8, 12), (6, 20)])
def test_buckets_equal_those_of_transformers(num, farthest):
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    distance = torch.arange(2 * farthest)
    theirs = bucket(-distance, bidirectional=False, num_buckets=num, max_distance=farthest)
    ours = buckets(num, farthest)[np.minimum(distance.numpy(), farthest)]
    np.testing.assert_array_equal(ours, theirs.numpy())


def _leaf(tree, path):
    return functools.reduce(lambda node, key: node[key], path.split("/"), tree)


def as_stored(tree, name):
    """Our leaf of one of transformers' parameters, in its layout."""
    stack, _, rest = name.partition(".block.")
    if "relative_attention_bias" in name:
        return _leaf(tree, f"{stack}/relative_attention_bias/embedding")
    module = name.removesuffix(".weight")
    if rest:
        number, _, inner = rest.removesuffix(".weight").partition(".")
        node = _leaf(tree, f"{stack}/block/{inner.replace('.', '/')}")
        return next(np.asarray(x)[int(number)].T for x in node.values())
    node = _leaf(tree, module.replace(".", "/"))
    return np.asarray(node["kernel"]).T if "kernel" in node else next(iter(node.values()))


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # optax's
@pytest.mark.parametrize("name", ["version 1.0", "version 1.1"])
def test_five_steps_of_adamw_have_the_gradients_of_transformers(name, tmp_path):
    model = oracle(name)
    model.save_pretrained(tmp_path)
    loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32)
    # An epsilon above the rounding of a gradient, which Adam would make a step of full length.
    options = {"weight_decay": 0.01, "eps": 1e-5}
    params, tx = loaded.params, optax.adamw(1e-3, **options)
    state = tx.init(params)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    @jax.jit
    def step(params, state, pairs, labels, mask):
        def loss(params):
            logits = loaded.apply_fn(params, pairs)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(each, where=mask)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    for number in range(5):
        pairs = pairs_of(number)
        labels = np.random.default_rng(number).integers(3, 61, size=(2, TARGETS), dtype=np.int32)
        mask = np.arange(TARGETS) < np.asarray([[TARGETS], [5]])
        params, state, value, grads = step(params, state, pairs, labels, mask)
        theirs.zero_grad()
        masked = torch.from_numpy(np.where(mask, labels, -100).astype(np.int64))
        loss = model(**tensors(pairs), labels=masked).loss
        loss.backward()
        theirs.step()
        np.testing.assert_allclose(value, loss.item(), atol=1e-4, rtol=0)
        for path, parameter in model.named_parameters():
            grad = parameter.grad.numpy()
            assert np.abs(grad).max() > 0, path
            # relative to the largest of the tensor
            bound = 1e-4 * np.abs(grad).max()
            np.testing.assert_allclose(as_stored(grads, path), grad, atol=bound, rtol=0)


def answers_of(model, sources, **options):
    """Of transformers, without the start and what is behind the end."""
    found = []
    for source in sources:
        asked = torch.tensor([source])
        mask = torch.ones_like(asked)
        with torch.no_grad():
            ids = model.generate(asked, attention_mask=mask, do_sample=False, **options)
        ids = ids[0, 1:].tolist()
        found.append(ids[: ids.index(1) + 1] if 1 in ids else ids)
    return found


BEAMS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "long ones preferred": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "short ones preferred": {"num_beams": 3, "length_penalty": -1.0},
    "until enough have ended": {"num_beams": 4, "early_stopping": True},
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", BEAMS)
def test_answers_equal_those_of_transformers(how, tmp_path):
    model = oracle("version 1.1")
    with torch.no_grad():  # ends that come early and late
        model.lm_head.weight[1] *= 2
    model.save_pretrained(tmp_path)
    loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 61, size=n).tolist() for n in (14, 3, 9, 6, 11, 2)]
    expected = answers_of(model, sources, max_new_tokens=12, **BEAMS[how])
    assert len({len(ids) for ids in expected}) > 1 and len(set(map(tuple, expected))) > 2
    assert generate_targets(loaded, sources, max_new_tokens=12, **BEAMS[how]) == expected
