"""What an adapted layer computes."""

import math

import pytest
import torch
from torch import nn

from torch_ref.lslora import Config, FourierParams, LSLoRALinear, attach


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
