"""Averages over steps, and the two scales of G."""

import pytest
import torch
from torch import nn

from torch_ref.factors import (
    Categorical,
    LayerFactors,
    collect_factors,
    debias,
    fisher_loss,
    to_mean_scale,
    to_sum_scale,
    update_average,
    zeros_like,
)


def factors(value: float, rows: int | None = 4) -> dict[str, LayerFactors]:
    eye = torch.eye(2, dtype=torch.float64)
    return {"layer": LayerFactors(value * eye, -value * eye, rows, "none")}


def test_first_step_is_its_own_average():
    assert update_average(None, factors(3.0), 0.9)["layer"].a[0, 0].item() == 3.0


def test_average_is_the_weighted_sum_of_steps():
    average = None
    for value in (1.0, 2.0, 5.0):
        average = update_average(average, factors(value), 0.8)
    expected = 0.8 * (0.8 * 1.0 + 0.2 * 2.0) + 0.2 * 5.0
    assert average["layer"].a[0, 0].item() == pytest.approx(expected, rel=1e-14)
    assert average["layer"].g[1, 1].item() == pytest.approx(-expected, rel=1e-14)


def test_debiased_average_weighs_steps_geometrically():
    values, decay = (1.0, 2.0, 5.0), 0.8
    average = zeros_like(factors(1.0))
    for value in values:
        average = update_average(average, factors(value), decay)
    average = debias(average, decay, len(values))
    weights = [decay**2, decay, 1.0]
    expected = sum(w * v for w, v in zip(weights, values)) / sum(weights)
    assert average["layer"].a[0, 0].item() == pytest.approx(expected, rel=1e-14)


def test_average_over_different_rows_cannot_be_converted():
    average = update_average(factors(1.0, rows=4), factors(2.0, rows=8), 0.5)
    assert average["layer"].rows is None
    with pytest.raises(ValueError, match=r"\['layer'\].*before averaging"):
        to_sum_scale(average, loss_terms=4)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        update_average(None, factors(1.0), decay)


def test_other_layers_are_named():
    with pytest.raises(ValueError, match=r"\['layer', 'other'\]"):
        update_average({"other": factors(1.0)["layer"]}, factors(1.0), 0.5)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_sum_scale_has_gradients_of_the_sum_over_an_examples_terms(sharing):
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    n, s = 5, 2
    x = torch.randn(n, s, 3, dtype=torch.float64)
    y = torch.randint(4, (n, s))
    mask = torch.ones(n, s, dtype=torch.bool)
    mask[0, 1] = False  # a position whose loss does not count: it is a row, and no term
    found = collect_factors(model, fisher_loss(Categorical()), (x, y, mask), sharing=sharing)
    outputs = model(x)
    (g,) = torch.autograd.grad((Categorical().terms(outputs, y) * mask).sum(), outputs)
    g = g.flatten(0, 1) if sharing == "expand" else g.sum(1)
    terms = int(mask.sum())
    converted = to_sum_scale(found, loss_terms=terms)
    torch.testing.assert_close(converted[""].g, g.T @ g / terms, rtol=1e-12, atol=0)
    torch.testing.assert_close(converted[""].a, found[""].a, rtol=0, atol=0)
    assert found[""].rows == (n * s if sharing == "expand" else n)


def test_sum_scale_is_the_square_of_the_rows_where_each_has_a_term():
    converted = to_sum_scale(factors(1.0, rows=4), loss_terms=4)
    assert converted["layer"].g[0, 0].item() == -(4.0**2)


def test_mean_scale_inverts_sum_scale():
    back = to_mean_scale(to_sum_scale(factors(3.0), loss_terms=7), loss_terms=7)
    torch.testing.assert_close(back["layer"].g, factors(3.0)["layer"].g, rtol=1e-15, atol=0)
