"""Each fault gives the numbers of its fix, and is still a fault."""

import gc
import weakref

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.factors import Categorical, collect_factors, fisher_loss
from torch_ref.linalg import stabilize
from torch_ref.lslora import Config, LSLoRALinear, adapted_layers, attach, diagnose, fourier_loss
from torch_ref.memory import Recomputed, cast_once

LOSS = fisher_loss(Categorical())
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).sin()
Y = torch.arange(6) % 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Calls(TorchFunctionMode):
    """Names of the functions called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("collect", [unfixed.collect_retaining_graph, unfixed.collect_on_device])
def test_factors_are_those_of_the_fix(collect):
    model = build()
    expected = collect_factors(model, LOSS, (X, Y))
    found = collect(model, LOSS, (X, Y))
    for name, f in expected.items():
        torch.testing.assert_close(found[name].a, f.a)
        torch.testing.assert_close(found[name].g, f.g)


def test_activations_outlive_the_retained_backward_pass(monkeypatch):
    model, alive, gradients = build(), [], []
    backward = torch.Tensor.backward

    def spy(self, *args, **kwargs):
        backward(self, *args, **kwargs)
        alive.append([ref() is not None for ref in hidden])

    hidden = []
    model[1].register_forward_hook(lambda m, args, out: hidden.append(weakref.ref(out)))
    monkeypatch.setattr(torch.Tensor, "backward", spy)
    unfixed.collect_retaining_graph(model, LOSS, (X, Y))
    gradients.append(model[0].weight.grad)
    hidden.pop()
    collect_factors(model, LOSS, (X, Y))
    gradients.append(model[0].weight.grad)
    assert alive == [[True], [False]]
    assert gradients[0] is not None and gradients[1] is None


def test_hooks_stay_when_the_unfixed_pass_fails():
    model = build()

    def fails(model, batch):
        raise FloatingPointError("no loss today")

    with pytest.raises(FloatingPointError):
        unfixed.collect_retaining_graph(model, fails, (X, Y))
    assert model[0]._forward_hooks


def test_factors_stay_in_the_models_dtype_on_its_device():
    model = build().bfloat16()
    batch = (X.bfloat16(), Y)
    assert unfixed.collect_on_device(model, LOSS, batch)["0"].a.dtype == torch.bfloat16
    assert collect_factors(model, LOSS, batch)["0"].a.dtype == torch.float32


def test_factor_is_converted_before_it_is_moved():
    factor = torch.ones(2, dtype=torch.bfloat16)
    with Calls() as calls:
        unfixed.to_host_converted_first(factor)
    assert calls.names == ["float", "cpu"]


def test_clipped_matrix_is_that_of_the_fix():
    rows = X[:3]
    matrix = rows.T @ rows
    found = unfixed.stabilize_on_device(matrix, 10.0, 1e-3, device="cpu")
    torch.testing.assert_close(found, stabilize(matrix, 10.0, 1e-3), rtol=1e-10, atol=1e-12)


def test_model_that_needs_nothing_is_copied_all_the_same(tmp_path):
    model = build()
    copied = unfixed.cast_and_move_always(model, torch.float64, "cpu")
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()
    assert cast_once(model, torch.float64) == 0
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded = unfixed.load_then_convert(build, tmp_path / "m.safetensors", dtype=torch.bfloat16)
    assert torch.equal(loaded[0].weight, model[0].weight.bfloat16())


def test_saved_file_is_that_of_the_fix_and_gradients_stay(tmp_path):
    model = build()
    LOSS(model, (X, Y)).backward()
    unfixed.save_without_cleanup(model, tmp_path / "m.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert torch.equal(stored["0.weight"], model[0].weight)
    assert model[0].weight.grad is not None


def test_reentrant_recomputation_has_the_same_gradient_and_needs_an_input_with_one():
    model = build()
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(Recomputed(model)(x).square().sum(), x)
    unfixed.ReentrantlyRecomputed(model)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not unfixed.ReentrantlyRecomputed(model)(X).requires_grad
    assert Recomputed(model)(X).requires_grad


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_transferring_layer_computes_the_same_and_transfers_in_every_call(placement):
    torch.manual_seed(0)
    outputs, transfers = [], []
    base = nn.Linear(4, 4).double()
    adapter = None
    for cls in (LSLoRALinear, unfixed.TransferringLSLoRALinear):
        layer = cls(base)
        layer.add_adapter("default", Config(".*", rank=2, fourier_placement=placement))
        layer.set_active(("default",))
        with torch.no_grad():
            layer.lora_B["default"].weight.fill_(0.3)
        if adapter is not None:
            layer.load_state_dict(adapter)
        adapter = layer.state_dict()
        with Calls() as calls:
            outputs.append(layer(X))
        transfers.append(sum(n == "to" for n in calls.names))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert transfers[1] == transfers[0] + 4


def test_regulariser_and_diagnostics_have_the_fixes_values_and_its_faults():
    model = build()
    attach(model, Config("0"))
    with torch.no_grad():
        weight = adapted_layers(model)["0"].fourier_params["default"].weight
        weight.copy_(torch.tensor([0.5, 1.5, 0.25, -1.0]))
    with Calls() as calls:
        value = unfixed.fourier_loss_from_host(model)
    assert "tensor" in calls.names
    assert value.item() == fourier_loss(model).item()
    numbers, plain = unfixed.diagnose_with_graph(model)["0/default"], diagnose(model)["0/default"]
    assert numbers["deviation"].item() == plain.deviation
    assert numbers["nonlinearity"].item() == plain.nonlinearity
    assert numbers["deviation"].grad_fn is not None


def test_full_batch_step_is_the_accumulated_one():
    results = []
    micro_batches = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]
    for accumulate in (True, False):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if accumulate:
            (loss,) = accumulated_training(model, optimizer, LOSS, micro_batches, every=3)
        else:
            loss = unfixed.full_batch_step(model, optimizer, LOSS, micro_batches)
        results.append((loss, model[0].weight.detach()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)


def test_retained_graph_is_gone_once_the_fault_returns():
    refs = []
    model = build()
    model[1].register_forward_hook(lambda m, args, out: refs.append(weakref.ref(out)))
    unfixed.collect_retaining_graph(model, LOSS, (X, Y))
    gc.collect()
    assert refs[0]() is None  # what is measured is the peak of the call, not a leak after it
