"""What a decoder promises beside its numbers: segments, windows, caches, coverage."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import Cached, Decoder, DecoderConfig, Rotary, Tokens, empty_cache
from jaxkfac.lslora import module_name

CONFIG = DecoderConfig(
    vocabulary=61,
    width=16,
    hidden=24,
    depth=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    context=64,
)
WINDOW = dataclasses.replace(CONFIG, sliding_window=4)
LONG = dataclasses.replace(
    CONFIG,
    rotary=Rotary(
        kind="longrope",
        original_context=7,
        short_factor=(1.0, 1.1, 1.2),
        long_factor=(3.0, 4.0, 9.0),
        attention_factor=1.2,
    ),
)
DYNAMIC = dataclasses.replace(
    CONFIG, rotary=Rotary(kind="dynamic", original_context=7, factor=4.0, theta=50)
)
# What Gemma and Qwen have beyond the others, together.
MIXED = dataclasses.replace(
    WINDOW,
    windowed=(True, False, True),
    local_rotary=Rotary(theta=50.0),
    qkv_bias=True,
    head_norms=True,
    post_norms=True,
    unit_offset=True,
    activation="gelu_pytorch_tanh",
    embedding_scale=4.0,
    attention_scale=0.3,
    attention_softcap=0.5,
    logit_softcap=2.0,
    tied_head=True,
)
CONFIGS = {"mixed": MIXED, "all": CONFIG, "window": WINDOW, "longrope": LONG, "dynamic": DYNAMIC}


@functools.cache
def built(config=CONFIG, **options):
    """Weights large enough for a wrong mask or angle to show; compiled once for all tests."""
    apply_fn, params = jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0), **options))
    return jax.jit(apply_fn), jax.tree.map(lambda x: 2 * x, params)


def ids_of(rows, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, CONFIG.vocabulary)


def close(a, b, tolerance=1e-5):
    """Within a part of the largest: rounding of a sum is relative to its terms."""
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["all", "longrope", "dynamic", "mixed"])
def test_two_texts_in_one_row_equal_two_rows(name):
    apply_fn, params = built(CONFIGS[name])
    a, b = ids_of(1, 9), ids_of(1, 5, seed=2)
    packed = Tokens(
        jnp.concatenate([a, b, jnp.zeros((1, 2), jnp.int32)], 1),
        jnp.asarray([[*range(9), *range(5), 0, 0]]),
        jnp.asarray([[1] * 9 + [2] * 5 + [0] * 2]),
    )
    logits = apply_fn(params, packed)
    close(logits[:, :9], apply_fn(params, a))
    close(logits[:, 9:14], apply_fn(params, b))
    assert bool(jnp.isfinite(logits).all())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["all", "window", "longrope", "mixed"])
def test_padding_on_either_side_changes_nothing(name):
    apply_fn, params = built(CONFIGS[name])
    ids = ids_of(2, 6)
    alone = apply_fn(params, ids)
    noise = ids_of(2, 3, seed=5)
    mark = jnp.concatenate([jnp.ones((2, 6), jnp.int32), jnp.zeros((2, 3), jnp.int32)], 1)
    places = jnp.broadcast_to(jnp.arange(9), (2, 9))
    right = Tokens(jnp.concatenate([ids, noise], 1), places, mark)
    close(apply_fn(params, right)[:, :6], alone)
    left = Tokens(jnp.concatenate([noise, ids], 1), jnp.maximum(places - 3, 0), mark[:, ::-1])
    close(apply_fn(params, left)[:, 3:], alone)


@pytest.mark.slow
def test_a_token_depends_on_no_later_one_and_on_none_before_its_window():
    for config, first in ((CONFIG, 0), (dataclasses.replace(WINDOW, depth=1), 5)):
        apply_fn, params = built(config)
        ids = ids_of(1, 12)
        changed = [
            float(
                jnp.abs(apply_fn(params, ids.at[0, t].add(1)) - apply_fn(params, ids))[0, 8].max()
            )
            for t in range(12)
        ]
        assert all(changed[t] > 1e-4 for t in range(first, 9)), changed
        assert max(changed[:first], default=0) == 0 and max(changed[9:]) == 0


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_gives_what_reading_everything_gives(name):
    """Where angles follow the length, what a text of the length it may reach gives."""
    config = CONFIGS[name]
    apply_fn, params = built(config)
    ids = ids_of(2, 10)
    whole = apply_fn(params, ids)
    cache = empty_cache(config, 2, 12, jnp.float32, lengths=jnp.full(2, 10))
    logits, cache = apply_fn(params, Cached(Tokens(ids[:, :4]), cache))
    for t in range(4, 11):
        close(logits, whole[:, t - 1])
        if t < 10:
            logits, cache = apply_fn(params, Cached(Tokens(ids[:, t : t + 1]), cache))
    assert int(cache.filled) == 10


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", ["mixed", "all blocks"])
def test_blocks_with_and_without_the_window_see_what_theirs_says(window):
    """In two blocks of which one sees 4 places and one sees all, everything reaches the last."""
    config = dataclasses.replace(MIXED, depth=2, windowed=(True, False))
    if window == "all blocks":
        config = dataclasses.replace(config, windowed=None)
    apply_fn, params = built(config)
    ids = ids_of(1, 12)
    change = lambda t: apply_fn(params, ids.at[0, t].add(1)) - apply_fn(params, ids)
    seen = [float(jnp.abs(change(t))[0, 11].max()) > 0 for t in range(12)]
    assert seen == ([True] * 12 if window == "mixed" else [False] * 5 + [True] * 7)


@pytest.mark.exhaustive
def test_half_precision_stays_half_and_close():
    apply_fn, params = built(MIXED)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ids = ids_of(2, 8)
    logits = apply_fn(half, ids)
    assert logits.dtype == jnp.bfloat16
    close(logits.astype(jnp.float32), apply_fn(params, ids), 0.1)


def test_flash_attention_is_refused_where_it_has_no_soft_caps():
    with pytest.raises(ValueError, match="'cudnn' has no soft-capping"):
        Decoder(MIXED, attention="cudnn", rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_long_text_has_other_angles_than_a_short_one():
    for config in (LONG, DYNAMIC):
        apply_fn, params = built(config)
        ids = ids_of(1, 9)
        short, long = apply_fn(params, ids[:, :7]), apply_fn(params, ids)[:, :7]
        assert float(jnp.abs(short - long).max()) > 1e-2


@pytest.mark.slow
def test_positions_and_segments_of_a_narrow_dtype_are_those_of_32_bits():
    """The length of a text is the largest position of its segment, else -1, which is 255."""
    apply_fn, params = built(LONG)
    ids, places = ids_of(1, 9), np.arange(9)[None] % 5
    segments = 1 + np.arange(9)[None] // 5
    read = lambda dtype: apply_fn(
        params, Tokens(ids, *(x.astype(dtype) for x in (places, segments)))
    )
    wide = read(np.int32)
    for dtype in (np.uint8, np.int8, np.uint16):
        np.testing.assert_array_equal(read(dtype), wide)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_covered_and_blocks_are_stacked(tied):
    config = dataclasses.replace(CONFIG, tied_head=tied, attention_bias=True, mlp_bias=True)
    apply_fn, params = jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0)))
    ids = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    table = jk.find_layers(apply_fn, params, ids)
    assert table.uncovered == []
    stacked = [layer for layer in table.layers if layer.name.startswith("model/layers/")]
    assert len(stacked) == 6 and {layer.stack for layer in stacked} == {(3,)}
    assert table["model/layers/self_attn/qkv_proj/kernel"].bias is not None
    cache = jax.eval_shape(lambda: empty_cache(config, 2, 8, jnp.float32))
    assert jk.find_layers(apply_fn, params, Cached(Tokens(ids), cache)).uncovered == []


def test_paths_give_the_modules_of_hugging_face():
    _, params = built()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert {module_name(p, (2,) if "layers" in p else ()) for p in paths} == {
        "model.embed_tokens",
        "model.layers.2.input_layernorm",
        "model.layers.2.self_attn.qkv_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.post_attention_layernorm",
        "model.layers.2.mlp.gate_up_proj",
        "model.layers.2.mlp.down_proj",
        "model.norm",
        "lm_head",
    }


@pytest.mark.slow
def test_curvature_of_padded_and_packed_rows():
    """One backward pass through scan, remat and attention; padding is in no factor."""
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    ids = ids_of(2, 6)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]])
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]])
    real = segments > 0
    objective = jk.Objective(apply_fn, jk.Categorical())
    stats = jax.jit(jk.value_grad_and_factors(objective, layers=r"model/layers/.*kernel"))
    batch = (Tokens(ids, positions, segments), ids, real)
    value, grads, factors = stats(params, batch, positions=real)
    loss, gradient = jax.jit(jax.value_and_grad(objective))(params, batch)
    close(value, loss)
    jax.tree.map(lambda a, b: close(a, b, 1e-6), grads, gradient)
    other = (Tokens(ids.at[1, 4:].set(7), positions, segments), ids, real)
    _, _, same = stats(params, other, positions=real)
    for name in factors:
        close(factors[name].a, same[name].a, 1e-6)
        close(factors[name].g, same[name].g, 1e-6)


@pytest.mark.exhaustive
def test_remat_changes_neither_value_nor_gradient():
    ids = ids_of(2, 6)
    results = []
    for remat in (False, True):
        apply_fn, params = built(remat=remat)
        loss = lambda params, f=apply_fn: jnp.mean(f(params, ids) ** 2)
        results.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), *results)


@pytest.mark.slow
def test_parameters_in_bfloat16_compute_in_bfloat16():
    apply_fn, params = built()
    ids = ids_of(2, 6)
    small = apply_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), ids)
    assert small.dtype == jnp.bfloat16
    whole = apply_fn(params, ids)
    close(small.astype(jnp.float32), whole, 0.05)


def test_inputs_of_a_wrong_form_are_refused_with_their_shape():
    apply_fn, params = built()
    with pytest.raises(ValueError, match=r"ids: expected integers of shape \(B, T\).*\(5,\)"):
        apply_fn(params, Tokens(jnp.zeros(5, jnp.int32)))
    with pytest.raises(ValueError, match=r"segments: expected .*\(2, 5\), got \(2, 4\)"):
        apply_fn(params, Tokens(jnp.zeros((2, 5), int), None, jnp.ones((2, 4), int)))
