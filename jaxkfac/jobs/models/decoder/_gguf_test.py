"""A GGUF file gives the model and the tokenizer that were written into it."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.models import load_decoder
from jaxkfac.jobs.models.checkpoint._tokenizer_test import TEMPLATE, TRICKY, byte_level
from jaxkfac.jobs.models.decoder import _load, _load_test

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "model_type": "llama",
}
CONFIG = _load_test.CONFIG | SIZES | {"vocab_size": 259, "rms_norm_eps": 1e-5}
NAMES = {ours: theirs for theirs, ours in (_load._BLOCK | _load._ENDS).items()}


def interleaved(weight, heads):
    """Rows i and i + half of each head become neighbours, as llama.cpp wants them."""
    head_size = len(weight) // heads
    order = np.arange(head_size).reshape(2, -1).T.reshape(-1)
    return weight.reshape(heads, head_size, -1)[:, order].reshape(weight.shape)


def write(file, *, config=CONFIG, kind=gguf.GGMLQuantizationType.F32, fields=(), leave_out=()):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = byte_level().get_vocab(with_added_tokens=True)
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|im") else 1 for word in words])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, value in fields:
        writer.add_string(name, value)
    stored = _load_test.tensors_of(config, fused=False)
    for name, tensor in stored.items():
        if name in leave_out:
            continue
        parts = name.removesuffix(".weight").split(".")
        if name.startswith("model.layers."):
            theirs = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.weight"
        else:
            theirs = f"{NAMES['.'.join(parts)]}.weight"
        if "q_proj" in name or "k_proj" in name:
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = interleaved(tensor, config[heads])
        own = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def test_the_file_and_the_folder_give_the_same_parameters(tmp_path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "model.gguf")
    _load_test.write(tmp_path / "folder", CONFIG, fused=False)
    file = load_decoder(tmp_path / "model.gguf", dtype=jnp.float32)
    folder = load_decoder(tmp_path / "folder", dtype=jnp.float32)
    assert file.config.eos_ids == (1,) and file.config.rotary.theta == 10000
    jax.tree.map(np.testing.assert_array_equal, file.params, folder.params)


@pytest.mark.parametrize(("kind", "bound"), [("Q8_0", 1 / 127), ("Q4_1", 1 / 15)])
def test_quantised_blocks_are_dequantised(tmp_path, kind, bound):
    """Of a block of 32: half a step, of its range in 15 or its largest in 127."""
    stored = write(tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind])
    params = load_decoder(tmp_path / "model.gguf", dtype=jnp.float32).params
    ours = np.asarray(params["model"]["layers"]["mlp"]["down_proj"]["kernel"][1]).T
    wanted = stored["model.layers.1.mlp.down_proj.weight"]
    blocks = wanted.reshape(-1, 32)
    reach = np.ptp(blocks, axis=1) if kind == "Q4_1" else np.abs(blocks).max(1)
    error = np.abs(ours - wanted).reshape(-1, 32).max(1)
    assert (error <= 0.51 * bound * reach + 1e-3 * np.abs(blocks).max(1)).all()
    assert error.max() > 0


def test_the_tokenizer_of_a_file(tmp_path):
    write(tmp_path / "model.gguf")
    tokenizer = load_decoder(tmp_path / "model.gguf").tokenizer
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the") == byte_level().encode("the").ids
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 2 and ids.count(1) == 1
    assert tokenizer.eos_ids == (1,)


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    write(file)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:40], b"GGUF", b"\0" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="no whole GGUF file"):
            load_decoder(file)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="no whole GGUF file"):
        load_decoder(file)
    write(file, leave_out=("model.norm.weight",))
    with pytest.raises(ValueError, match=r"missing tensors \['model.norm.weight'\]"):
        load_decoder(file)
    write(file, fields=[("llama.rope.scaling.type", "yarn")])
    with pytest.raises(ValueError, match="llama.rope.scaling.type: .* got 'yarn'"):
        load_decoder(file)


def test_a_damaged_tokenizer_is_named_with_its_file(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    for name in ("add_token_merges", "add_token_types"):
        with monkeypatch.context() as patched:
            patched.setattr(gguf.GGUFWriter, name, lambda self, values: None)
            if name == "add_token_types":  # one type too few
                types = lambda self, values: self.add_array("tokenizer.ggml.token_type", [1])
                patched.setattr(gguf.GGUFWriter, name, types)
            write(file)
        with pytest.raises(ValueError, match=r"model.gguf: its tokenizer cannot be read: "):
            load_decoder(file)
