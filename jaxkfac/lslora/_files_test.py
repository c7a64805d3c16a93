"""Adapters come back from disk as they were, and what does not fit is named."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxkfac._errors import CheckpointMismatchError, DamagedFileError
from jaxkfac.lslora import (
    Adapter,
    Config,
    RmsSigma,
    as_fourier,
    attach,
    fourier_loss,
    fuse,
    init,
    load,
    module_name,
    save,
    split,
    stack,
)
from jaxkfac.lslora._modules import layer_name

KEY = jax.random.key(0)
PARAMS = {
    "layers": {
        "attn": {"q_proj": {"kernel": jnp.ones((2, 4, 2, 3))}},
        "mlp": {"kernel": jnp.ones((2, 6, 4))},
    },
    "head": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)},
}
X = jnp.linspace(-1, 1, 20).reshape(5, 4)
CONFIG = Config(
    rank=2,
    alpha=5,
    target=("q_proj", "mlp"),
    exclude="nothing",
    fourier_placement="bottleneck",
    init_sigma=0.7,
    reg_weight=0.03,
    rslora=True,
    dropout=0.1,
    rank_pattern={".*mlp.*": 3},
    alpha_pattern={".*mlp.*": 7.5},
    modules_to_save="head/.*",
    experts="none",
)

WIDE, PLAIN = {"rank_pattern": {".*": 3}}, {"fourier_placement": "none"}


def fn(p, x):
    def block(c, w):
        h = jnp.einsum("nd,dhk->nhk", c, w["attn"]["q_proj"]["kernel"])
        return c + jnp.tanh(h).reshape(-1, 6) @ w["mlp"]["kernel"], None

    return jax.lax.scan(block, x, p["layers"])[0] @ p["head"]["kernel"] + p["head"]["bias"]


def adapters_of(config=CONFIG, **options):
    fresh = init(fn, config, PARAMS, X, key=KEY, **options)
    leaves, structure = jax.tree.flatten(fresh)
    moved = [x + 0.1 * (i + 1) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, moved)


def equal(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dialect", ["lslora", "peft"])
@pytest.mark.parametrize("name", ["default", "other"])
def test_an_adapter_comes_back_bit_for_bit_with_every_setting(tmp_path, name, dialect):
    adapters = adapters_of()
    save(tmp_path, adapters, CONFIG, name=name, dialect=dialect)
    for like in (None, adapters, jax.eval_shape(adapters_of)):
        again, config = load(tmp_path, name=name, like=like)
        assert config == CONFIG
        equal(again, adapters)
    folder = tmp_path if name == "default" else tmp_path / name
    record = json.loads((folder / "adapter_config.json").read_text())
    assert record["peft_type"] == {"lslora": "LSLORA", "peft": "LORA"}[dialect]
    assert {f.name for f in folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_the_same_adapter_is_the_same_bytes(tmp_path):
    """The package that writes the tensors has a hash table with a new seed for each file."""
    adapters = init(fn, CONFIG, PARAMS, X, key=KEY)
    contents = set()
    for number in range(8):
        save(tmp_path / str(number), adapters, CONFIG)
        files = sorted(path for path in (tmp_path / str(number)).iterdir())
        contents.add(tuple(path.read_bytes() for path in files))
    assert len(contents) == 1
    (data,) = [x for x in contents.pop() if b"__metadata__" in x]
    assert int.from_bytes(data[:8], "little") % 8 == 0  # tensors are aligned
    assert load(tmp_path / "0")[0].keys() == adapters.keys()


def test_the_file_has_pefts_keys_one_module_for_each_slice_in_pytorchs_orientation(tmp_path):
    adapters = adapters_of()
    save(tmp_path, adapters, CONFIG)
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model."
    shapes = {f"{prefix}head.weight": (3, 4), f"{prefix}head.bias": (3,)}
    for i in range(2):
        for module, rank, n_in, n_out in (("attn.q_proj", 2, 4, 6), ("mlp", 3, 6, 4)):
            where = f"{prefix}layers.{i}.{module}"
            shapes |= {
                f"{where}.lora_A.weight": (rank, n_in),
                f"{where}.lora_B.weight": (n_out, rank),
                f"{where}.fourier_params.weight": (4,),
                f"{where}.fourier_params.sigma": (),
            }
    assert {k: v.shape for k, v in stored.items()} == shapes
    np.testing.assert_array_equal(
        stored[f"{prefix}layers.1.attn.q_proj.lora_A.weight"],
        adapters["layers/attn/q_proj/kernel"].a[1].T,
    )
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert record["rank_pattern"] == {rf"^layers\.{i}\.mlp": 3 for i in range(2)}
    assert record["modules_to_save"] == ["head"]


@pytest.mark.parametrize(
    ("layer", "index", "module"),
    [
        ("q", (), "q"),
        ("params/q_proj/kernel", (), "q_proj"),
        ("params/attn/q_proj", (), "attn.q_proj"),  # no usual name of a parameter
        ("params/layers/attn/q_proj/kernel", (3,), "layers.3.attn.q_proj"),
        ("model/layers/mlp/kernel", (0,), "model.layers.0.mlp"),
        ("decoder/q/kernel", (1,), "decoder.1.q"),
        ("layers/experts/up/kernel", (2, 5), "layers.2.experts.5.up"),
        ("layers/up/kernel", (2, 5), "layers.2.up.5"),
        ("blocks/q/kernel[4]", (), "blocks.4.q"),
        ("layers/0/q/kernel", (), "layers.0.q"),
    ],
)
def test_default_module_names(layer, index, module):
    assert module_name(layer, index) == module


def test_only_the_first_number_after_the_scanned_name_is_the_index_of_a_slice():
    assert layer_name("layers.3.layers.4.q", "layers") == ("layers/layers/4/q/kernel", 3)


def test_own_names_and_names_that_collide(tmp_path):
    config = Config(rank=1, target=".*mlp.*")
    adapters = adapters_of(config)

    def names(layer, index):
        return f"model.h.{index[0]}.ffn"

    save(tmp_path, adapters, config, names=names)
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.h.1.ffn.lora_A.weight" in stored
    equal(load(tmp_path, like=adapters, names=names)[0], adapters)
    equal(load(tmp_path)[0], adapters)
    with pytest.raises(ValueError, match=r"written as 'base_model.model.all.lora_A.weight'"):
        save(tmp_path, adapters, config, names=lambda layer, index: "all")


@pytest.mark.slow
def test_a_measured_sigma_and_bfloat16_survive(tmp_path):
    config = Config(rank=2, target=("mlp",), init_sigma=RmsSigma(2.5))
    adapters = adapters_of(config, dtype=jnp.bfloat16)
    assert adapters["layers/mlp/kernel"].a.dtype == jnp.bfloat16
    save(tmp_path, adapters, config)
    again, settings = load(tmp_path)
    assert settings == config
    equal(again, adapters)


def test_plain_lora_is_written_as_stock_peft_writes_it(tmp_path):
    config = Config(rank=2, target=("mlp",), fourier_placement="none")
    adapters = adapters_of(config)
    save(tmp_path, adapters, config, dialect="peft")
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert not {"fourier_placement", "init_sigma", "fourier_reg_weight"} & record.keys()
    again, settings = load(tmp_path)
    assert settings == config
    equal(again, adapters)
    with pytest.raises(ValueError, match="no word for plain LoRA"):
        save(tmp_path, adapters, config)


def test_one_file_holds_one_adapter_and_names_that_contain_each_other_are_kept_apart(tmp_path):
    config = Config(rank=2, target=("mlp",))
    first = adapters_of(config)
    second = jax.tree.map(lambda x: -x, first)
    save(tmp_path, first, config, name="task")
    save(tmp_path, second, config, name="task2")
    equal(load(tmp_path, name="task")[0], first)
    equal(load(tmp_path, name="task2")[0], second)


@pytest.mark.slow
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(tmp_path):
    config = Config(rank=2, target=("mlp", "q_proj"), init_sigma=0.5)
    adapted, tx = attach(fn, config), optax.sgd(0.01, momentum=0.9)

    @jax.jit
    def step(adapters, state):
        def loss(a):
            return jnp.square(adapted(PARAMS, a, X)).mean() + 0.1 * fourier_loss(a)

        updates, state = tx.update(jax.grad(loss)(adapters), state)
        return optax.apply_updates(adapters, updates), state

    one = step(*step(*(lambda a: (a, tx.init(a)))(adapters_of(config))))
    save(tmp_path, one[0], config)
    straight, _ = step(*one)
    resumed, _ = step(load(tmp_path)[0], one[1])
    equal(resumed, straight)


def changed(folder, key, **values):
    record = json.loads((folder / "adapter_config.json").read_text())
    record |= values
    if key is not None:
        del record[key]
    record.get("jaxkfac", {}).pop("checksums", None)  # as an older version would have written it
    (folder / "adapter_config.json").write_text(json.dumps(record))


def as_by_another_writer(folder, stored):
    """The tensors, and a config without what is added here."""
    safetensors.numpy.save_file(stored, folder / "adapter_model.safetensors")
    if "jaxkfac" in json.loads((folder / "adapter_config.json").read_text()):
        changed(folder, "jaxkfac")


def test_missing_extra_and_misshapen_keys_are_all_named(tmp_path):
    config = Config(rank=2, target=("mlp",))
    adapters = adapters_of(config)
    save(tmp_path, adapters, config)
    file = tmp_path / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(file)
    where = "base_model.model.layers"
    stored[f"{where}.9.mlp.lora_A.weight"] = stored.pop(f"{where}.0.mlp.lora_A.weight")
    stored[f"{where}.1.mlp.lora_B.weight"] = np.zeros((4, 5), np.float32)
    as_by_another_writer(tmp_path, stored)
    with pytest.raises(ValueError, match=r"pass model=, like="):
        load(tmp_path)
    with pytest.raises(CheckpointMismatchError) as error:
        load(tmp_path, like=adapters)
    assert f"lacks ['{where}.0.mlp.lora_A.weight']" in str(error.value)
    assert f"has ['{where}.9.mlp.lora_A.weight'], which the model" in str(error.value)
    assert f"{where}.1.mlp.lora_B.weight has shape (4, 5), expected (4, 2)" in str(error.value)


def test_damaged_files_and_configs_of_something_else_are_refused(tmp_path):
    config = Config(rank=2, target=("mlp",))
    save(tmp_path, adapters_of(config), config)
    file, text = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    data, record = file.read_bytes(), text.read_text()
    for damaged in (data[:-7], data[:5], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"adapter_model.safetensors is damaged"):
            load(tmp_path)
    file.write_bytes(data)
    text.write_text(record[:-9])
    with pytest.raises(DamagedFileError, match=r"adapter_config.json is damaged"):
        load(tmp_path)
    text.write_text(record)
    changed(tmp_path, None, peft_type="IA3")
    with pytest.raises(ValueError, match="expected peft_type 'LSLORA' or 'LORA', got 'IA3'"):
        load(tmp_path)
    text.write_text(record)
    changed(tmp_path, "init_sigma")
    with pytest.raises(ValueError, match=r"lacks \['init_sigma'\]"):
        load(tmp_path)
    text.write_text(record)
    changed(tmp_path, None, use_dora=True, bias="all")
    with pytest.raises(ValueError, match=r"not supported: {'use_dora': True, 'bias': 'all'}"):
        load(tmp_path)
    text.write_text(record)
    own = json.loads(record)["jaxkfac"]
    del own["init_sigma"], own["experts"]
    changed(tmp_path, None, jaxkfac=own)
    with pytest.raises(
        ValueError, match=r"config.json lacks \['jaxkfac.experts', 'jaxkfac.init_sigma'\]"
    ):
        load(tmp_path)
    for wrong in ({"r": 0}, {"lora_alpha": "much"}):
        text.write_text(record)
        changed(tmp_path, None, **wrong)
        with pytest.raises(ValueError, match=r"adapter_config.json: "):
            load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no adapter in"):
        load(tmp_path, name="absent")


def test_damaged_metadata_is_named_with_its_file(tmp_path):
    config = Config(rank=2, target=("mlp",))
    save(tmp_path, adapters_of(config), config)
    file = tmp_path / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(file)
    shapes = [[2, 6, 2], [2, 2, 4]]
    for damaged in (
        "{",
        "[]",
        json.dumps({"whole": {}}),
        json.dumps({"layers": {"mlp": shapes}, "whole": {}}),
        json.dumps({"layers": {"mlp": [*shapes, ["layers.0.mlp"]]}, "whole": {}}),
        json.dumps({"layers": {}}),
    ):
        safetensors.numpy.save_file(stored, file, metadata={"jaxkfac": damaged})
        with pytest.raises(DamagedFileError, match=r"model.safetensors is damaged: metadata"):
            load(tmp_path)


def test_nan_is_neither_written_nor_read(tmp_path):
    config = Config(rank=2, target=("mlp",))
    adapters = adapters_of(config)
    save(tmp_path, adapters, config)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    (name,) = adapters
    coefficients = adapters[name].coefficients.at[1, 2].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"NaN or infinity in .*layers.1.mlp.fourier_params.weight"
    ):
        save(tmp_path, {name: adapters[name]._replace(coefficients=coefficients)}, config)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    stored["base_model.model.layers.0.mlp.fourier_params.weight"][0] = np.nan
    as_by_another_writer(tmp_path, stored)
    with pytest.raises(ValueError, match=r"NaN or infinity in .*layers.0.mlp.fourier_params"):
        load(tmp_path, like=adapters)


def test_adapters_that_the_config_contradicts_are_not_written(tmp_path):
    config = Config(rank=2, target=("mlp",))
    adapters = adapters_of(config)
    wide, plain = (dataclasses.replace(config, **x) for x in (WIDE, PLAIN))
    with pytest.raises(ValueError, match=r"layer 'layers/mlp/kernel': .* rank 2, .* says 3"):
        save(tmp_path, adapters, wide)
    with pytest.raises(ValueError, match=r"layer 'layers/mlp/kernel': .* has coefficients, .*none"):
        save(tmp_path, adapters, plain, dialect="peft")
    with pytest.raises(ValueError, match="has no coefficients, and fourier_placement is 'output'"):
        save(tmp_path, adapters_of(plain), config)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_adapters_out_of_a_bank_split_fused_and_started_warm_are_written(tmp_path):
    config = Config(rank=2, target=("mlp",))
    wide, plain = (dataclasses.replace(config, **x) for x in (WIDE, PLAIN))
    configs = {"a": config, "b": wide, "c": plain}
    each = {name: adapters_of(c) for name, c in configs.items()}
    bank = stack(each, configs)
    for name, own in configs.items():
        save(tmp_path, bank.get(name, own), own, name=name, dialect="peft")
        assert load(tmp_path, name=name)[1] == own
    parts = {"mlp": {"up": 1, "down": 3}}
    apart = split(each["c"], plain, parts)
    for saved in (apart, fuse(*apart, parts), as_fourier(each["c"], plain, sigma=2.0)):
        save(tmp_path, *saved, dialect="peft")
        assert load(tmp_path)[1] == saved[1]


@pytest.mark.parametrize("name", ["lora", "../up", "a/b", "a.b", ""])
def test_names_that_cannot_be_part_of_a_key_or_folder_are_refused(tmp_path, name):
    config = Config(rank=2, target=("mlp",))
    with pytest.raises(ValueError, match="expected an identifier"):
        save(tmp_path, adapters_of(config), config, name=name)
    with pytest.raises(ValueError, match="expected an identifier"):
        load(tmp_path, name=name)


def test_a_file_of_another_writer_is_stacked_by_the_numbers_in_its_names(tmp_path):
    config = Config(rank=2, target=("mlp", "head"), fourier_placement="none")
    adapters = adapters_of(config)
    save(tmp_path, adapters, config, dialect="peft")
    file = tmp_path / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(file)
    as_by_another_writer(tmp_path, stored)
    again, _ = load(tmp_path, scanned="layers")
    equal(dict(sorted(again.items())), dict(sorted(adapters.items())))
    del stored["base_model.model.layers.0.mlp.lora_A.weight"]
    as_by_another_writer(tmp_path, stored)
    with pytest.raises(CheckpointMismatchError, match=r"slices \[1\] only"):
        load(tmp_path, scanned="layers")
    del stored["base_model.model.layers.1.mlp.lora_A.weight"]
    del stored["base_model.model.head.lora_B.weight"]
    as_by_another_writer(tmp_path, stored)
    with pytest.raises(CheckpointMismatchError, match=r"lacks 'base_model.model.head.lora_B"):
        load(tmp_path, scanned="layers")


def test_pefts_patterns_of_modules_become_patterns_of_layers(tmp_path):
    config = Config(rank=2, alpha=4, target=("mlp", "q_proj"), rank_pattern={".*mlp.*": 3})
    adapters = adapters_of(config)
    save(tmp_path, adapters, config, dialect="peft")
    changed(tmp_path, "jaxkfac", rank_pattern={"mlp": 3}, alpha_pattern={r"layers\.\d+\.mlp": 9})
    again, settings = load(tmp_path, like=adapters)
    equal(again, adapters)
    for layer, rank, alpha in (("layers/mlp/kernel", 3, 9), ("layers/attn/q_proj/kernel", 2, 4)):
        assert settings.targets(layer)
        assert settings.scaling(layer) == alpha / rank


def test_a_folder_of_the_original_fork_needs_only_what_it_left_out(tmp_path):
    config = Config(rank=2, target=("mlp",), init_sigma=0.5, reg_weight=0.1)
    adapters = adapters_of(config)
    save(tmp_path, adapters, config)
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    as_by_another_writer(tmp_path, stored)
    for key in ("fourier_placement", "init_sigma", "fourier_reg_weight"):
        changed(tmp_path, key)
    with pytest.raises(ValueError, match=r"lacks \['init_sigma', 'fourier_reg_weight'\].*assume="):
        load(tmp_path, scanned="layers")
    assume = {"init_sigma": 0.5, "fourier_reg_weight": 0.1}
    again, settings = load(tmp_path, scanned="layers", assume=assume)
    equal(again, adapters)
    assert settings == dataclasses.replace(config, target=settings.target)
    assert settings.targets("layers/mlp/kernel") and settings.fourier_placement == "output"
    changed(tmp_path, None, peft_type="LORA")  # of which nobody knows where it was
    with pytest.raises(ValueError, match=r"lacks \['fourier_placement'\]"):
        load(tmp_path, scanned="layers", assume=assume)


def test_settings_are_not_assumed_where_the_folder_says_them(tmp_path):
    config = Config(rank=2, target=("mlp",))
    save(tmp_path, adapters_of(config), config)
    with pytest.raises(ValueError, match="says all of its settings"):
        load(tmp_path, assume={"init_sigma": 2.0})


def test_a_setting_that_is_not_known_is_refused_until_it_is_said_to_change_nothing(tmp_path):
    config = Config(rank=2, target=("mlp",), fourier_placement="none")
    adapters = adapters_of(config)
    save(tmp_path, adapters, config, dialect="peft")
    changed(tmp_path, "jaxkfac", invented={"a": 1}, off=False)
    with pytest.raises(ValueError, match=r"not supported: {'invented': {'a': 1}}.*assume="):
        load(tmp_path)
    equal(load(tmp_path, assume={"invented": None})[0], adapters)


def test_what_peft_needs_to_open_the_folder_by_itself_is_written(tmp_path):
    config = Config(rank=2, target=("mlp",), fourier_placement="none")
    adapters = adapters_of(config)
    where = {"base_model": tmp_path / "base", "task_type": "CAUSAL_LM"}
    save(tmp_path, adapters, config, dialect="peft", **where)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(tmp_path / "base")
    assert record["task_type"] == "CAUSAL_LM"
    equal(load(tmp_path)[0], adapters)


def test_a_dtype_that_cannot_be_read_again_is_not_written(tmp_path):
    config = Config(rank=2, fourier_placement="none", modules_to_save="ids")
    adapters = {"q/kernel": Adapter(jnp.ones((3, 2)), jnp.ones((2, 3)), None, None)}
    with pytest.raises(ValueError, match=r"ids' would have dtype int32, and load reads only float"):
        save(tmp_path / "a", adapters | {"ids": jnp.arange(3)}, config, dialect="peft")
    assert not (tmp_path / "a").exists()
