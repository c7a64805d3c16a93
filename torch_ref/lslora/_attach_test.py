"""Named adapters: where they go, which are used and trained."""

import pytest
import torch
from torch import nn

from torch_ref.lslora import Config, adapter_names, attach, delete_adapter, set_active

CONFIG = Config(target=r".*_proj", rank=2, alpha=6.0)


def test_only_adapters_are_trainable(model):
    attach(model, CONFIG)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 * 4
    assert all(".lora_" in n or ".fourier_params." in n for n in trainable)


def test_one_adapter_is_used_and_trained_at_a_time(model, randomize, x):
    base = model(x)
    attach(model, CONFIG, name="first")
    randomize(model, seed=1)
    first = model(x)
    attach(model, Config(r"blocks\.0\.q_proj", rank=3), name="second")
    set_active(model, "second")
    fresh_second = model(x)
    torch.testing.assert_close(fresh_second, base)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".second." in n for n in trainable)
    set_active(model, "first")
    assert torch.equal(model(x), first)
    set_active(model)
    assert torch.equal(model(x), base)


def test_active_adapters_add_up(randomize, x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4)).double()
    x, outputs = x.double(), {}
    base = model(x)
    for seed, name in enumerate(("first", "second")):
        attach(model, Config("0"), name=name)
        randomize(model, seed)
    for names in (("first",), ("second",), ("first", "second")):
        set_active(model, *names)
        outputs[names] = model(x) - base
    torch.testing.assert_close(outputs["first", "second"], outputs["first",] + outputs["second",])


def test_second_adapter_trains_and_the_first_stays(model, x):
    attach(model, CONFIG, name="first")
    attach(model, CONFIG, name="second")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".second." in n for n in changed)


def test_deleted_adapter_is_gone(model):
    attach(model, CONFIG, name="first")
    attach(model, CONFIG, name="second")
    delete_adapter(model, "second")
    assert adapter_names(model) == {"first"}
    assert not [n for n, _ in model.named_parameters() if "second" in n]
    with pytest.raises(ValueError, match="no adapter 'second'"):
        delete_adapter(model, "second")


def test_target_without_a_match_names_the_linear_layers(model):
    with pytest.raises(ValueError, match=r"'q_prj' matches none.*'blocks.0.q_proj'.*'head'"):
        attach(model, Config("q_prj"))


def test_parts_of_adapters_are_no_targets(model):
    attach(model, CONFIG, name="first")
    found = attach(model, Config(".*"), name="second")
    assert found == [f"blocks.{i}.{name}_proj" for i in range(2) for name in ("q", "o")] + ["head"]


@pytest.mark.parametrize(
    ("name", "message"), [("lora", "not 'lora'"), ("a.b", "identifier"), ("taken", "already")]
)
def test_names_that_cannot_be_used_are_refused(model, name, message):
    attach(model, CONFIG, name="taken")
    with pytest.raises(ValueError, match=message):
        attach(model, CONFIG, name=name)


def test_unknown_adapter_is_named(model):
    attach(model, CONFIG)
    with pytest.raises(ValueError, match=r"\['other'\]; there are \['default'\]"):
        set_active(model, "other")


@pytest.mark.parametrize(
    "options",
    [{"rank": 0}, {"dropout": 1.0}, {"fourier_placement": "input"}, {"init_sigma": 0.0}],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Config(target=".*", **options)
