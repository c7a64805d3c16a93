"""Adapters come back from disk as they were, and only they."""

import json

import pytest
import safetensors.torch
import torch

from torch_ref.lslora import Config, adapter_names, attach, load, save, set_active

CONFIG = Config(target=r".*_proj", rank=2, alpha=6.0)


@pytest.mark.parametrize("dialect", ["lslora", "peft"])
@pytest.mark.parametrize("name", ["default", "other"])
def test_adapter_comes_back_with_all_its_settings(
    model, tmp_path, name, dialect, build, randomize, x
):
    config = Config(
        r".*\.q_proj",
        rank=3,
        alpha=5.0,
        fourier_placement="bottleneck",
        init_sigma=0.7,
        reg_weight=0.03,
        dropout=0.1,
        rslora=True,
        rank_pattern={r"blocks\.0\.q_proj": 2},
        alpha_pattern={r"1\.q_proj": 7.0},
    )
    attach(model, config, name=name)
    randomize(model)
    save(tmp_path, model, name=name, dialect=dialect)
    loaded = build()
    assert load(tmp_path, loaded, name=name) == config
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    folder = tmp_path if name == "default" else tmp_path / name
    record = json.loads((folder / "adapter_config.json").read_text())
    assert record["peft_type"] == {"lslora": "LSLORA", "peft": "LORA"}[dialect]


def test_file_has_pefts_keys_without_the_adapters_name(model, tmp_path):
    attach(model, Config(r"blocks\.0\.q_proj", rank=2), name="other")
    save(tmp_path, model, name="other")
    stored = safetensors.torch.load_file(tmp_path / "other" / "adapter_model.safetensors")
    where = "base_model.model.blocks.0.q_proj"
    assert {k: (tuple(t.shape), t.dtype) for k, t in stored.items()} == {
        f"{where}.lora_A.weight": ((2, 4), torch.float32),
        f"{where}.lora_B.weight": ((6, 2), torch.float32),
        f"{where}.fourier_params.weight": ((4,), torch.float32),
        f"{where}.fourier_params.sigma": ((), torch.float32),
    }


def test_adapters_whose_names_contain_each_other_are_kept_apart(
    model, tmp_path, build, randomize, x
):
    for seed, name in enumerate(("task", "task2")):
        attach(model, CONFIG, name=name)
        randomize(model, seed)
    outputs = {}
    for name in ("task", "task2"):
        save(tmp_path, model, name=name)
        set_active(model, name)
        outputs[name] = model(x)
    loaded = build()
    load(tmp_path, loaded, name="task2")
    load(tmp_path, loaded, name="task")
    assert torch.equal(loaded(x), outputs["task"])
    set_active(loaded, "task2")
    assert torch.equal(loaded(x), outputs["task2"])


def test_file_that_does_not_fit_names_the_keys_and_leaves_no_adapter(model, tmp_path, build):
    attach(model, CONFIG)
    save(tmp_path, model)
    file = tmp_path / "adapter_model.safetensors"
    stored = safetensors.torch.load_file(file)
    stored["base_model.model.other.lora_A.weight"] = stored.pop(
        "base_model.model.blocks.0.q_proj.lora_A.weight"
    )
    safetensors.torch.save_file(stored, file)
    loaded = build()
    with pytest.raises(ValueError, match=r"lacks \['.*q_proj.lora_A.weight'\].*other"):
        load(tmp_path, loaded)
    assert adapter_names(loaded) == set()


def test_shape_that_does_not_fit_is_named(model, tmp_path, build):
    attach(model, CONFIG)
    save(tmp_path, model)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(record | {"r": 3}))
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \(2, 4\) there and \(3, 4\)"):
        load(tmp_path, build())


def test_config_that_lost_a_setting_is_refused(model, tmp_path, build):
    attach(model, CONFIG)
    save(tmp_path, model)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    del record["init_sigma"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"lacks \['init_sigma'\]"):
        load(tmp_path, build())


def test_plain_lora_comes_back_and_has_one_dialect(model, tmp_path, build, randomize, x):
    config = Config(r".*_proj", rank=2, fourier_placement="none", rslora=True)
    attach(model, config)
    randomize(model)
    save(tmp_path, model, dialect="peft")
    loaded = build()
    assert load(tmp_path, loaded) == config
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match="saved with dialect='peft'"):
        save(tmp_path, model)


def test_list_of_targets_is_read_as_suffixes(build):
    record = CONFIG.to_peft("LORA") | {"target_modules": ["q_proj", "o_proj"]}
    assert attach(build(), Config.from_peft(record)) == [
        f"blocks.{i}.{name}_proj" for i in range(2) for name in ("q", "o")
    ]


def test_settings_of_another_model_are_refused_by_name():
    record = CONFIG.to_peft("LORA") | {"use_qalora": False, "layer_replication": None}
    assert Config.from_peft(record) == CONFIG
    with pytest.raises(ValueError, match=r"asks for {'use_dora': True, 'bias': 'all'}"):
        Config.from_peft(record | {"use_dora": True, "bias": "all"})


def test_unknown_adapter_is_not_saved(model, tmp_path):
    attach(model, CONFIG)
    with pytest.raises(ValueError, match=r"no adapter 'other'; there are \['default'\]"):
        save(tmp_path, model, name="other")
