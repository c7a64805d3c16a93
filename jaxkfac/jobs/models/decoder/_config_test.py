"""A config.json is read whole, or refused by the name of what is not covered."""

import pytest

from jaxkfac.jobs.models import DecoderConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_old_and_new_files_say_the_same():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}
    read = DecoderConfig.from_hugging_face(old)
    assert read == DecoderConfig.from_hugging_face(new)
    assert read.rotary.theta == 5e5 and read.rotary.original_context == 32


def test_what_is_left_out_has_hugging_faces_defaults():
    config = DecoderConfig.from_hugging_face(LLAMA | {"eos_token_id": [2, 3]})
    assert (config.num_kv_heads, config.head_size, config.norm_epsilon) == (4, 8, 1e-6)
    assert config.eos_ids == (2, 3) and not config.tied_head
    assert DecoderConfig.from_hugging_face(LLAMA | {"model_type": "phi3"}).norm_epsilon == 1e-5


def test_a_window_is_read_where_the_model_has_one():
    window = LLAMA | {"sliding_window": 7}
    assert DecoderConfig.from_hugging_face(window).sliding_window is None
    for kind in ("phi3", "mistral"):
        config = DecoderConfig.from_hugging_face(window | {"model_type": kind})
        assert config.sliding_window == 7
        none = {"model_type": kind, "sliding_window": None}
        assert DecoderConfig.from_hugging_face(window | none).sliding_window is None
    for kind, default in (("phi3", None), ("mistral", 4096)):
        config = DecoderConfig.from_hugging_face(LLAMA | {"model_type": kind})
        assert config.sliding_window == default


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_has_a_window_where_it_is_in_use_and_in_the_upper_blocks(kind):
    window = LLAMA | {"model_type": kind, "sliding_window": 7}
    read = DecoderConfig.from_hugging_face
    assert read(window).sliding_window is None
    used = window | {"use_sliding_window": True}
    assert read(used).sliding_window is None  # from block 28 on, and there are two
    upper = read(used | {"max_window_layers": 1})
    assert (upper.sliding_window, upper.windowed) == (7, (False, True))
    everywhere = read(used | {"max_window_layers": 0})
    assert (everywhere.sliding_window, everywhere.windowed) == (7, None)
    listed = read(used | {"layer_types": ["sliding_attention", "full_attention"]})
    assert listed.windowed == (True, False)


def test_old_and_new_files_of_gemma_3_say_the_same():
    gemma = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 8}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = gemma | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": scaling,
        "sliding_window_pattern": 6,
    }
    new = gemma | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **scaling},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    read = DecoderConfig.from_hugging_face(old)
    assert read == DecoderConfig.from_hugging_face(new)
    assert read.windowed == (True,) * 5 + (False,) and read.tied_head
    assert (read.rotary.theta, read.rotary.factor) == (1e6, 8.0)
    assert (read.local_rotary.theta, read.local_rotary.kind) == (1e4, "default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected one of phi3, llama, .*, got 'gpt2'"),
        ({"model_type": None}, r"got None; config.json has \['hidden_size', .*'vocab_size'\]"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "got 'gemma3', around a 'gemma3_text'",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "mamba"]}, "got mamba"),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"]},
            "layer_types: expected 2, one per block, got 1",
        ),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation: .*'gelu'"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attention_softcap must be"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "expected null"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "expected false"),
        ({"model_type": "qwen2", "hidden_act": "relu"}, "hidden_act: expected 'silu', got 'relu'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"vocab_size": None}, r"lacks \['vocab_size'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type: .* got 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, r"'linear' needs \['factor'\]"),
        ({"rope_scaling": {"type": "su"}}, r"needs \['short_factor', 'long_factor'\]"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3 must divide num_heads 4"),
        ({"num_hidden_layers": 0}, "depth must be at least 1, not 0"),
        ({"head_dim": 7}, "need pairs: 7 of 7"),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0] * 4,
                }
            },
            "short_factor: expected 4 numbers, one per pair, got 1",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hugging_face(LLAMA | change)
