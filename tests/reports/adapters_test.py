"""Adapters that people made with PEFT, or for PEFT, on models with a tied head."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac import lslora
from jaxkfac.models import generate, load_decoder
from tests._transformers import torch, transformers

peft = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
IDS = np.random.default_rng(0).integers(3, 31, (2, 9)).astype(np.int32)
CLOSE = {"atol": 2e-5, "rtol": 0}
EMBEDDING, HEAD = "model/embed_tokens/embedding", "lm_head/kernel"


def torch_model(kind="llama", **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # large enough that one matrix in another's place shows
        model.get_input_embeddings().weight.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A folder with a tied Llama, and the decoder in it."""
    folder = tmp_path_factory.mktemp("tied")
    torch_model().save_pretrained(folder)
    return folder, load_decoder(folder, dtype=jnp.float32, remat=False)


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.numpy()


def trained_by_peft(model, folder, **settings):
    """A folder that PEFT wrote after training, and the logits with it."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, **settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(0.2 * torch.randn(x.shape))
    model.save_pretrained(folder)
    return logits_of(model)


def ours(decoder, adapters, config):
    adapted = lslora.attach(decoder.apply_fn, config)
    return jax.jit(adapted)(decoder.params, adapters, jnp.asarray(IDS))


def saved_for_peft(decoder, adapters, config, folder):
    """Logits of the PEFT model that opens what is saved here."""
    stored = lslora.split(adapters, config, decoder.config.parts)
    where = {"base_model": decoder.path, "task_type": "CAUSAL_LM"}
    lslora.save(folder, *stored, dialect="peft", **where)
    return logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval())


def check_both_ways(decoder, expected, folder):
    """Loaded, merged, saved again and opened by PEFT: the same logits."""
    adapters, config = lslora.load(folder / "theirs", model=decoder)
    found = ours(decoder, adapters, config)
    np.testing.assert_allclose(found, expected, **CLOSE)
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(found - base).max() > 0.1
    again = saved_for_peft(decoder, adapters, config, folder / "ours")
    np.testing.assert_allclose(again, expected, **CLOSE)
    adapted = lslora.attach(decoder.apply_fn, config)
    merged = lslora.merge(adapted, decoder.params, adapters, jnp.asarray(IDS))
    logits = jax.jit(decoder.apply_fn)(merged, jnp.asarray(IDS))
    np.testing.assert_allclose(logits, expected, **CLOSE)
    return adapters, config


QUERIES = {"target_modules": ["q_proj"]}
TIE = {"ensure_weight_tying": True}
FIRST = [
    QUERIES | {"modules_to_save": ["embed_tokens"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["embed_tokens", "q_proj"]} | TIE,
]
MORE = [
    QUERIES | {"modules_to_save": ["lm_head"]},
    QUERIES | {"modules_to_save": ["embed_tokens", "lm_head"]},
    QUERIES | {"modules_to_save": ["embed_tokens"]} | TIE,
    QUERIES | {"modules_to_save": ["lm_head"]} | TIE,
    {"target_modules": ["lm_head"]},
    {"target_modules": "model.embed_tokens", "use_rslora": True, "lora_dropout": 0.3},
    {"target_modules": ["lm_head", "o_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["lm_head", "q_proj"], "rank_pattern": {"q_proj": 1}} | TIE,
    {"target_modules": ["embed_tokens", "v_proj"], "rank_pattern": {"embed_tokens": 4}},
]


@pytest.mark.parametrize(
    "settings",
    [*FIRST, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE)],
    ids=lambda settings: "-".join(map(str, settings.values()))[:60],
)
def test_an_adapter_of_one_of_two_tied_matrices(settings, tied, tmp_path):
    _, decoder = tied
    expected = trained_by_peft(torch_model(), tmp_path / "theirs", **settings)
    adapters, config = check_both_ways(decoder, expected, tmp_path)
    assert config.ensure_weight_tying is settings.get("ensure_weight_tying", False)
    assert not (config.ensure_weight_tying and HEAD in adapters)
