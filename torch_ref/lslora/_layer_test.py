"""What an adapted layer computes."""

import math

import pytest
import torch
from torch import nn

from torch_ref.lslora import Config, FourierParams, LSLoRALinear, adapted_layers, attach


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_layer_computes_the_formula(placement, randomize, x):
    torch.manual_seed(0)
    base = nn.Linear(4, 6)
    layer = LSLoRALinear(base)
    layer.add_adapter("default", Config(".*", rank=2, alpha=6.0, fourier_placement=placement))
    layer.set_active(("default",))
    layer.double()
    randomize(nn.ModuleDict({"layer": layer}))
    x = x.double()
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    c, sigma = layer.fourier_params["default"].weight, layer.fourier_params["default"].sigma

    def phi(z):
        t = torch.tanh(z / (sigma.abs() + 1e-6))
        return sum(c[k] * f for k, f in enumerate([1, t, (math.pi * t).sin(), (math.pi * t).cos()]))

    branch = phi(3 * x @ A.T @ B.T) if placement == "output" else 3 * phi(x @ A.T) @ B.T
    expected = x @ base.weight.T + base.bias + branch
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rslora", [False, True])
def test_plain_lora_with_ranks_and_alphas_of_single_layers_is_the_formula(model, x, rslora):
    config = Config(
        r".*_proj",
        rank=2,
        alpha=6.0,
        fourier_placement="none",
        rslora=rslora,
        rank_pattern={"o_proj": 3, r"blocks\.0\.q_proj": 1},
        alpha_pattern={r"0\.o_proj": 5.0, "proj": 1.0},  # not the end of a name from a dot on
    )
    attach(model, config)
    ranks = {n: layer.lora_A["default"].weight.shape[0] for n, layer in layers_of(model)}
    assert list(ranks.values()) == [1, 3, 2, 3]
    for name, layer in layers_of(model):
        nn.init.normal_(layer.lora_B["default"].weight)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        alpha, rank = 5.0 if name == "blocks.0.o_proj" else 6.0, ranks[name]
        rows = x if layer.base_layer.in_features == 4 else torch.linspace(-1, 1, 12).reshape(2, 6)
        branch = alpha / (math.sqrt(rank) if rslora else rank) * rows @ a.T @ b.T
        torch.testing.assert_close(layer(rows), layer.base_layer(rows) + branch)


def layers_of(model):
    return adapted_layers(model).items()


def test_first_coefficients_are_tanh_and_not_the_identity():
    phi = FourierParams(1.0)
    z = torch.tensor([0.1, 1.0])
    torch.testing.assert_close(phi(z), torch.tanh(z), rtol=1e-5, atol=0)
    assert (phi(z) - z).abs()[1] > 0.2


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_fresh_adapter_changes_nothing(model, placement, x):
    before = model(x)
    attach(model, Config(".*_proj", fourier_placement=placement))
    torch.testing.assert_close(model(x), before)


def test_gradients_are_right_by_finite_differences(randomize):
    torch.manual_seed(0)
    for placement in ("output", "bottleneck"):
        layer = LSLoRALinear(nn.Linear(3, 2))
        layer.add_adapter("default", Config(".*", rank=2, fourier_placement=placement))
        layer.set_active(("default",))
        layer.double()
        randomize(nn.ModuleDict({"layer": layer}))
        names, values = zip(*((n, p) for n, p in layer.named_parameters() if p.requires_grad))
        assert len(names) == 4

        def call(x, *values, layer=layer, names=names):
            return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        inputs = (x, *(v.detach().requires_grad_() for v in values))
        assert torch.autograd.gradcheck(call, inputs)


def test_nonlinearity_of_a_bfloat16_model_is_computed_in_float32(randomize, x):
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    attach(model, Config("0"))
    randomize(model)
    layer = model[0]
    assert layer.lora_A["default"].weight.dtype == torch.bfloat16
    assert layer.fourier_params["default"].weight.dtype == torch.float32
    x = x.bfloat16()
    assert model(x).dtype == torch.bfloat16
    assert layer.fourier_params["default"](x).dtype == torch.float32
