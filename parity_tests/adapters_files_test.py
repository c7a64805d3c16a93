"""Adapters of jaxkfac, torch_ref and stock PEFT: one file, the same numbers.

A scanned model here, a list of blocks there. What crosses is what lies on disk.
"""

import collections
import dataclasses
import importlib
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jaxkfac import lslora
from torch_ref import lslora as reference

TARGET = r"layers/attn/(q|o)_proj/kernel"
X = np.sin(np.linspace(-1, 1, 24)).reshape(6, 4).astype(np.float32)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 6)
        self.o_proj = nn.Linear(6, 4, bias=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return x + self.attn.o_proj(torch.tanh(self.attn.q_proj(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return x


def base():
    torch.manual_seed(0)
    return Net()


def apply_fn(p, x):
    """The same model, scanned, with two axes of outputs in its first kernel."""

    def block(c, w):
        h = jnp.einsum("nd,dhk->nhk", c, w["q_proj"]["kernel"]) + w["q_proj"]["bias"]
        return c + jnp.einsum("nhk,hkd->nd", jnp.tanh(h), w["o_proj"]["kernel"]), None

    return jax.lax.scan(block, x, p["layers"]["attn"])[0]


def params(dtype=np.float32):
    blocks = base().layers

    def stacked(read):
        return jnp.asarray(np.stack([read(b.attn).detach().numpy() for b in blocks]), dtype)

    q = {
        "kernel": stacked(lambda m: m.q_proj.weight.T.reshape(4, 2, 3)),
        "bias": stacked(lambda m: m.q_proj.bias.reshape(2, 3)),
    }
    o = {"kernel": stacked(lambda m: m.o_proj.weight.T.reshape(2, 3, 4))}
    return {"layers": {"attn": {"q_proj": q, "o_proj": o}}}


def config_of(placement):
    return lslora.Config(
        rank=2,
        alpha=6.0,
        target=TARGET,
        fourier_placement=placement,
        init_sigma=0.7,
        reg_weight=0.03,
        dropout=0.1,
    )


def adapters_of(config, seed=0):
    """Adapters away from their first values."""
    fresh = lslora.init(config, apply_fn, params(), jnp.asarray(X), key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [
        v + 0.3 * jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def ours(config, adapters):
    """Outputs from what lies on disk, in float64: what is left is not rounding."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: v.astype(jnp.float64), adapters)
        x = jnp.asarray(X, jnp.float64)
        return np.asarray(lslora.attach(apply_fn, config)(params(np.float64), wide, x))


def theirs(model):
    """Likewise; the model is in float64 from here on."""
    with torch.no_grad():
        return model.double().eval()(torch.from_numpy(X).double()).numpy()


def same(got, want):
    assert np.abs(want - theirs(base())).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def trained(placement):
    """A model of torch_ref with an adapter away from its first values."""
    model = base()
    reference.attach(model, reference.Config(r".*_proj", 2, 6.0, placement, 0.7, 0.03, 0.1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
@pytest.mark.parametrize("dialect", ["lslora", "peft"])
def test_torch_ref_computes_what_was_written_here(tmp_path, placement, dialect):
    config = config_of(placement)
    adapters = adapters_of(config)
    lslora.save(tmp_path, adapters, config, name="task", dialect=dialect)
    model = base()
    read = reference.load(tmp_path, model, name="task")
    same(ours(config, adapters), theirs(model))
    for key in ("rank", "alpha", "fourier_placement", "init_sigma", "reg_weight", "dropout"):
        assert getattr(read, key) == getattr(config, key)


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_what_torch_ref_writes_is_computed_here(tmp_path, placement):
    model, config = trained(placement), config_of(placement)
    reference.save(tmp_path, model)
    adapters, read = lslora.load(tmp_path, like=adapters_of(config))
    same(ours(read, adapters), theirs(model))
    kept = dataclasses.replace(read, target=config.target)
    assert kept == config and all(read.targets(name) for name in adapters)


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_gradients_regulariser_and_diagnosis_are_equal_in_float64(tmp_path, placement):
    model, config = trained(placement), config_of(placement)
    reference.save(tmp_path, model)
    with jax.enable_x64(True):
        like = adapters_of(config)
        adapters, _ = lslora.load(tmp_path, like=like)
        adapters = jax.tree.map(lambda v: v.astype(jnp.float64), adapters)
        adapted = lslora.attach(apply_fn, config)

        def loss(a):
            out = adapted(params(np.float64), a, jnp.asarray(X, jnp.float64))
            return jnp.square(out).sum() + lslora.fourier_loss(a)

        value, grads = jax.jit(jax.value_and_grad(loss))(adapters)
        diagnosis = lslora.diagnose(adapters)
        model.double().eval()
        want = model(torch.from_numpy(X).double()).square().sum() + reference.fourier_loss(model)
        want.backward()
        np.testing.assert_allclose(float(value), want.item(), rtol=1e-12)
        expected = reference.diagnose(model)
        for i, block in enumerate(model.layers):
            for side in ("q_proj", "o_proj"):
                name, layer = f"layers/attn/{side}/kernel", getattr(block.attn, side)
                fourier = layer.fourier_params["default"]
                for mine, other in (
                    (grads[name].a[i].T, layer.lora_A["default"].weight.grad),
                    (grads[name].b[i].T, layer.lora_B["default"].weight.grad),
                    (grads[name].coefficients[i], fourier.weight.grad),
                    (grads[name].sigma[i], fourier.sigma.grad),
                ):
                    np.testing.assert_allclose(mine, other.numpy(), rtol=1e-10, atol=1e-13)
                row = expected[f"layers.{i}.attn.{side}/default"]
                got = diagnosis[name]
                np.testing.assert_allclose(got.coefficients[i], row.coefficients, rtol=1e-12)
                for key in ("sigma", "deviation", "nonlinearity"):
                    np.testing.assert_allclose(getattr(got, key)[i], getattr(row, key), rtol=1e-12)


@pytest.fixture(scope="module")
def peft():
    """Stock PEFT, where it is installed.

    It imports torchvision wherever that is. One that was built for another torch fails; then it
    is hidden, since no test here needs it.
    """
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed; extra: peft")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None
    return importlib.import_module("peft")


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_stock_peft_with_the_plug_in_reads_and_writes_the_same_file(tmp_path, placement, peft):
    from torch_ref.lslora import peft_plugin

    config = config_of(placement)
    adapters = adapters_of(config)
    lslora.save(tmp_path / "ours", adapters, config, dialect="peft")
    settings = peft_plugin.read_config(tmp_path / "ours")
    model = peft.PeftModel.from_pretrained(base(), tmp_path / "ours", config=settings)
    model.save_pretrained(tmp_path / "theirs")
    same(ours(config, adapters), theirs(model))
    again, read = lslora.load(tmp_path / "theirs", like=adapters)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    assert dataclasses.replace(read, target=config.target) == config


def test_plain_lora_of_stock_peft_is_computed_exactly_and_goes_back(tmp_path, peft):
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=3,
        target_modules=["q_proj", "o_proj"],
        rank_pattern={"o_proj": 2},
        alpha_pattern={"o_proj": 10},
        use_rslora=True,
        init_lora_weights=False,  # B other than zero
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(base(), settings)
    model.save_pretrained(tmp_path / "theirs")
    like = lslora.init(
        lslora.Config(rank=4, target=TARGET, rank_pattern={".*o_proj.*": 2}),
        apply_fn,
        params(),
        jnp.asarray(X),
        key=jax.random.key(0),
    )
    adapters, config = lslora.load(tmp_path / "theirs", like=like)
    assert config.fourier_placement == "none" and adapters[next(iter(adapters))].is_linear
    same(ours(config, adapters), theirs(model))
    lslora.save(tmp_path / "ours", adapters, config, dialect="peft")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours")
    same(ours(config, adapters), theirs(again))


def test_modules_that_stock_peft_saves_whole_are_read_and_written(tmp_path, peft):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            collections.OrderedDict(q_proj=nn.Linear(4, 6), act=nn.Tanh(), head=nn.Linear(6, 3))
        )

    def dense(p, x):
        h = jnp.tanh(x @ p["q_proj"]["kernel"] + p["q_proj"]["bias"])
        return h @ p["head"]["kernel"] + p["head"]["bias"]

    weights = {
        name: {
            "kernel": jnp.asarray(layer.weight.detach().numpy().T),
            "bias": jnp.asarray(layer.bias.detach().numpy()),
        }
        for name, layer in build().named_children()
        if name != "act"
    }
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["head"])
    model = peft.get_peft_model(build(), settings)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.5)
    model.save_pretrained(tmp_path / "theirs")
    like = lslora.init(
        lslora.Config(rank=2, target=("q_proj",), modules_to_save="head/.*"),
        dense,
        weights,
        jnp.asarray(X),
        key=jax.random.key(0),
    )
    adapters, config = lslora.load(tmp_path / "theirs", like=like)
    got = lslora.attach(dense, config)(weights, adapters, jnp.asarray(X))
    with torch.no_grad():
        want = model(torch.from_numpy(X)).numpy()
        assert np.abs(want - build()(torch.from_numpy(X)).numpy()).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # float32, sums in another order
    lslora.save(tmp_path / "ours", adapters, config, dialect="peft")
    again = peft.PeftModel.from_pretrained(build(), tmp_path / "ours")
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.from_numpy(X)).numpy(), want)
