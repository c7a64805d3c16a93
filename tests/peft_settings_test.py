"""Every setting of PEFT's `LoraConfig`: the same outputs here, or refused by name.

The rows are compared with the dataclass itself, so that a setting of a newer PEFT fails until it
has one.
"""

import dataclasses
import importlib
import typing
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac import lslora
from jaxkfac.models import load_decoder
from tests._transformers import torch, transformers

peft = pytest.importorskip("peft")
configs = importlib.import_module("peft.tuners.lora.config")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = np.random.default_rng(0).integers(3, 31, (2, 9)).astype(np.int32)


class Same(NamedTuple):
    """PEFT's outputs, with these settings; `always` in the default suite, as one of its family."""

    settings: dict[str, Any]
    always: bool = False


class Refused(NamedTuple):
    """An error that names the setting."""

    settings: dict[str, Any]
    named: str


def refused(name, value, **others):
    return Refused({name: value, **others}, name)


def same(always=False, **settings):
    return Same(settings, always)


TABLE: dict[str, list[Same | Refused]] = {
    # what is adapted
    "target_modules": [
        same(target_modules="all-linear"),
        same(target_modules=r".*\.(0|2)\..*(v_proj|down_proj)"),
        same(target_modules=["layers.1.self_attn.k_proj", "up_proj"]),
        same(target_modules=["lm_head", "o_proj"], always=True),
        same(target_modules=["embed_tokens", "q_proj"]),
    ],
    "exclude_modules": [
        same(exclude_modules=["layers.1.self_attn.q_proj"], always=True),
        same(exclude_modules=r".*layers\.[01]\..*"),
    ],
    "layers_to_transform": [
        same(layers_to_transform=[0, 2], always=True),
        same(layers_to_transform=1),
    ],
    "layers_pattern": [
        same(layers_pattern="layers", layers_to_transform=[1]),
        same(layers_pattern=["h", "layers"], layers_to_transform=[2, 0]),
    ],
    "modules_to_save": [
        same(modules_to_save=["lm_head", "norm"]),
        same(
            modules_to_save=["k_proj", "input_layernorm", "embed_tokens"],
            target_modules=["o_proj", "up_proj"],
            always=True,
        ),
    ],
    # ranks and scalings
    "r": [same(r=2)],
    "lora_alpha": [same(lora_alpha=7)],
    "use_rslora": [same(use_rslora=True, rank_pattern={"q_proj": 2})],
    "rank_pattern": [
        same(rank_pattern={"layers.1.self_attn.v_proj": 2, "q_proj": 6}, always=True),
        same(rank_pattern={"^model.layers.0.self_attn.q_proj": 1}, use_rslora=True),
    ],
    "alpha_pattern": [same(alpha_pattern={r"layers\.[12]\.self_attn\.v_proj": 9, "q_proj": 3})],
    # how it began
    "init_lora_weights": [
        same(init_lora_weights=False),
        same(init_lora_weights="gaussian"),
        same(init_lora_weights="eva"),
        same(init_lora_weights="orthogonal", always=True),
        same(init_lora_weights="mica"),
        refused("init_lora_weights", "pissa"),
        refused("init_lora_weights", "pissa_niter_4"),
        refused("init_lora_weights", "olora"),
        refused("init_lora_weights", "corda"),
        refused("init_lora_weights", "loftq", loftq_config={"loftq_bits": 4}),
        refused("init_lora_weights", "lora_ga"),
    ],
    # no part of what it computes
    "lora_dropout": [same(lora_dropout=0.3)],
    "fan_in_fan_out": [same(fan_in_fan_out=True)],
    "inference_mode": [same(inference_mode=True)],
    "task_type": [same(task_type="CAUSAL_LM", always=True)],
    "auto_mapping": [
        same(auto_mapping={"base_model_class": "Llama", "parent_library": "transformers"})
    ],
    "peft_version": [same(peft_version="0.0.1")],
    "base_model_name_or_path": [same(base_model_name_or_path="elsewhere")],
    "revision": [same(revision="other")],
    "runtime_config": [same(runtime_config=configs.LoraRuntimeConfig(ephemeral_gpu_offload=True))],
    "megatron_core": [same(megatron_core="other.core")],
    "loftq_config": [same(loftq_config={"loftq_bits": 8})],
    "eva_config": [same(eva_config=configs.EvaConfig())],
    "corda_config": [same(corda_config=configs.CordaConfig())],
    "lora_ga_config": [same(lora_ga_config=configs.LoraGAConfig())],
    "qalora_group_size": [same(qalora_group_size=8)],
    "ensure_weight_tying": [same(ensure_weight_tying=True, modules_to_save=["lm_head"])],
    # another model
    "peft_type": [refused("peft_type", "IA3")],
    "bias": [refused("bias", "all"), refused("bias", "lora_only")],
    "lora_bias": [refused("lora_bias", True)],
    "use_dora": [refused("use_dora", True)],
    "use_qalora": [refused("use_qalora", True)],
    "use_bdlora": [refused("use_bdlora", {"target_modules_bd_a": ["q_proj"], "nblocks": 2})],
    "megatron_config": [refused("megatron_config", {"hidden_size": 16})],
    "trainable_token_indices": [refused("trainable_token_indices", [1, 2])],
    "alora_invocation_tokens": [refused("alora_invocation_tokens", [1, 2])],
    "layer_replication": [refused("layer_replication", [[0, 2], [1, 3]])],
    "target_parameters": [refused("target_parameters", ["mlp.experts.gate_up_proj"])],
    "arrow_config": [refused("arrow_config", {"top_k": 2})],
    "kasa_config": [refused("kasa_config", {"beta": 1e-4})],
    "monteclora_config": [refused("monteclora_config", {"num_samples": 4})],
    "velora_config": [refused("velora_config", {"rank": 2})],
}
ROWS = [(name, row) for name, rows in TABLE.items() for row in rows]
NOT_ALWAYS = pytest.mark.exhaustive


