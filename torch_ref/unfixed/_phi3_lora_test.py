"""What each claim on LS-LoRA training is about, counted."""

import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from torch_ref import unfixed
from torch_ref.lslora import (
    Config,
    FourierParams,
    adapted_layers,
    attach,
    diagnose,
    fourier_loss,
)
from torch_ref.memory import Recomputed, track_storages

WIDTH = 8
X = torch.linspace(-2, 2, 20 * WIDTH).reshape(20, WIDTH)


def adapted(layers=32):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    attach(model, Config(".*", rank=2))
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.fourier_params["default"].weight)
    return model


@pytest.mark.parametrize("stack", [False, True])
def test_regulariser_is_that_of_the_fix_with_its_gradient(stack):
    model = adapted(3)
    leaves = [layer.fourier_params["default"].weight for layer in adapted_layers(model).values()]
    value, expected = unfixed.regulariser(model, stack=stack), fourier_loss(model)
    torch.testing.assert_close(value, expected)
    for found, wanted in zip(
        torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves)
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layers", [1, 32])
@pytest.mark.parametrize("stack", [False, True])
def test_regulariser_reads_nothing_back_and_makes_one_host_tensor_for_all_layers(stack, layers):
    model = adapted(layers)
    with track_storages() as made:
        value = unfixed.regulariser(model, stack=stack)
    assert isinstance(value, torch.Tensor) and value.grad_fn is not None
    assert made.calls["_local_scalar_dense"] == 0
    assert made.host_tensors == 1
    assert made.calls["_to_copy"] == 0  # the first coefficients are where they are needed


@pytest.mark.parametrize("layers", [1, 32])
def test_regulariser_sends_the_first_coefficients_for_each_layer_also_after_the_change(layers):
    model = adapted(layers).to("meta")  # stands for a device
    for regulariser, transfers in (
        (lambda model: unfixed.regulariser(model, stack=False), layers),
        (lambda model: unfixed.regulariser(model, stack=True), layers),
        (fourier_loss, 0),
    ):
        with track_storages() as made:
            regulariser(model)
        assert made.calls["_to_copy"] == transfers


def test_regulariser_of_a_model_without_adapters():
    model = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError):
        unfixed.regulariser(model, stack=False)
    assert unfixed.regulariser(model, stack=True).item() == 0.0


@pytest.mark.parametrize("check", [False, True])
def test_nonlinearity_is_that_of_the_fix_and_transfers_nothing_where_all_is_in_place(check):
    params = FourierParams(0.7)
    nn.init.normal_(params.weight, generator=torch.Generator().manual_seed(0))
    assert params.weight.to(X.device) is params.weight
    weight = params.weight
    with track_storages() as made:
        found = unfixed.nonlinearity(params, X, check=check)
    torch.testing.assert_close(found, params(X))
    assert made.calls["_to_copy"] == 0
    assert params.weight is weight


def test_parameters_left_elsewhere_are_sent_in_every_call():
    params, z = FourierParams(0.7), X.to("meta")  # stands for a device: transfers are operations
    with track_storages() as made:
        for _ in range(3):
            assert unfixed.nonlinearity(params, z, check=False).device == z.device
    assert made.calls["_to_copy"] == 3 * 2
    assert not params.weight.is_meta


@pytest.mark.gpu
def test_parameters_left_elsewhere_are_sent_once_with_the_check():
    params, z = FourierParams(0.7), X.cuda()
    with track_storages() as made:
        for _ in range(3):
            found = unfixed.nonlinearity(params, z, check=True)
    assert made.calls["_to_copy"] == 2
    assert params.weight.is_cuda
    torch.testing.assert_close(found.cpu(), FourierParams(0.7)(X))


@pytest.mark.slow
@pytest.mark.parametrize("no_grad", [False, True])
def test_diagnostics_are_those_of_the_fix_and_hold_nothing(no_grad):
    model = adapted()
    log = []
    with track_storages() as made:
        for _ in range(100):
            log.append(unfixed.diagnose(model, no_grad=no_grad))
    assert made.live_bytes == 0
    assert made.peak_bytes <= 1000
    expected = diagnose(model)
    assert log[0].keys() == expected.keys()
    for name, numbers in expected.items():
        assert {k: pytest.approx(v) for k, v in log[0][name].items()} == {
            "deviation": numbers.deviation,
            "nonlinearity": numbers.nonlinearity,
            "sigma": numbers.sigma,
            "coefficients": list(numbers.coefficients),
        }


def test_recomputation_without_a_word_on_reentrancy_warns_and_does_not_raise():
    block = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(Recomputed(block)(x).square().sum(), x)
    products = []
    for said in ({}, {"use_reentrant": True}, {"use_reentrant": False}):
        x.grad = None
        with warnings.catch_warnings(record=True) as caught, track_storages() as made:
            warnings.simplefilter("always")
            unfixed.recompute(block, x, **said).square().sum().backward()
        torch.testing.assert_close(x.grad, expected)
        messages = [str(warning.message) for warning in caught]
        assert any("use_reentrant parameter" in message for message in messages) == (not said)
        products.append(made.calls["addmm"])
    assert products == [2, 2, 1]  # unsaid is reentrant; the other way leaves out the last output


def test_reentrant_recomputation_needs_an_input_with_a_gradient():
    block = nn.Linear(WIDTH, WIDTH)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not unfixed.recompute(block, X, use_reentrant=True).requires_grad
    assert unfixed.recompute(block, X, use_reentrant=False).requires_grad


def test_saving_makes_no_bytes_and_leaves_gradients(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight  # a tie is written once
    model(X).sum().backward()
    for empty_cache in (False, True):
        with track_storages() as made:
            unfixed.save(model, tmp_path / "model.safetensors", empty_cache=empty_cache)
        assert made.peak_bytes == 0
        stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert torch.equal(stored["0.weight"], model[0].weight)
        assert model[0].weight.grad is not None


def test_cache_is_emptied_before_saving_if_asked(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for empty_cache in (False, True):
        unfixed.save(nn.Linear(1, 1), tmp_path / "model.safetensors", empty_cache=empty_cache)
        assert len(emptied) == empty_cache
