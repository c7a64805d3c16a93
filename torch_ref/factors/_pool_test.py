"""Micro-batches together give the factors of the big batch."""

import dataclasses

import pytest
import torch

from torch_ref.factors import Categorical, collect_factors, fisher_loss, pool_factors

LOSS = fisher_loss(Categorical())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_uneven_micro_batches_with_uneven_masks_pool_to_the_big_batch(tokens, sharing):
    model, (x, y) = tokens
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(x.shape, generator=generator) < 0.7
    terms = positions & (torch.rand(x.shape, generator=generator) < 0.7)
    pattern = "embed|up|down|head"

    def collect(part):
        batch = x[part], y[part], terms[part]
        options = {"mask": positions[part], "sharing": sharing, "layers": pattern}
        return collect_factors(model, LOSS, batch, **options)

    slices = [slice(0, 1), slice(1, 4), slice(4, 6)]
    pooled = pool_factors(
        [collect(part) for part in slices],
        loss_terms=[int(terms[part].sum()) for part in slices],
    )
    for name, expected in collect(slice(None)).items():
        torch.testing.assert_close(pooled[name].a, expected.a, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(pooled[name].g, expected.g, rtol=1e-10, atol=1e-14)
        assert pooled[name].rows == expected.rows


def test_what_cannot_be_pooled_is_refused(mlp):
    model, batch = mlp
    factors = collect_factors(model, LOSS, batch)
    with pytest.raises(ValueError, match="got 1 for 2"):
        pool_factors([factors, factors], loss_terms=[6])
    with pytest.raises(ValueError, match="different layers"):
        pool_factors([factors, {"0": factors["0"]}], loss_terms=[6, 6])
    averaged = {n: dataclasses.replace(f, rows=None) for n, f in factors.items()}
    with pytest.raises(ValueError, match="layer '0'"):
        pool_factors([factors, averaged], loss_terms=[6, 6])
