"""A checkpoint arrives whole, or is refused with every name that is wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxkfac.jobs.models import (
    EncoderDecoderConfig,
    byte_tokenizer,
    encoder_decoder_shapes,
    load_encoder_decoder,
    save_encoder_decoder,
)
from jaxkfac.jobs.models.encoder_decoder._load import layout

CONFIG = {
    "model_type": "t5",
    "vocab_size": 31,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
UNTIED = CONFIG | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def write(folder, config=CONFIG, *, change=None):
    (folder / "config.json").write_text(json.dumps(config))
    leaves = layout(EncoderDecoderConfig.from_hugging_face(config))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32)
        for leaf in leaves.values()
        for parts in leaf.slices
        for name, shape in parts
    }
    if change is not None:
        change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return tensors


def test_every_tensor_is_where_its_path_says(tmp_path):
    stored = write(tmp_path, UNTIED)
    loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32)
    block = loaded.params["decoder"]["block"]["layer"]
    value = stored["decoder.block.1.layer.1.EncDecAttention.v.weight"].T
    np.testing.assert_array_equal(block["1"]["EncDecAttention"]["v"]["kernel"][1], value)
    norm = stored["decoder.block.0.layer.2.layer_norm.weight"]
    np.testing.assert_array_equal(block["2"]["layer_norm"]["scale"][0], norm)
    table = stored["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    found = loaded.params["encoder"]["relative_attention_bias"]["embedding"]
    np.testing.assert_array_equal(found, table)
    head = stored["lm_head.weight"].T
    np.testing.assert_array_equal(loaded.params["lm_head"]["kernel"], head)
    assert loaded.path == str(tmp_path) and loaded.config.eos_ids == (1,)


def test_missing_unknown_and_misshapen_tensors_are_all_named(tmp_path):
    def change(tensors):
        del tensors["decoder.block.1.layer.2.DenseReluDense.wo.weight"]
        tensors["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"] = np.ones((24, 16), "f4")
        tensors["encoder.final_layer_norm.weight"] = np.ones(15, "f4")

    write(tmp_path, change=change)
    with pytest.raises(ValueError) as error:
        load_encoder_decoder(tmp_path)
    message = str(error.value)
    assert f"{tmp_path} does not hold the encoder-decoder that its config describes" in message
    assert "missing tensors ['decoder.block.1.layer.2.DenseReluDense.wo.weight']" in message
    assert "unknown tensors ['encoder.block.0.layer.1.DenseReluDense.wi_0.weight']" in message
    assert "encoder.final_layer_norm.weight is (15,), expected (16,)" in message


@pytest.mark.slow
def test_a_head_is_tied_where_the_file_holds_none_or_the_embedding_again(tmp_path):
    scaled = UNTIED | {"tie_word_embeddings": True, "scale_decoder_outputs": False}

    def again(tensors):
        tensors["lm_head.weight"] = tensors["shared.weight"]
        tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"]

    def other(tensors):
        tensors["lm_head.weight"] = 2 * tensors["shared.weight"]

    def under_another_name(tensors):
        tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")

    def under_the_name_of_the_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("shared.weight")

    elsewhere = (under_another_name, under_the_name_of_the_head)
    changes = ((None, True), (again, True), (other, False), *((x, True) for x in elsewhere))
    for change, tied in changes:
        stored = write(tmp_path, scaled, change=change)
        loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32)
        if change in elsewhere:
            table = stored.get("lm_head.weight", stored.get("decoder.embed_tokens.weight"))
            np.testing.assert_array_equal(loaded.params["shared"]["embedding"], table)
        assert loaded.config.tied_head is tied and ("lm_head" in loaded.params) is not tied
        assert not loaded.config.scaled_head
    write(tmp_path, UNTIED, change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing tensors \['lm_head.weight'\].*: false"):
        load_encoder_decoder(tmp_path)
    own = {"encoder.embed_tokens.weight": np.ones((31, 16), "f4")}
    write(tmp_path, CONFIG, change=lambda tensors: tensors.update(own))
    with pytest.raises(ValueError, match=r"encoder.embed_tokens.weight differs from shared.weight"):
        load_encoder_decoder(tmp_path)


def test_what_is_no_encoder_decoder_is_refused_by_its_key(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        load_encoder_decoder(tmp_path)
    for change, message in (
        ({"model_type": "llama"}, "model_type: expected 't5', got 'llama'"),
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj: expected one of relu, gated"),
        ({"d_kv": None}, r"config.json lacks \['d_kv'\]"),
        ({"relative_attention_num_buckets": 7}, "num_buckets must be even"),
        ({"relative_attention_max_distance": 9}, "max_distance 9 must be beyond the 16"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
        with pytest.raises(ValueError, match=message):
            load_encoder_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_encoder_decoder(tmp_path)


def test_a_tokenizer_with_more_ids_than_rows_refuses_the_texts_that_need_them(tmp_path):
    write(tmp_path)
    for size in (31, 33):
        words = {str(i): i for i in range(size)}
        model = tokenizers.models.WordLevel(words, unk_token="0")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        ends = {"eos_token": "32", "pad_token": "31"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends))
        loaded = load_encoder_decoder(tmp_path).tokenizer
        assert loaded.size == size and loaded.encode("30 2") == [30, 2]
        assert max(*loaded.eos_ids, loaded.pad_id) < 31
    with pytest.raises(ValueError, match=r"needs the token '32' \(id 32\).* 31 rows"):
        loaded.encode("30 32 31")


def test_float16_is_refused_because_activations_exceed_it(tmp_path):
    write(tmp_path)
    for call in (load_encoder_decoder, encoder_decoder_shapes):
        with pytest.raises(ValueError, match="dtype=float16: activations of T5 exceed 65,504"):
            call(tmp_path, dtype=jnp.float16)


@pytest.mark.default(1)
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_saved_is_what_was_loaded(config, dtype, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write(old, config | {"dropout_rate": 0.25})
    loaded = load_encoder_decoder(old, dtype=dtype)
    tokenizer = byte_tokenizer()
    save_encoder_decoder(new, loaded)
    again = load_encoder_decoder(new, dtype=dtype)
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    written, stored = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (new, old)
    )
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(written[name], tensor.astype(dtype), err_msg=name)
    assert json.loads((new / "config.json").read_text())["dropout_rate"] == 0.25
    tokenizer.save(new)
    for text in ("naïve </s> x", ""):
        found = type(tokenizer).from_folder(new).encode(text)
        assert found == tokenizer.encode(text) and found[-1] == 1


def test_parameters_of_another_config_are_not_saved(tmp_path):
    write(tmp_path)
    loaded = load_encoder_decoder(tmp_path)
    loaded.params["encoder"].pop("final_layer_norm")
    with pytest.raises(ValueError, match=r"\['encoder/final_layer_norm/scale'\]"):
        save_encoder_decoder(tmp_path / "new", loaded)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_shapes_need_no_weights_and_believe_those_that_are_there(tmp_path):
    config = UNTIED | {"d_ff": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = encoder_decoder_shapes(tmp_path, dtype=jnp.float32)
    assert alone.tokenizer is None
    write(tmp_path, config)
    for quantize in (None, ".*/wo/kernel"):
        options = {"dtype": jnp.float32, "quantize": quantize}
        loaded = load_encoder_decoder(tmp_path, **options).params
        for shapes in (encoder_decoder_shapes(tmp_path, **options), *[alone] * (not quantize)):
            assert jax.tree.structure(shapes.params) == jax.tree.structure(loaded)
            jax.tree.map(_same, shapes.params, loaded)
    tied = config | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    assert not encoder_decoder_shapes(tmp_path).config.tied_head


def _same(x, y):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3, "decoder_start_token_id": 5},
        {"eos_token_id": [1, 7], "scale_decoder_outputs": False},
        {"eos_token_id": None},
    ],
)
def test_a_config_comes_back_from_its_file(change):
    config = EncoderDecoderConfig.from_hugging_face(CONFIG | change)
    assert EncoderDecoderConfig.from_hugging_face(config.to_hugging_face()) == config
    odd = EncoderDecoderConfig(**{**vars(config), "activation": "silu", "gated": False})
    with pytest.raises(ValueError, match="activation='silu' with gated=False"):
        odd.to_hugging_face()
