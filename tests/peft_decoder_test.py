"""Adapters of a pretrained decoder cross over to stock PEFT and back, projections fused or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac import lslora
from jaxkfac.models import load_decoder
from tests._transformers import torch, transformers

peft = pytest.importorskip("peft")
plugin = pytest.importorskip("torch_ref.lslora.peft_plugin")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = np.random.default_rng(0).integers(3, 31, (2, 9)).astype(np.int32)


def saved_model(kind, folder):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.numpy()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_lora_that_stock_peft_trained_on_llama_runs_on_the_fused_decoder(targets, tmp_path):
    model = saved_model("llama", tmp_path / "base")
    settings = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets)
    adapted = peft.get_peft_model(model, settings)
    for name, x in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32)
    apart = lslora.load(tmp_path / "adapter", scanned="layers")
    adapters, config = lslora.fuse(*apart, decoder.config.parts)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(found - base).max() > 0.05
    np.testing.assert_allclose(found, logits_of(adapted), atol=2e-5)


@pytest.mark.parametrize(
    "kind, placement",
    [
        ("phi3", "output"),
        ("llama", "bottleneck"),
        pytest.param("phi3", "bottleneck", marks=pytest.mark.exhaustive),
        pytest.param("llama", "output", marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_trained_here_run_in_stock_peft_with_the_plug_in(kind, placement, tmp_path):
    model = saved_model(kind, tmp_path / "base")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32)
    config = lslora.Config(rank=2, alpha=3.0, fourier_placement=placement, init_sigma=0.5)
    fresh = lslora.init(
        config, decoder.apply_fn, decoder.params, jnp.asarray(IDS), key=jax.random.key(0)
    )
    adapters = jax.tree.map(lambda x: x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape), fresh)
    adapters = jax.tree.map(lambda x, y: x.astype(y.dtype), adapters, fresh)
    expected = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    stored = (adapters, config)
    if kind == "llama":  # which keeps q, k and v apart
        stored = lslora.split(adapters, config, decoder.config.parts)
    lslora.save(tmp_path / "adapter", *stored, dialect="peft")
    loaded = peft.PeftModel.from_pretrained(
        model, tmp_path / "adapter", config=plugin.read_config(tmp_path / "adapter")
    )
    np.testing.assert_allclose(logits_of(loaded), expected, atol=2e-5)
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(expected - base).max() > 0.05
