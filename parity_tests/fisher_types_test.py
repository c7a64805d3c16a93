"""The sampled and the exact Fisher: labels from one framework, given to both."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import factor_pairs
from parity_tests.models import PLAIN
from parity_tests.sides import Sides
from torch_ref import factors as ref


def sampled(sides: Sides) -> Iterable[Pair]:
    """Labels drawn by PyTorch, given to both sides; G is the mean over the draws."""
    inputs, _, *mask = sides.batch()
    draws = [torch.from_numpy(labels).to(sides.device) for labels in sides.labels()]
    parts = [sides.collect((inputs, y, *mask), ("expand", "joint")) for y in draws]
    mean = _with_g(parts[0], {n: sum(p[n].g for p in parts) / len(parts) for n in parts[0]})
    return factor_pairs(sides, sides.ours().mc, _on_sum_scale(sides, mean))


def resampled(sides: Sides) -> Iterable[Pair]:
    """torch_ref samples inside its own loss; the same seed gives jaxkfac the labels."""
    loss = ref.fisher_loss(sides.likelihood, fisher="sampled", seed=5)
    reference = sides.collect(sides.batch(), ("expand", "joint"), loss=loss)
    generator = torch.Generator(sides.device).manual_seed(5)
    labels = sides.likelihood.sample(sides.outputs(), generator).cpu().numpy()
    ours = sides.our_sampled(labels[None])
    return factor_pairs(sides, ours, _on_sum_scale(sides, reference))


def expectation(sides: Sides) -> Iterable[Pair]:
    """The exact Fisher: every label of every term by its probability, written out.

    With the loss of one label of one term weighted by the root of its probability, the outer
    products of the gradients are weighted by it.
    """
    inputs, targets, *mask = sides.batch()
    roots = sides.outputs().softmax(-1).sqrt()
    terms = targets[0].numel()
    total: dict[str, torch.Tensor] = {}
    for term in range(terms):
        here = torch.zeros_like(targets[0]).flatten()
        here[term] = 1
        here = here.reshape(targets.shape[1:])
        for label in range(roots.shape[-1]):

            def loss(model, batch, here=here, label=label):
                outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
                each = sides.likelihood.terms(outputs, torch.full_like(targets, label))
                kept = mask[0] * here if mask else here
                return (each * roots[..., label] * kept).sum() / sides.data().loss_terms

            parts = sides.collect(None, ("expand", "joint"), loss=loss)
            total = {n: total.get(n, 0) + f.g for n, f in parts.items()}
    return factor_pairs(
        sides, sides.ours().exact, _on_sum_scale(sides, _with_g(sides.factors(), total))
    )


def _on_sum_scale(sides: Sides, factors: Any) -> dict[str, ref.LayerFactors]:
    return ref.to_sum_scale(factors, loss_terms=sides.data().loss_terms)


def _with_g(factors: Any, g: Mapping[str, torch.Tensor]) -> dict[str, ref.LayerFactors]:
    return {name: dataclasses.replace(f, g=g[name]) for name, f in factors.items()}


UNSCALED = ["encoder-decoder", "gated encoder-decoder"]
WITHOUT_SCALE = exact(
    2e-5, "T5's scores are not scaled: each side is 4e-6 to 6e-6 from its float64"
)
CASES = [
    *cases(
        "sampled labels",
        "given to both",
        [name for name in PLAIN if name not in UNSCALED],
        sampled,
        tolerances=exact(),
    ),
    *cases("sampled labels", "given to both", UNSCALED, sampled, tolerances=WITHOUT_SCALE),
    *cases(
        "sampled labels",
        "drawn inside the reference",
        ["classifier", "masked tokens"],
        resampled,
        tolerances={"float64": exact()["float64"]},
    ),
    *cases(
        "exact Fisher",
        "every label by its probability",
        ["classifier", "conv2d", "masked tokens"],
        expectation,
        tolerances={"float64": exact()["float64"], "float32": exact()["float32"]},
    ),
]


@pytest.mark.default(1, slow=2)
@over(CASES)
def test_fisher_types_agree(case, check):
    check(case)
