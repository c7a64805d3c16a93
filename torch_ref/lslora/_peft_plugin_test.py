"""Stock PEFT, with the plug-in, reads what is written here, and the other way round."""

import json

import pytest
import torch
from torch import nn

from torch_ref.lslora import Config, attach, load, save

pytestmark = pytest.mark.usefixtures("_imports")

X = torch.linspace(-1, 1, 20).reshape(5, 4).sin()
CONFIG = Config(
    r".*_proj", rank=2, alpha=6.0, init_sigma=0.7, reg_weight=0.03, fourier_placement="bottleneck"
)


@pytest.fixture(scope="module")
def _imports(_transformers):
    """PEFT and the plug-in take seconds to import: not while tests are collected."""
    global peft, plugin
    import peft

    from torch_ref.lslora import peft_plugin as plugin


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 6)
        self.o_proj = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.o_proj(torch.tanh(self.q_proj(x)))


def base():
    torch.manual_seed(0)
    return Net()


def adapted(config=CONFIG, *, name="default", seed=1):
    model = base()
    attach(model, config, name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def read(folder, **options):
    return peft.PeftModel.from_pretrained(
        base(), folder, config=plugin.read_config(folder), **options
    )


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_stock_peft_computes_what_was_saved(tmp_path, placement):
    model = adapted(Config(r".*_proj", rank=2, fourier_placement=placement))
    save(tmp_path, model, dialect="peft")
    torch.testing.assert_close(read(tmp_path)(X), model(X), rtol=1e-6, atol=1e-6)


def test_what_stock_peft_saves_is_loaded_with_all_its_settings(tmp_path):
    model = adapted()
    save(tmp_path / "ours", model, dialect="peft")
    read(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = base()
    assert load(tmp_path / "theirs", again) == CONFIG
    assert torch.equal(again(X), model(X))


def test_plain_lora_of_stock_peft_keeps_its_scalings_and_ranks(tmp_path):
    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=3,
        target_modules=["q_proj", "o_proj"],
        rank_pattern={"o_proj": 2},
        alpha_pattern={"o_proj": 10},
        use_rslora=True,
        init_lora_weights=False,  # B other than zero
    )
    theirs = peft.get_peft_model(base(), settings)
    theirs.save_pretrained(tmp_path)
    model = base()
    config = load(tmp_path, model)
    assert config.fourier_placement == "none" and config.rslora
    torch.testing.assert_close(model(X), theirs(X), rtol=1e-6, atol=1e-6)


def test_second_adapter_lies_beside_the_first(tmp_path):
    first, second = adapted(seed=1), adapted(name="other", seed=2)
    save(tmp_path, first, dialect="peft")
    save(tmp_path, second, name="other", dialect="peft")
    model = read(tmp_path)
    model.add_adapter("other", plugin.read_config(tmp_path / "other"))
    model.load_adapter(tmp_path / "other", "other")
    model.set_adapter("other")
    torch.testing.assert_close(model(X), second(X), rtol=1e-6, atol=1e-6)
    model.set_adapter("default")
    torch.testing.assert_close(model(X), first(X), rtol=1e-6, atol=1e-6)


def test_coefficients_are_trained_by_stock_peft(tmp_path):
    save(tmp_path, adapted(), dialect="peft")
    model = read(tmp_path, is_trainable=True)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sum("fourier_params" in n for n in trainable) == 4 and len(trainable) == 8
    model(X).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_merging_says_why_it_cannot(tmp_path):
    save(tmp_path, adapted(), dialect="peft")
    for safe in (True, False):
        with pytest.raises(ValueError, match="not linear"):
            read(tmp_path).merge_and_unload(safe_merge=safe)


@pytest.mark.parametrize("fast", [False, True])
def test_without_the_plug_in_peft_refuses_the_adapter_and_says_what_it_needs(fast, tmp_path):
    save(tmp_path / "ours", adapted(), dialect="peft")
    read(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        with pytest.raises(ValueError, match="needs torch_ref.lslora.peft_plugin"):
            peft.PeftModel.from_pretrained(base(), folder, low_cpu_mem_usage=fast)


def test_lslora_dialect_is_refused_by_stock_peft(tmp_path):
    save(tmp_path, adapted(), dialect="lslora")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LSLORA"
    with pytest.raises((KeyError, ValueError)):
        peft.PeftModel.from_pretrained(base(), tmp_path)
