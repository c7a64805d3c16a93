"""What an encoder-decoder promises beside its numbers: padding, coverage, adapters, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import EncoderDecoder, EncoderDecoderConfig, Pairs
from jaxkfac.lslora import module_name

CONFIG = EncoderDecoderConfig(
    vocabulary=31,
    width=16,
    hidden=24,
    encoder_depth=2,
    decoder_depth=3,
    num_heads=2,
    head_size=6,
    num_buckets=4,
    max_distance=5,
)
FLAN = dataclasses.replace(
    CONFIG, gated=True, activation="gelu_new", tied_head=False, scaled_head=False
)
MASK = jnp.arange(6) < jnp.asarray([[6], [4]])


@functools.cache
def built(config=CONFIG, **options):
    """Weights large enough for a wrong mask to show; compiled once for all tests."""
    apply_fn, params = jk.from_nnx(EncoderDecoder(config, rngs=nnx.Rngs(0), **options))
    return jax.jit(apply_fn), params


def pairs_of(padding=0):
    """Two sources, the second padded with the token given."""
    source, target = (
        jax.random.randint(jax.random.key(seed), (2, n), 0, CONFIG.vocabulary)
        for seed, n in ((1, 6), (2, 5))
    )
    return Pairs(jnp.where(MASK, source, padding), MASK, target)


def close(a, b, tolerance=1e-5):
    """Within a part of the largest: rounding of a sum is relative to its terms."""
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.exhaustive
def test_padding_of_the_source_changes_nothing_and_so_does_none():
    apply_fn, params = built()
    logits = apply_fn(params, pairs_of())
    close(apply_fn(params, pairs_of(padding=7)), logits)
    second = Pairs(*(x[1:] for x in pairs_of()))
    shorter = Pairs(second.source[:, :4], None, second.decoder_inputs)
    close(apply_fn(params, shorter), logits[1:])


@pytest.mark.slow
def test_a_token_depends_on_the_whole_source_and_on_no_later_token():
    apply_fn, params = built()
    source, _, target = pairs_of()
    pairs = Pairs(source[:1], None, target[:1])
    logits = apply_fn(params, pairs)

    def change(**moved):
        return jnp.abs(apply_fn(params, pairs._replace(**moved)) - logits)[0].max(-1)

    for place in range(6):
        assert float(change(source=pairs.source.at[0, place].add(1)).min()) > 1e-5
    for place in range(5):
        moved = change(decoder_inputs=pairs.decoder_inputs.at[0, place].add(1))
        assert float(moved[place:].min()) > 1e-5 and not moved[:place].any()


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, FLAN], ids=["version 1.0", "FLAN"])
def test_every_parameter_is_covered_and_blocks_are_stacked(config):
    apply_fn, params = jk.from_nnx(EncoderDecoder(config, rngs=nnx.Rngs(0)))
    table = jk.find_layers(apply_fn, params, pairs_of())
    assert table.uncovered == []
    stacks = {layer.name.partition("/block/")[0]: layer.stack for layer in table.layers}
    assert stacks["encoder"] == (2,) and stacks["decoder"] == (3,)
    across = table["decoder/block/layer/1/EncDecAttention/v/kernel"]
    assert across.shares_input_with == "decoder/block/layer/1/EncDecAttention/k/kernel"


def test_paths_give_the_modules_of_hugging_face():
    _, params = built(FLAN)
    leaves = jax.tree_util.tree_leaves_with_path(params["decoder"]["block"])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    found = {module_name(f"decoder/block/{p}", (2,)) for p in paths}
    attention = {
        f"{module}.{x}" for module in ("0.SelfAttention", "1.EncDecAttention") for x in "qkvo"
    }
    norms = {f"{i}.layer_norm" for i in range(3)}
    forward = {f"2.DenseReluDense.{x}" for x in ("wi_0", "wi_1", "wo")}
    assert found == {f"decoder.block.2.layer.{x}" for x in attention | norms | forward}


def same_factors(objective, params, **call):
    """Whether factors know the padding of the source: they do not follow its tokens."""
    stats = jax.jit(jk.value_grad_and_factors(objective))
    labels = pairs_of().decoder_inputs
    *_, factors = stats(params, (pairs_of(), labels), **call)
    *_, others = stats(params, (pairs_of(padding=7), labels), **call)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), factors, others
    )
    return factors


@pytest.mark.slow
def test_factors_leave_padding_of_the_source_out():
    apply_fn, params = built()
    objective = jk.Objective(apply_fn, jk.Categorical())
    counts = same_factors(objective, params).a_counts
    assert float(counts["encoder/block/layer/1/DenseReluDense/wo/kernel"][0]) == 10
    assert float(counts["decoder/block/layer/1/EncDecAttention/k/kernel"][0]) == 10
    assert float(counts["decoder/block/layer/1/EncDecAttention/q/kernel"][0]) == 10
    target = jnp.arange(5) < jnp.asarray([[3], [4]])
    counts = same_factors(objective, params, positions=target).a_counts
    assert float(counts["encoder/block/layer/1/DenseReluDense/wo/kernel"][0]) == 10
    assert float(counts["decoder/block/layer/2/DenseReluDense/wo/kernel"][0]) == 7


@pytest.mark.exhaustive
def test_adapters_leave_padding_of_the_source_out_of_their_factors_too():
    apply_fn, params = built()
    config = jk.lslora.Config(rank=2, target=r".*Attention/[qv]/kernel")
    adapters = jk.lslora.init(apply_fn, config, params, pairs_of(), key=jax.random.key(0))
    assert len(adapters) == 6
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    adapted = jk.lslora.attach(apply_fn, config)
    read = lambda adapters, pairs: adapted(params, adapters, pairs)
    assert float(jnp.abs(read(adapters, pairs_of()) - apply_fn(params, pairs_of())).max()) > 1e-3
    same_factors(jk.Objective(read, jk.Categorical()), adapters)


@pytest.mark.exhaustive
def test_a_base_in_four_bits_gives_what_its_values_give():
    config = dataclasses.replace(CONFIG, width=64, hidden=64, num_heads=2, head_size=32)
    apply_fn, params = jk.from_nnx(EncoderDecoder(config, rngs=nnx.Rngs(0)))
    packed = jk.nf4.quantize(params, r"(encoder|decoder)/block/.*/kernel", stack=1)
    adapted = jk.lslora.attach(apply_fn, jk.lslora.Config(rank=1, target=r".*/q/kernel"))
    found = jax.jit(lambda p: adapted(p, {}, pairs_of()))(packed)
    close(found, jax.jit(apply_fn)(jk.nf4.dequantize(packed), pairs_of()))


@pytest.mark.exhaustive
def test_remat_changes_neither_value_nor_gradient():
    results = []
    for remat in (False, True):
        apply_fn, params = built(remat=remat)
        loss = lambda params, f=apply_fn: jnp.mean(f(params, pairs_of()) ** 2)
        results.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), *results)


@pytest.mark.exhaustive
def test_parameters_in_bfloat16_compute_in_bfloat16():
    apply_fn, params = built(FLAN)
    small = apply_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), pairs_of())
    assert small.dtype == jnp.bfloat16
    close(small.astype(jnp.float32), apply_fn(params, pairs_of()), 0.05)


def test_pairs_of_a_wrong_form_are_refused_with_their_shape():
    apply_fn, params = built()
    good = pairs_of()
    with pytest.raises(ValueError, match=r"source: expected integers of two axes.*\(6,\)"):
        apply_fn(params, good._replace(source=jnp.zeros(6, int)))
    with pytest.raises(ValueError, match=r"source_mask: .* \(2, 6\), got \(2, 5\)"):
        apply_fn(params, good._replace(source_mask=jnp.ones((2, 5), bool)))
    with pytest.raises(ValueError, match=r"decoder_inputs: expected the 2 rows.*got 1"):
        apply_fn(params, good._replace(decoder_inputs=jnp.zeros((1, 5), int)))
