"""Measured eigenvalues are the diagonal of the Fisher in the factors' basis."""

import pytest
import torch
from torch import nn

from torch_ref.curvature import (
    apply_measured_power,
    decompose_factors,
    fisher_vector_product,
    measure_eigenvalues,
)
from torch_ref.factors import (
    Categorical,
    LayerGradient,
    collect_factors,
    fisher_loss,
    read_gradients,
    to_sum_scale,
)

LOSS = fisher_loss(Categorical())
N = 7


@pytest.fixture(params=["joint", "separate"])
def problem(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.arange(N) % 3
    factors = to_sum_scale(collect_factors(model, LOSS, (x, y), bias=request.param), loss_terms=N)
    examples = [((x[i : i + 1], y[i : i + 1]), 1) for i in range(N)]
    return model, examples, decompose_factors(factors, max_condition=1e300), request.param


def gradients_of(model, batch, bias):
    model.zero_grad()
    LOSS(model, batch).backward()
    return read_gradients(model, ["0", "2"], bias=bias)


def dense_fisher(model, examples, bias):
    """``{name: F}`` of weights (and a joint bias), from flat gradients of single examples."""
    total = {"0": 0.0, "2": 0.0}
    for batch, _ in examples:
        for name, gradient in gradients_of(model, batch, bias).items():
            flat = gradient.weight.flatten()
            total[name] = total[name] + torch.outer(flat, flat) / len(examples)
    return total


def test_values_are_the_diagonal_of_the_fisher_in_the_basis(problem):
    model, examples, bases, bias = problem
    measured = measure_eigenvalues(model, LOSS, examples, bases)
    for name, fisher in dense_fisher(model, examples, bias).items():
        q = torch.kron(bases[name].g.vectors, bases[name].a.vectors)
        expected = (q.mT @ fisher @ q).diagonal()
        torch.testing.assert_close(measured[name].weight.flatten(), expected, rtol=1e-9, atol=1e-15)
        trace = measured[name].weight.sum()
        torch.testing.assert_close(trace, fisher.trace(), rtol=1e-9, atol=0)


def test_one_row_an_example_gives_the_own_bias_the_eigenvalues_of_g(problem):
    model, examples, bases, bias = problem
    measured = measure_eigenvalues(model, LOSS, examples, bases)
    assert (measured["0"].bias is None) == (bias == "joint") and measured["2"].bias is None
    if bias == "separate":
        torch.testing.assert_close(measured["0"].bias, bases["0"].g.values, rtol=1e-9, atol=1e-15)


def test_products_of_the_factors_give_the_kronecker_power(problem):
    model, examples, bases, bias = problem
    gradients = gradients_of(model, examples[0][0], bias)
    products = {
        name: LayerGradient(
            b.g.raw_values[:, None] * b.a.raw_values,
            b.g.raw_values if b.bias == "separate" else None,
        )
        for name, b in bases.items()
    }
    applied = apply_measured_power(gradients, bases, products, 1.0)
    for name, expected in fisher_vector_product(gradients, bases).items():
        torch.testing.assert_close(applied[name].weight, expected.weight, rtol=1e-9, atol=1e-12)
        if expected.bias is not None:
            torch.testing.assert_close(applied[name].bias, expected.bias, rtol=1e-9, atol=1e-12)


def test_power_minus_one_inverts_power_one(problem):
    model, examples, bases, bias = problem
    gradients = gradients_of(model, examples[0][0], bias)
    measured = measure_eigenvalues(model, LOSS, examples, bases)
    there = apply_measured_power(gradients, bases, measured, 1.0, damping=0.1)
    back = apply_measured_power(there, bases, measured, -1.0, damping=0.1)
    for name in gradients:
        torch.testing.assert_close(back[name].weight, gradients[name].weight)


def test_example_without_terms_adds_nothing(problem):
    model, examples, bases, _ = problem
    expected = measure_eigenvalues(model, LOSS, examples, bases)
    found = measure_eigenvalues(model, LOSS, [*examples, (None, 0)], bases)
    torch.testing.assert_close(found["0"].weight, expected["0"].weight, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="no example has a loss term"):
        measure_eigenvalues(model, LOSS, [(None, 0)], bases)
