"""Factors against per-example gradients, with masks, sharing and shared layers."""

import pytest
import torch
from torch import nn

from torch_ref.factors import Categorical, collect_factors, fisher_loss

N, S, VOCABULARY = 6, 4, 7  # of the models in conftest.py
LOSS = fisher_loss(Categorical())


def assert_same(actual, expected, rtol=1e-12):
    assert list(actual) == list(expected)
    for name in expected:
        for side in ("a", "g"):
            torch.testing.assert_close(
                getattr(actual[name], side), getattr(expected[name], side), rtol=rtol, atol=1e-14
            )
        assert actual[name].rows == expected[name].rows


def test_factors_are_those_of_per_example_gradients(mlp):
    model, (x, y) = mlp
    factors = collect_factors(model, LOSS, (x, y))
    for layer in ("0", "2"):
        A = G = 0.0
        for n in range(N):
            # The example's part of the mean loss. Its bias gradient is g, and the gradient of
            # the weight is g aᵀ, from which a follows.
            part = LOSS(model, (x[n : n + 1], y[n : n + 1])) / N
            module = model.get_submodule(layer)
            weight, g = torch.autograd.grad(part, [module.weight, module.bias])
            a = torch.cat([weight.T @ g / (g @ g), torch.ones(1, dtype=g.dtype)])
            A, G = A + torch.outer(a, a) / N, G + torch.outer(g, g) / N
        torch.testing.assert_close(factors[layer].a, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(factors[layer].g, G, rtol=1e-10, atol=1e-12)
        assert factors[layer].rows == N and factors[layer].bias == "joint"


def test_single_row_factors_are_the_gradients_outer_product(mlp):
    model, (x, y) = mlp
    batch = (x[:1], y[:1])
    factors = collect_factors(model, LOSS, batch)["0"]
    weight, bias = torch.autograd.grad(LOSS(model, batch), [model[0].weight, model[0].bias])
    vector = torch.cat([weight, bias[:, None]], dim=1).flatten()
    torch.testing.assert_close(torch.kron(factors.g, factors.a), torch.outer(vector, vector))


def test_separate_bias_has_no_column_of_ones(tokens):
    model, batch = tokens
    joint = collect_factors(model, LOSS, batch)
    separate = collect_factors(model, LOSS, batch, bias="separate")
    torch.testing.assert_close(separate["up"].a, joint["up"].a[:-1, :-1])
    torch.testing.assert_close(separate["up"].g, joint["up"].g)
    assert [separate[n].bias for n in ("up", "down")] == ["separate", "none"]
    assert joint["up"].a[-1, -1] == 1 and joint["down"].a.shape == (5, 5)


def test_embedding_factor_is_the_diagonal_of_token_frequencies(tokens):
    model, (x, y) = tokens
    a = collect_factors(model, LOSS, (x, y))["embed"].a
    expected = torch.bincount(x.flatten(), minlength=VOCABULARY) / (N * S)
    torch.testing.assert_close(a, expected.double(), check_dtype=False)


def test_padding_token_is_no_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0))
    batch = (torch.tensor([[1, 0, 2]]), torch.tensor([[1, 1, 2]]))
    factors = collect_factors(model, LOSS, batch)["0"]
    assert factors.rows == 2
    torch.testing.assert_close(factors.a, torch.tensor([0, 0.5, 0.5, 0, 0]))


def test_masked_rows_are_as_if_they_were_not_there(tokens):
    model, (x, y) = tokens
    mask = torch.ones(N, S)
    mask[:, -1] = 0
    long = torch.cat([x[:, :-1], torch.full((N, 1), 3)], dim=1)
    pattern = "embed|up|down|head"  # mix sees padding as it sees the edge: it has its own test
    model.mix.weight.data[:, :, [0, 2]] = 0  # no token sees another
    masked = collect_factors(model, LOSS, (long, y, mask), mask=mask, layers=pattern)
    short = collect_factors(model, LOSS, (x[:, :-1], y[:, :-1]), layers=pattern)
    assert_same(masked, short)


def test_mask_of_a_convolution_drops_its_output_positions(tokens):
    model, batch = tokens
    mask = (torch.arange(S) < 2).expand(N, S)
    factors = collect_factors(model, LOSS, batch, mask=mask, layers="mix")["mix"]
    assert factors.rows == 2 * N
    assert factors.a[-1, -1] == 1
    whole = collect_factors(model, LOSS, batch, layers="mix")["mix"]
    rest = collect_factors(model, LOSS, batch, mask=~mask, layers="mix")["mix"]
    torch.testing.assert_close((factors.a + rest.a) / 2, whole.a)
    torch.testing.assert_close((factors.g + rest.g) / 2, whole.g)


def test_mask_without_rows_names_the_layer(tokens):
    model, batch = tokens
    with pytest.raises(ValueError, match="'head': the mask leaves none of its 24 rows"):
        collect_factors(model, LOSS, batch, mask=torch.zeros(N, S))


def test_nan_in_a_masked_row_is_not_seen():
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    x = torch.randn(4, 2)
    x[3] = torch.nan
    factors = collect_factors(
        model,
        lambda model, x: model(x)[:3].square().mean(),
        x,
        mask=torch.tensor([1, 1, 1, 0]),
    )[""]
    assert factors.a.isfinite().all() and factors.rows == 3


def test_reduce_averages_inputs_and_sums_gradients_per_example(tokens):
    model, (x, y) = tokens
    mask = torch.arange(S) < torch.tensor([4, 3, 2, 1, 4, 2])[:, None]
    batch = (x, y, mask)
    factors = collect_factors(model, LOSS, batch, mask=mask, sharing="reduce", layers="up")["up"]
    embedded = model.embed(x)
    y_up = model.up(embedded)
    logits = model.head(model.mix((embedded + model.down(torch.tanh(y_up))).mT).mT)
    terms = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    (g,) = torch.autograd.grad(terms[mask.flatten()].mean(), y_up)
    A = G = 0.0
    for n in range(N):
        a = torch.cat([embedded[n, mask[n]].mean(0), torch.ones(1)]).detach()
        g_n = g[n, mask[n]].sum(0)
        A, G = A + torch.outer(a, a) / N, G + torch.outer(g_n, g_n) / N
    torch.testing.assert_close(factors.a, A)
    torch.testing.assert_close(factors.g, G)
    assert factors.rows == N


def test_embeddings_expand_under_reduce(tokens):
    model, batch = tokens
    options = {"layers": "embed"}
    reduced = collect_factors(model, LOSS, batch, sharing="reduce", **options)
    assert_same(reduced, collect_factors(model, LOSS, batch, **options))


def test_uses_of_a_shared_layer_are_more_rows():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = nn.ModuleDict({"layer": layer})
    x = torch.randn(5, 3, dtype=torch.float64)
    first = layer(x)
    second = layer(torch.tanh(first))
    g1, g2 = torch.autograd.grad(second.square().mean(), [first, second])

    def loss(model, x):
        return model["layer"](torch.tanh(model["layer"](x))).square().mean()

    factors = collect_factors(model, loss, x, bias="separate")["layer"]
    rows = torch.cat([x, torch.tanh(first)]).detach()
    g = torch.cat([g1, g2])
    torch.testing.assert_close(factors.a, rows.T @ rows / 10)
    torch.testing.assert_close(factors.g, g.T @ g / 10)
    with pytest.raises(ValueError, match="'layer' is used 2 times"):
        collect_factors(model, loss, x, sharing="reduce")
