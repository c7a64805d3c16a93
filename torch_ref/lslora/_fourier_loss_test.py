"""The regulariser and the diagnostics of the active adapters."""

import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref.lslora import Config, adapted_layers, attach, diagnose, fourier_loss, set_active

CONFIG = Config(target=r".*_proj", rank=2, alpha=6.0)


def test_regulariser_is_the_mean_over_layers_of_active_adapters(model):
    attach(model, CONFIG, name="first")
    attach(model, Config(r"blocks\.0\..*"), name="second")
    with torch.no_grad():
        for i, layer in enumerate(adapted_layers(model).values()):
            layer.fourier_params["first"].weight.copy_(torch.tensor([0.0, 1.0, i, 0.0]))
    set_active(model, "first")
    assert fourier_loss(model).item() == pytest.approx((0 + 1 + 4 + 9) / 4 / 4)
    set_active(model, "second")
    assert fourier_loss(model).item() == 0.0
    set_active(model)
    with pytest.raises(ValueError, match="no adapter is active"):
        fourier_loss(model)


def test_regulariser_pulls_coefficients_to_the_first_ones(model, randomize):
    attach(model, CONFIG)
    randomize(model)
    fourier_loss(model).backward()
    params = adapted_layers(model)["blocks.0.q_proj"].fourier_params["default"]
    expected = 2 * (params.weight - torch.tensor([0.0, 1, 0, 0])) / 4 / 4
    torch.testing.assert_close(params.weight.grad, expected.detach())
    assert params.sigma.grad is None


def test_diagnostics_are_plain_numbers(model):
    attach(model, CONFIG)
    with torch.no_grad():
        params = adapted_layers(model)["blocks.1.o_proj"].fourier_params["default"]
        params.weight.copy_(torch.tensor([0.5, 1.25, -0.25, 2.0]))
        params.sigma.copy_(torch.tensor(1.5))
    found = diagnose(model)
    assert list(found)[-1] == "blocks.1.o_proj/default" and len(found) == 4
    assert found["blocks.1.o_proj/default"] == (
        (0.5, 1.25, -0.25, 2.0),
        1.5,
        (0.5 + 0.25 + 0.25 + 2.0) / 4,
        2.25,
        None,
    )


def test_saturated_fraction_counts_the_values_where_tanh_is_flat(model, x):
    attach(model, Config(r"blocks\.0\.q_proj", rank=2, fourier_placement="bottleneck"))
    layer = adapted_layers(model)["blocks.0.q_proj"]
    z = layer.lora_A["default"](x).detach().abs().flatten()
    with torch.no_grad():  # between two values of the batch: atanh(0.95) sigma is the middle of z
        middle = z.sort().values[4:6].mean()
        layer.fourier_params["default"].sigma.copy_(-middle / math.atanh(0.95))
    assert diagnose(model, x)["blocks.0.q_proj/default"].saturated == 0.5


class InTraining(nn.Module):
    """Everything that differs in training, before a layer that is adapted."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.up = nn.Linear(4, 6)
        self.unused = nn.Linear(4, 6)

    def forward(self, x):
        return self.up(self.drop(self.norm(x)))


def test_saturated_fraction_is_of_evaluation_and_leaves_the_model_in_training(x):
    model = InTraining()
    attach(model, Config("up", dropout=0.5, init_sigma=0.1))
    with torch.no_grad():
        adapted_layers(model)["up"].lora_B["default"].weight.normal_()
    model.drop.eval()  # as a user may have it
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = [diagnose(model, x) for _ in range(2)]
    assert found[0] == found[1]
    assert modes == {name: module.training for name, module in model.named_modules()}
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert diagnose(model.eval(), x) == found[0]


def test_adapted_layer_that_is_not_called_is_named_and_the_mode_restored(x):
    model = InTraining()
    attach(model, Config("up|unused"))
    assert len(diagnose(model)) == 2
    with pytest.raises(ValueError, match=r"does not call \['unused/default'\]"):
        diagnose(model, x)
    assert all(module.training for module in model.modules())


def test_plain_lora_has_nothing_to_diagnose_or_regularise(model):
    attach(model, Config(r".*_proj", rank=2, fourier_placement="none"))
    assert diagnose(model) == {}
    with pytest.raises(ValueError, match="no adapter is active that has coefficients"):
        fourier_loss(model)


def test_diagnostics_build_no_graph(model):
    attach(model, CONFIG)
    seen = []

    class Graphs(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                seen.append(result.grad_fn)
            return result

    with Graphs():
        diagnose(model)
    assert seen and not any(seen)
