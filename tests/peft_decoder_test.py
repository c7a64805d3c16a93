"""Adapters of a pretrained decoder cross over to stock PEFT and back, projections fused or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

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


def saved_model(kind, folder, **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.numpy()


@pytest.mark.slow
@pytest.mark.sampled(1)
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
    adapters, config = lslora.load(tmp_path / "adapter", model=decoder)
    apart = lslora.load(tmp_path / "adapter", scanned="layers")
    fused, _ = lslora.fuse(*apart, decoder.config.parts)
    jax.tree.map(np.testing.assert_array_equal, adapters, fused)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(found - base).max() > 0.05
    np.testing.assert_allclose(found, logits_of(adapted), atol=2e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
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
        decoder.apply_fn, config, decoder.params, jnp.asarray(IDS), key=jax.random.key(0)
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


def moved(decoder, config):
    """Adapters as after training, and the logits with them."""
    fresh = lslora.init(
        decoder.apply_fn, config, decoder.params, jnp.asarray(IDS), key=jax.random.key(0)
    )
    adapters = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), fresh)
    adapted = lslora.attach(decoder.apply_fn, config)
    return adapters, adapted(decoder.params, adapters, jnp.asarray(IDS))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_folder_written_here_opens_by_itself_in_stock_peft(kind, tmp_path):
    saved_model(kind, tmp_path / "base")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32)
    config = lslora.Config(rank=2, alpha=3.0, fourier_placement="none", target=".*_proj/kernel")
    adapters, expected = moved(decoder, config)
    stored = (adapters, config)
    if kind == "llama":
        stored = lslora.split(*stored, decoder.config.parts)
    where = {"base_model": decoder.path, "task_type": "CAUSAL_LM"}
    lslora.save(tmp_path / "adapter", *stored, dialect="peft", **where)
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(opened.eval()), expected, atol=2e-5)
    again, config = lslora.load(tmp_path / "adapter", model=decoder)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, again, jnp.asarray(IDS))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dialect", ["lslora", "peft"])
def test_stock_peft_does_not_open_a_nonlinear_folder_as_a_linear_one(dialect, tmp_path):
    saved_model("phi3", tmp_path / "base")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32)
    config = lslora.Config(rank=2, target=".*_proj/kernel", init_sigma=0.5)
    adapters, expected = moved(decoder, config)
    where = {"base_model": decoder.path, "task_type": "CAUSAL_LM"}
    lslora.save(tmp_path / "adapter", adapters, config, dialect=dialect, **where)
    message = {"lslora": "LSLORA", "peft": "needs torch_ref.lslora.peft_plugin"}[dialect]
    with pytest.raises((KeyError, ValueError), match=message):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises((KeyError, ValueError), match=message):
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with pytest.raises((KeyError, ValueError), match=message):
        base.load_adapter(str(tmp_path / "adapter"))
    if dialect == "peft":
        opened = peft.AutoPeftModelForCausalLM.from_pretrained(
            tmp_path / "adapter", config=plugin.read_config(tmp_path / "adapter")
        )
        np.testing.assert_allclose(logits_of(opened.eval()), expected, atol=2e-5)


@pytest.mark.exhaustive
def test_a_quantised_decoder_takes_a_stock_folder_too(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64}  # NF4's blocks
    model = saved_model("llama", tmp_path / "base", **sizes)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["k_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    whole = peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["down_proj"])
    model = peft.get_peft_model(saved_model("llama", tmp_path / "base", **sizes), whole)
    model.save_pretrained(tmp_path / "whole")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32, quantize=".*_proj/kernel")
    adapters, config = lslora.load(tmp_path / "adapter", model=decoder)
    assert adapters["model/layers/self_attn/qkv_proj/kernel"].b.shape == (2, 2, 128)
    adapted = lslora.attach(decoder.apply_fn, config)
    assert adapted(decoder.params, adapters, jnp.asarray(IDS)).shape == (2, 9, 31)
    with pytest.raises(ValueError, match=r"'model/layers/mlp/down_proj/kernel' is quantised"):
        lslora.load(tmp_path / "whole", model=decoder)


def test_a_projection_that_the_settings_name_and_the_file_lacks_is_named(tmp_path):
    model = saved_model("llama", tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"])
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(file)
    for lost in ("v_proj", "o_proj"):
        rest = {key: x for key, x in stored.items() if lost not in key}
        safetensors.numpy.save_file(rest, file)
        with pytest.raises(ValueError, match=rf"it lacks \['base_model.*layers.0.*{lost}.lora_A"):
            lslora.load(tmp_path / "adapter", model=decoder)


def test_modules_and_tensors_that_the_model_does_not_have_are_named(tmp_path):
    model = saved_model("llama", tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    small = transformers.AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "small")
    decoder = load_decoder(tmp_path / "small", dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"no module 'model.layers.1.self_attn.q_proj', .*nearest"):
        lslora.load(tmp_path / "adapter", model=decoder)
