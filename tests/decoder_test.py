"""Logits equal to those of transformers, on small random checkpoints that it writes itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxkfac.models import Tokenizer, Tokens, generate, load_decoder
from tests._transformers import torch, transformers

EXHAUSTIVE = pytest.mark.exhaustive
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH = 24


def longrope(**options):
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [2.0 + 0.7 * i for i in range(4)],
    }
    return {"rope_scaling": {"rope_type": "longrope", **factors, **options}}


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# Caps so low that they bend scores and logits of this size.
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "sliding_window": 6,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
}
GEMMA3 = GEMMA | {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 3,
}
CASES = {
    "phi3": ("phi3", {}),
    "phi3 tied": ("phi3", {"tie_word_embeddings": True}),
    "phi3 all heads": ("phi3", {"num_key_value_heads": 4}),
    "phi3 window": ("phi3", {"sliding_window": 5}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3 longrope within": ("phi3", longrope() | {"original_max_position_embeddings": 32}),
    "phi3 longrope beyond": ("phi3", longrope() | {"original_max_position_embeddings": 16}),
    "phi3 longrope partial": (
        "phi3",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 5.0],
                "attention_factor": 1.3,
            },
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama": ("llama", {"rope_theta": 5000.0}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one key head": ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama dynamic within": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama dynamic beyond": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2 upper window": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3 upper window": ("qwen3", QWEN_WINDOW | {"head_dim": 12}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2 windows only": ("gemma2", GEMMA | {"layer_types": ["sliding_attention"] * 4}),
    "gemma2 uncapped": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 stretched": (
        "gemma3_text",
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3 capped logits": ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 2.0}),
}
# New members that came together: one of each is in the default run.
FAMILIES = ("qwen2 upper window", "qwen3 biases", "gemma2", "gemma3 stretched")


def oracle(kind, options):
    """A random model whose every parameter matters: transformers starts biases at zero."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def ids_of(rows=2, length=LENGTH, seed=1):
    return np.asarray(jax.random.randint(jax.random.key(seed), (rows, length), 3, 97), np.int32)


def logits_of(model, ids, **options):
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(ids, np.int64)), **options).logits.numpy()


def loaded(model, folder):
    model.save_pretrained(folder)
    return load_decoder(folder, dtype=jnp.float32)


def assert_logits(ours, theirs):
    # The bound is the contract's; logits here have a spread of about 1.
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAMILIES])
def test_logits_equal_those_of_transformers(name, tmp_path):
    assert_logits_of_a_case(name, tmp_path)


@pytest.mark.default(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family_equal_those_of_transformers(name, tmp_path):
    assert_logits_of_a_case(name, tmp_path)


def assert_logits_of_a_case(name, tmp_path):
    kind, options = CASES[name]
    model = oracle(kind, options)
    decoder = loaded(model, tmp_path)
    ids = ids_of()
    theirs = logits_of(model, ids)
    assert theirs.std() > 0.3
    assert_logits(jax.jit(decoder.apply_fn)(decoder.params, ids), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_padded_rows_equal_those_of_transformers(kind, tmp_path):
    model = oracle(kind, {"sliding_window": 5} if kind == "phi3" else {})
    decoder = loaded(model, tmp_path)
    ids, lengths = ids_of(), (LENGTH, 15)
    marks = np.asarray([[1] * n + [0] * (LENGTH - n) for n in lengths], np.int32)
    read = jax.jit(decoder.apply_fn)
    for side, mark in (("right", marks), ("left", marks[:, ::-1].copy())):
        positions = np.maximum(mark.cumsum(1) - 1, 0).astype(np.int32)
        theirs = logits_of(
            model,
            ids,
            attention_mask=torch.from_numpy(mark),
            position_ids=torch.from_numpy(positions.astype(np.int64)),
        )
        ours = read(decoder.params, Tokens(ids, positions, mark))
        for row, real in enumerate(mark.astype(bool)):
            assert_logits(ours[row][real], theirs[row][real])
        assert side == "left" or np.abs(ours[1][15:] - theirs[1][15:]).max() > 1e-3


@pytest.mark.exhaustive
def test_packed_rows_equal_texts_alone_in_transformers(tmp_path):
    model = oracle("phi3", {"sliding_window": 6})
    decoder = loaded(model, tmp_path)
    a, b = ids_of(1, 14, seed=3), ids_of(1, 10, seed=4)
    positions = np.asarray([[*range(14), *range(10)]], np.int32)
    segments = np.asarray([[1] * 14 + [2] * 10], np.int32)
    packed = Tokens(np.concatenate([a, b], 1), positions, segments)
    ours = jax.jit(decoder.apply_fn)(decoder.params, packed)
    assert_logits(ours[:, :14], logits_of(model, a))
    assert_logits(ours[:, 14:], logits_of(model, b))


GREEDY = ("phi3 window", "llama3", "mistral window")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [*GREEDY[:1], *FAMILIES, *(pytest.param(x, marks=EXHAUSTIVE) for x in GREEDY[1:])]
)
def test_greedy_answers_equal_those_of_transformers(name, tmp_path):
    kind, options = CASES[name]
    model = oracle(kind, options)
    decoder = loaded(model, tmp_path)
    prompts = [row.tolist() for row in ids_of()] + [ids_of(1, 9, seed=5)[0].tolist()]
    answers = generate(decoder, prompts, max_new_tokens=10)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            asked = torch.tensor([prompt])
            theirs = model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=10, do_sample=False
            )
        assert answer == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_a_half_precision_checkpoint_is_read_in_its_own_bits(tmp_path):
    oracle("llama", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **options).eval()
    decoder = load_decoder(tmp_path)
    ours = np.asarray(decoder.params["model"]["norm"]["scale"].astype(jnp.float32))
    np.testing.assert_array_equal(ours, model.model.norm.weight.detach().numpy())
    wide = load_decoder(tmp_path, dtype=jnp.float32)
    ids = ids_of()
    assert_logits(jax.jit(wide.apply_fn)(wide.params, ids), logits_of(model, ids))


def test_a_tokenizer_folder_gives_what_transformers_gives(tmp_path):
    words = ["<unk>", "<s>", "</s>", "hello", "world", "Ġworld"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% generation %} {{ m['content'] }}"
        "{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{{ eos_token }}{% endfor %}"
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("hello world x") == theirs.encode("hello world x") == [1, 3, 4, 0]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.chat(messages) == theirs.apply_chat_template(messages, return_dict=False)
    assert ours.eos_ids == (2,) and ours.pad_id == 2
