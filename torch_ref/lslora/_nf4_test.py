"""Adapters on a base in four bits: the formula on the decoded weights, and nothing decoded kept."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

from torch_ref.lslora import Config, adapted_layers, attach, load, quantize, save
from torch_ref.memory import Recomputed

functional = pytest.importorskip("bitsandbytes.functional")

PLACEMENTS = ("output", "bottleneck", "none")
X = torch.linspace(-1, 1, 6 * 64).reshape(6, 64).sin()


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64, bias=False)
    return nn.Sequential(*layers).to(dtype)


def adapted(randomize, placement="output", dtype=torch.float32):
    """Made in float32, and then in ``dtype``; A to sigma are not what they begin with."""
    model = net()
    quantize(model, "0|2")
    attach(model, Config("0|2", rank=3, alpha=6.0, fourier_placement=placement))
    randomize(model)
    return model.to(dtype)


def decoded(model):
    """The same model on plain layers with the decoded weights."""
    plain = copy.deepcopy(model)
    for layer in adapted_layers(plain).values():
        weight = layer.base_layer.weight
        matrix = functional.dequantize_4bit(weight.data, weight.quant_state).to(X.dtype)
        base = nn.Linear(*matrix.shape[::-1], bias=layer.base_layer.bias is not None)
        base.weight = nn.Parameter(matrix, requires_grad=False)
        base.bias = layer.base_layer.bias
        layer.base_layer = base
    return plain


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {"outputs": y, "inputs": x.grad, **trained}


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def test_layers_hold_codes_in_two_levels_of_scales():
    model = net()
    assert quantize(model, "0|2") == ["0", "2"]
    for layer, shape in ((model[0], (96, 64)), (model[2], (64, 96))):
        state = layer.weight.quant_state
        assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == math.prod(shape) // 2
        assert state.shape == shape and state.nested and state.quant_type == "nf4"
        assert not any(p.requires_grad for p in layer.parameters())
    assert torch.equal(model[0].bias, net()[0].bias) and model[2].bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_have_the_shape_and_dtype_of_the_decoded_weight(dtype):
    model = net(dtype)
    quantize(model, "0")
    attach(model, Config("0|2", rank=3))
    for layer, (n_out, n_in) in ((model[0], (96, 64)), (model[2], (64, 96))):
        assert layer.lora_A["default"].weight.shape == (3, n_in)
        assert layer.lora_B["default"].weight.shape == (n_out, 3)
        assert layer.lora_A["default"].weight.dtype == dtype
    assert model(X.to(dtype)).dtype == dtype


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_outputs_and_gradients_are_those_on_the_decoded_weights(placement, training, randomize):
    model = adapted(randomize, placement, torch.float64).train(training)
    expected = decoded(model).double()
    x = X.double()
    with torch.no_grad():  # the pass after which bitsandbytes' own layer cannot be trained
        torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)
    assert_close(gradients(model, x), gradients(expected, x), 1e-12)


def test_rows_are_multiplied_in_the_layers_own_dtype():
    model = net()
    quantize(model, "0")
    model[0].compute_dtype = torch.bfloat16
    attach(model, Config("0"))
    layer = model[0].base_layer
    weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).bfloat16()
    expected = X.bfloat16() @ weight.T + layer.bias.bfloat16()
    found = model[0](X)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(found, found.bfloat16().float())


def test_recomputation_gives_the_same_gradients(randomize):
    model = adapted(randomize)
    expected = gradients(model, X)
    model.zero_grad()
    found = gradients(Recomputed(model), X)
    for name, value in expected.items():
        key = name if name in ("outputs", "inputs") else f"block.{name}"
        assert torch.equal(found[key], value)


def test_no_decoded_weight_is_kept_for_the_backward_pass(randomize):
    model, kept = adapted(randomize), []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(X)
    assert kept and max(kept) < 64 * 96


def test_adapters_are_saved_without_the_base(randomize, tmp_path):
    model = adapted(randomize)
    save(tmp_path, model)
    other = net()
    quantize(other, "0|2")
    load(tmp_path, other)
    assert torch.equal(other(X), model(X))


# ---------------------------------------------------------------- refusals


def test_a_target_without_a_match_is_refused():
    with pytest.raises(ValueError, match=r"'q' matches none of the linear layers \['0', '2'\]"):
        quantize(net(), "q")


def test_weights_that_cannot_be_read_are_refused_and_nothing_is_changed():
    from bitsandbytes.nn import Linear4bit

    model = nn.Sequential(nn.Linear(64, 64), Linear4bit(64, 64, quant_type="nf4"))
    with pytest.raises(ValueError, match="'1'.*quantised when it is moved"):
        attach(model, Config(".*"))
    assert not adapted_layers(model) and model[0].weight.requires_grad
    model[1].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'1'.*got Linear4bit with torch\.int8"):
        attach(model, Config(".*"))


def test_a_weight_repacked_for_inference_is_refused():
    model = net()
    quantize(model, "0")
    model[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="'0'.*repacked"):
        attach(model, Config("0"))


def test_without_bitsandbytes_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="pip install 'bitsandbytes"):
        quantize(net(), "0")
    attach(net(), Config("0"))  # in full precision nothing is missing
