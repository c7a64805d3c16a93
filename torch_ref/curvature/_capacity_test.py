"""Capacity metrics against the dense block, and the memory guard."""

import dataclasses
import math

import pytest
import torch

from torch_ref.curvature import LayerBasis, capacity_metrics, decompose_factors
from torch_ref.factors import LayerFactors
from torch_ref.linalg import Spectrum


def factor(n: int, rows: int, seed: int) -> torch.Tensor:
    x = torch.randn(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.T @ x / rows


FACTORS = {
    "first": LayerFactors(factor(4, 9, 0), factor(3, 9, 1), 9, "joint"),
    "second": LayerFactors(factor(2, 9, 2), factor(5, 9, 3), 9, "separate"),
}


def dense(f: LayerFactors) -> torch.Tensor:
    block = torch.kron(f.g, f.a)
    return torch.block_diag(block, f.g) if f.bias == "separate" else block


def test_layer_metrics_are_those_of_the_dense_block():
    found = capacity_metrics(decompose_factors(FACTORS), num_examples=50, damping=0.1)
    for name, f in FACTORS.items():
        matrix, layer = dense(f), found.layers[name]
        values = torch.linalg.eigvalsh(matrix)
        damped = matrix + 0.1 * torch.eye(len(matrix), dtype=matrix.dtype)
        exact = {
            "trace": matrix.trace(),
            "log_determinant": torch.logdet(damped),
            "effective_rank": matrix.trace() ** 2 / matrix.square().sum(),
            "condition_number": torch.linalg.cond(matrix),
            "num_above": (values > 1e-8).sum(),
            "num_above_a": (torch.linalg.eigvalsh(f.a) > 1e-8).sum(),
            "num_above_g": (torch.linalg.eigvalsh(f.g) > 1e-8).sum(),
            "pac_bayes_complexity": (matrix.trace() / 50).sqrt(),
            "dimension": len(matrix),
        }
        assert dataclasses.asdict(layer) == pytest.approx(
            {key: float(x) for key, x in exact.items()}, rel=1e-10
        )


def test_model_adds_layers_averages_ranks_and_takes_the_worst_condition():
    found = capacity_metrics(decompose_factors(FACTORS), num_examples=50)
    first, second = found.layers.values()
    assert found.trace == pytest.approx(first.trace + second.trace)
    assert found.log_determinant == pytest.approx(first.log_determinant + second.log_determinant)
    assert found.mean_effective_rank == pytest.approx(
        (first.effective_rank + second.effective_rank) / 2
    )
    assert found.largest_condition_number == max(first.condition_number, second.condition_number)
    assert found.num_above == 12 + 15
    assert found.dimension == 12 + 15
    assert found.pac_bayes_complexity == pytest.approx(math.sqrt(found.trace / 50))


@pytest.mark.parametrize("max_bytes", [1, 8 * 5 * 2, 1 << 20])
def test_memory_guard_changes_no_metric_and_bounds_what_is_formed(max_bytes, monkeypatch):
    formed = []
    multiply = torch.Tensor.__mul__

    def spy(self, other):
        product = multiply(self, other)
        formed.append(product.numel() * 8)
        return product

    expected = capacity_metrics(decompose_factors(FACTORS), num_examples=50, damping=0.1)
    bases = decompose_factors(FACTORS)
    monkeypatch.setattr(torch.Tensor, "__mul__", spy)
    found = capacity_metrics(bases, num_examples=50, damping=0.1, max_bytes=max_bytes)
    for name, layer in expected.layers.items():
        assert dataclasses.asdict(found.layers[name]) == pytest.approx(
            dataclasses.asdict(layer), rel=1e-12
        )
    assert max(formed) <= max(max_bytes, 8 * 5)  # one row at the least


def test_singular_block_has_infinite_condition_and_no_log_determinant_without_damping():
    f = LayerFactors(torch.zeros(2, 2), torch.eye(3), 1, "none")
    layer = capacity_metrics(decompose_factors({"zero": f}), num_examples=1).layers["zero"]
    assert layer.condition_number == math.inf
    assert layer.log_determinant == -math.inf
    assert layer.effective_rank == 0.0 and layer.num_above == 0


def test_clipping_is_not_seen():
    loose, tight = (decompose_factors(FACTORS, max_condition=k) for k in (1e12, 2.0))
    found = [capacity_metrics(bases, num_examples=1).trace for bases in (loose, tight)]
    assert found[0] == found[1]


def test_diagonals_and_groups_count_all_their_products():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    grouped = torch.stack([values, 3 * values])
    basis = LayerBasis(Spectrum(grouped, grouped, None), Spectrum(grouped, grouped, None), "none")
    layer = capacity_metrics({"layer": basis}, num_examples=1).layers["layer"]
    assert layer.trace == 3.0 * 3.0 + 9.0 * 9.0  # groups do not mix
    assert layer.dimension == 8


@pytest.mark.parametrize("options", [{"num_examples": 0}, {"damping": -1.0}, {"max_bytes": 0}])
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="expected num_examples"):
        capacity_metrics({}, **({"num_examples": 1} | options))