def settings_of(row):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **row.settings})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def adapted(base, settings):
    """PEFT's model with weights as after training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, settings).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                x.add_(0.4 * torch.randn(x.shape))
    return model


def test_every_setting_of_peft_has_a_row_in_which_it_is_set():
    first = peft.LoraConfig()
    assert set(TABLE) == {field.name for field in dataclasses.fields(first)}
    for name, row in ROWS:
        assert row.settings[name] != getattr(first, name)


def test_every_beginning_that_peft_names_has_a_row():
    hints = typing.get_type_hints(peft.LoraConfig)["init_lora_weights"]
    words = {x for each in typing.get_args(hints) for x in typing.get_args(each)}
    rows = {str(row.settings["init_lora_weights"]) for row in TABLE["init_lora_weights"]}
    assert {word.partition("[")[0] for word in words} <= {row.rstrip("4") for row in rows}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}={row.settings[name]}"[:60],
                     marks=() if row.always else NOT_ALWAYS)
        for name, row in ROWS if isinstance(row, Same)
    ],
)  # fmt: skip
def test_outputs_are_pefts(name, row, base, tmp_path):
    theirs = adapted(base, settings_of(row))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(IDS).long()).logits.numpy()
    decoder = load_decoder(base, dtype=jnp.float32)
    adapters, config = lslora.load(tmp_path, model=decoder)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    before = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(found - before).max() > 0.05


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    """A folder of PEFT's, whose config is then another one."""
    folder = tmp_path_factory.mktemp("plain")
    adapted(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}={row.settings[name]}"[:60])
        for name, row in ROWS if isinstance(row, Refused)
    ],
)  # fmt: skip
def test_another_model_is_refused_by_the_settings_name(name, row, base, plain):
    if name == "peft_type":
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(plain)
    else:
        settings_of(row).save_pretrained(plain)
    with pytest.raises(ValueError, match=row.named):
        lslora.load(plain, scanned="layers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "whole", "kernel"),
    [
        (["q_proj", "v_proj"], ["k_proj"], "qkv_proj"),
        (["q_proj", "o_proj"], ["layers.1.self_attn.o_proj"], "o_proj"),
    ],
    ids=["part-of-a-fused-kernel", "slice-of-a-stack"],
)
def test_a_kernel_partly_replaced_and_partly_adapted_is_refused_until_the_base_has_it(
    targets, whole, kernel, base, tmp_path
):
    settings = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=whole)
    theirs = adapted(base, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"modules_to_save replaces .*/{kernel}/kernel"):
        lslora.load(tmp_path / "adapter", model=load_decoder(base, dtype=jnp.float32))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(IDS).long()).logits.numpy()
    other = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    replaced = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): x
        for name, x in theirs.state_dict().items()
        if "modules_to_save" in name
    }
    assert replaced
    assert not other.load_state_dict(replaced, strict=False).unexpected_keys
    other.save_pretrained(tmp_path / "other")
    decoder = load_decoder(tmp_path / "other", dtype=jnp.float32)
    assume = {"modules_to_save": None, "exclude_modules": whole}
    adapters, config = lslora.load(tmp_path / "adapter", model=decoder, assume=assume)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_pissa_is_read_once_peft_has_written_it_for_the_original_model(base, tmp_path):
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.get_peft_model(model, settings).eval()
    first = str(tmp_path / "first")
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(first)
    theirs.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name:
                x.add_(0.4 * torch.randn(x.shape))
        expected = theirs(torch.from_numpy(IDS).long()).logits.numpy()
    theirs.save_pretrained(tmp_path / "own")
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=first)
    decoder = load_decoder(base, dtype=jnp.float32)
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion"):
        lslora.load(tmp_path / "own", model=decoder)
    adapters, config = lslora.load(tmp_path / "converted", model=decoder)
    found = lslora.attach(decoder.apply_fn, config)(decoder.params, adapters, jnp.asarray(IDS))
    np.testing.assert_allclose(found, expected, atol=1e-4)
