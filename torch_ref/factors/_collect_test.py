"""One pass collects them all, in any way asked for, and nothing is left behind."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref.factors import Categorical, collect_factors, fisher_loss, stream_factors, to_host
from torch_ref.factors import _collect as collect_module

N = 6  # of the models in conftest.py
LOSS = fisher_loss(Categorical())


def assert_same(actual, expected, rtol=1e-12):
    assert list(actual) == list(expected)
    for name in expected:
        for side in ("a", "g"):
            torch.testing.assert_close(
                getattr(actual[name], side), getattr(expected[name], side), rtol=rtol, atol=1e-14
            )
        assert actual[name].rows == expected[name].rows


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_no_factor(mlp, reentrant):
    model, (x, y) = mlp

    def recomputed(model, batch):
        inputs, targets = batch
        y = torch.utils.checkpoint.checkpoint(
            model, inputs.clone().requires_grad_(), use_reentrant=reentrant
        )
        return Categorical().terms(y, targets).mean()

    assert_same(collect_factors(model, recomputed, (x, y)), collect_factors(model, LOSS, (x, y)))


def test_streaming_hooks_one_layer_at_a_time_and_gives_the_same(tokens, monkeypatch):
    model, batch = tokens
    loss = fisher_loss(Categorical(), fisher="sampled", seed=3)
    expected = collect_factors(model, loss, batch)
    hooked = []

    def spy(model, batch):
        hooked.append([n for n, m in model.named_modules() if m._forward_hooks])
        return loss(model, batch)

    assert_same(dict(stream_factors(model, spy, batch)), expected)
    assert hooked == [[name] for name in expected]


def test_sampled_fisher_is_the_empirical_one_of_its_samples(tokens):
    model, (x, y) = tokens
    sampled = collect_factors(model, fisher_loss(Categorical(), fisher="sampled"), (x, y))
    generator = torch.Generator().manual_seed(0)
    labels = Categorical().sample(model(x).detach(), generator)
    assert not torch.equal(labels, y)
    assert_same(sampled, collect_factors(model, LOSS, (x, labels)))


# ------------------------------------------------------------------ precision and placement


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_factor_is_moved_before_it_is_converted():
    with Calls() as calls:
        to_host(torch.ones(2, 2, dtype=torch.bfloat16), None)
    casts = [n for n in calls.names if n in ("cpu", "float", "to")]
    assert casts == ["cpu", "float"]


@pytest.mark.parametrize(
    ("model_dtype", "keep", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_factors_are_kept_as_asked(mlp, model_dtype, keep, expected):
    model, (x, y) = mlp
    batch = (x.to(model_dtype), y)
    factors = collect_factors(model.to(model_dtype), LOSS, batch, keep=keep)
    assert {t.dtype for f in factors.values() for t in (f.a, f.g)} == {expected}


def test_gram_dtype_multiplies_bfloat16_rows_in_float32(mlp):
    model, (x, y) = mlp
    model, x = model.bfloat16(), x.bfloat16()
    factors = collect_factors(model, LOSS, (x, y), gram_dtype=torch.float32, layers="0")["0"]
    rows = torch.cat([x.float(), torch.ones(N, 1)], dim=1)
    torch.testing.assert_close(factors.a, rows.T @ rows / N, rtol=1e-6, atol=1e-6)
    rounded = collect_factors(model, LOSS, (x, y), layers="0")["0"]
    assert not torch.equal(rounded.a, factors.a)


# ------------------------------------------------------------------ nothing left behind


def assert_clean(model):
    assert all(not m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FloatingPointError("no gradient today")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_hooks_and_gradients_go_when_the_pass_fails(mlp, monkeypatch, where):
    model, batch = mlp
    emptied = []
    monkeypatch.setattr(collect_module, "release_cache", lambda: emptied.append(True))

    def fails(model, batch):
        assert any(m._forward_hooks for m in model.modules())
        y = model[2](FailsBackward.apply(model[:2](batch[0])))
        if where == "forward":
            raise FloatingPointError("no loss today")
        return y.sum()

    with pytest.raises(FloatingPointError):
        collect_factors(model, fails, batch)
    assert_clean(model)
    assert emptied == [True]


def test_cache_is_emptied_once_after_a_pass(mlp, monkeypatch):
    model, batch = mlp
    emptied = []
    monkeypatch.setattr(
        collect_module, "release_cache", lambda: emptied.append(model[0].weight.grad)
    )
    collect_factors(model, LOSS, batch)
    assert emptied == [None]  # once, when the gradients were already gone
    assert_clean(model)


def test_streaming_empties_the_cache_once_after_the_last_layer(tokens, monkeypatch):
    model, batch = tokens
    emptied = []
    monkeypatch.setattr(collect_module, "release_cache", lambda: emptied.append(True))
    assert [emptied[:] for _ in stream_factors(model, LOSS, batch)] == [[]] * 5
    assert emptied == [True]
    next(stream := stream_factors(model, LOSS, batch))
    stream.close()  # also where it is left early
    assert emptied == [True, True]


@pytest.mark.slow
def test_no_graph_and_no_activation_outlive_the_pass(mlp):
    model, batch = mlp
    alive = []

    class Probe:
        pass

    def watched(model, batch):
        hidden = model[0](batch[0])
        value = Categorical().terms(model[2](torch.tanh(hidden)), batch[1]).mean()
        # A node of the graph cannot be referenced weakly; what is in its metadata can.
        probe = value.grad_fn.metadata["probe"] = Probe()
        alive.extend(weakref.ref(x) for x in (hidden, value, probe))
        return value

    factors = collect_factors(model, watched, batch)
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    assert not any(t.requires_grad for f in factors.values() for t in (f.a, f.g))


def test_inputs_of_a_layer_are_freed_before_those_of_the_layer_below_are_used(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    inputs = {}

    def watch(i, args):
        inputs[i] = args[0].untyped_storage()._weak_ref()

    for i, module in enumerate(model):
        module.register_forward_pre_hook(lambda module, args, i=i: watch(i, args))
    alive = {}

    def spy(name, *args, **kwargs):
        expired = torch.UntypedStorage._expired
        alive[name] = [i for i, ref in inputs.items() if i > 0 and not expired(ref)]
        return form(name, *args, **kwargs)

    form = collect_module.form_factors
    monkeypatch.setattr(collect_module, "form_factors", spy)
    collect_factors(model, lambda model, x: model(x).square().mean(), torch.randn(5, 3))
    for ref in inputs.values():
        torch.UntypedStorage._free_weak_ref(ref)
    assert alive == {"3": [1, 2, 3], "2": [1, 2], "1": [1], "0": []}


def test_layer_without_gradient_is_named(mlp):
    model, batch = mlp
    model = nn.Sequential(*model, nn.Linear(3, 3).double())
    with pytest.raises(ValueError, match="layer '3' got no gradient"):
        collect_factors(model, lambda m, b: LOSS(m[:3], b), batch)
