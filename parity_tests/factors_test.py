"""A and G of every kind of layer, in every sharing and bias mode and on both scales."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

import jaxkfac as jk
from parity_tests.cases import Tolerance, cases, exact, over
from parity_tests.compare import Pair
from parity_tests.models import PLAIN, PROBLEMS
from parity_tests.problem import EVERY, Option
from parity_tests.sides import Sides
from torch_ref import factors as ref

COLLECT = ("value_grad_and_factors", "FactorCollector", "Factors", "KroneckerFactor")


def factor_pairs(
    sides: Sides,
    ours: Mapping[str, Any],
    reference: Mapping[str, Any],
    option: Option = EVERY[0],
) -> Iterable[Pair]:
    """Both factors of every layer."""
    for twin, side in sides.problem.sides_to_compare(option):
        name = sides.name(twin)
        expected = twin.factors(reference)[side]
        yield Pair(name, side, getattr(ours[name], side.lower()), expected)


# ---------------------------------------------------------------- one batch


def in_mode(option: Option) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        ours, reference = sides.ours().factors[option], sides.sum_factors(option)
        return factor_pairs(sides, ours, reference, option)

    return pairs


def collected_packed(sides: Sides) -> Iterable[Pair]:
    """One triangle of each matrix of 64 and more, as it comes from the program."""
    collect = jax.jit(jk.value_grad_and_factors(sides.objective, packed=True))
    ours = collect(sides.params, sides.our_batch(), positions=sides.our_positions()).factors
    return factor_pairs(sides, ours.unpacked(), sides.sum_factors())


def one_example(sides: Sides) -> Iterable[Pair]:
    """A batch of a single row, whose products are no calls of a library."""
    ours = jax.tree.map(lambda x: x[:1], sides.our_batch())
    theirs = tuple(x[:1] for x in sides.batch())
    found = jax.jit(jk.value_grad_and_factors(sides.objective))(sides.params, ours).factors
    factors = ref.to_sum_scale(sides.collect(theirs, EVERY[0]), loss_terms=1)
    return factor_pairs(sides, found, factors)


def narrow_labels(sides: Sides) -> Iterable[Pair]:
    """Labels of 8 bits, outside ``jit``, where their values are looked at."""
    inputs, targets, *mask = sides.our_batch()
    batch = (inputs, targets.astype(np.int8), *mask)
    collect = jk.value_grad_and_factors(sides.objective)
    found = collect(sides.params, batch, positions=sides.our_positions())
    yield Pair("objective", "value", found.value, sides.value())
    yield from factor_pairs(sides, found.factors, sides.sum_factors())


def weighted(sides: Sides) -> Iterable[Pair]:
    """Terms with weights: the loss multiplies by them, the Fisher by their roots."""
    inputs, targets, *mask = sides.our_batch()
    shape = targets.shape[: sides.data().terms_axes]
    numbers = np.random.default_rng(9).integers(0, 9, shape) / 4.0  # in any dtype without rounding
    numbers = numbers * np.asarray(mask[0]) if mask else numbers
    collect = jax.jit(jk.value_grad_and_factors(sides.objective))
    ours = (inputs, targets, jax.numpy.asarray(numbers, np.float32))
    found = collect(sides.params, ours, positions=sides.our_positions())
    theirs = (*sides.batch()[:2], sides.tensor(numbers))
    yield Pair("objective", "value", found.value, sides.loss(sides.model, theirs).detach())
    yield Pair("objective", "terms", found.factors.terms, numbers.sum())
    loss = ref.fisher_loss(sides.likelihood, root=True)
    factors = sides.collect(theirs, EVERY[0], loss=loss)
    terms = float(numbers.sum())
    yield from factor_pairs(sides, found.factors, ref.to_sum_scale(factors, loss_terms=terms))


def documented(sides: Sides) -> Iterable[Pair]:
    """The documents' own G, of the mean loss, is ours over rows and terms; A is A."""
    terms, theirs = sides.data().loss_terms, sides.factors()
    for twin in sides.problem.twins:
        name, rows = sides.name(twin), theirs[twin.modules[0]].rows
        ours, expected = sides.ours().factors["expand", "joint"][name], twin.factors(theirs)
        yield Pair(name, "A", ours.a, expected["A"])
        yield Pair(name, "G / (rows terms)", np.asarray(ours.g) / (rows * terms), expected["G"])


def value_and_gradient(sides: Sides) -> Iterable[Pair]:
    collected, gradient = sides.ours(), sides.tree(sides.gradients())
    yield Pair("objective", "value", collected.value, sides.value())
    called = jax.jit(sides.objective)(sides.params, sides.our_batch())
    yield Pair("objective", "value by itself", called, sides.value())
    paths = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, expected), found in zip(paths, jax.tree.leaves(collected.grads), strict=True):
        yield Pair(jax.tree_util.keystr(path), "gradient", found, expected)


def layer_table(sides: Sides) -> Iterable[Pair]:
    """The layers of both sides: how many, their sizes, and nothing uncovered."""
    table = jk.find_layers(sides.objective, sides.params, sides.our_batch())
    modules = ref.find_layers(sides.model)
    layers = len(sides.problem.twins) + len(sides.problem.beside)
    of_parameters = [layer for layer in table.layers if not layer.computed_from]
    yield Pair("table", "number of layers", len(of_parameters), layers)
    yield Pair("table", "uncovered", len(table.uncovered), 0)
    for twin in sides.problem.twins:
        layer, shape = table[sides.name(twin)], modules[twin.modules[0]].weight.shape
        if twin.kind == "embedding":
            shape = shape[::-1]
        groups = getattr(modules[twin.modules[0]], "groups", 1)
        sizes = [shape[0] // groups, shape[1:].numel()]
        yield Pair(layer.name, "sizes", [layer.out_features, layer.in_features], sizes)


# ---------------------------------------------------------------- the table

# bfloat16 rounds activations and gradients to 8 bits, not always alike on both sides; each
# factor is a sum over thousands of rows, in which that averages out.
BFLOAT16 = {
    "bfloat16": Tolerance(3e-2, "rows rounded to 8 bits layer after layer; products in float32")
}

CASES = [
    *(
        case
        for option in EVERY
        for name in PLAIN
        if option in PROBLEMS[name].options
        for case in cases(
            "factors",
            f"{option[0]}, {option[1]} bias",
            name,
            in_mode(option),
            covers=(*COLLECT, *PROBLEMS[name].covers),
            tolerances=exact(),
        )
    ),
    *cases(
        "factors",
        "patches computed by panels",
        "wide patches",
        in_mode(EVERY[0]),
        covers=COLLECT,
        tolerances=exact(),
    ),
    *cases(
        "factors",
        "one triangle of each matrix",
        ["blocks", "wide patches"],
        collected_packed,
        covers=COLLECT,
        tolerances=exact(),
    ),
    *cases(
        "factors",
        "one example",
        ["classifier", "wide patches"],
        one_example,
        covers=COLLECT,
        tolerances=exact(),
    ),
    *cases(
        "factors",
        "labels of 8 bits, outside jit",
        ["classifier", "masked tokens"],
        narrow_labels,
        covers=COLLECT,
        tolerances=exact(),
    ),
    *cases(
        "factors",
        "terms with weights",
        ["classifier", "masked tokens"],
        weighted,
        covers=COLLECT,
        tolerances=exact(),
    ),
    *cases("factors", "bfloat16 rows", "wide", in_mode(EVERY[0]), tolerances=BFLOAT16),
    *cases(
        "objective",
        "value and gradient",
        PLAIN,
        value_and_gradient,
        covers=("Objective", "ValueGradAndFactors"),
        tolerances=exact(),
    ),
    *cases(
        "layers",
        "names and sizes",
        PLAIN,
        layer_table,
        covers=("find_layers", "Layer", "LayerTable"),
        tolerances={"float64": Tolerance(1e-15, "integers")},
    ),
    *cases(
        "documented scale",
        "G of the mean loss",
        ["classifier", "conv1d", "conv2d", "tokens", "masked tokens", "scanned"],
        documented,
        tolerances=exact(),
    ),
]


@pytest.mark.default(2, slow=7)
@over(CASES)
def test_factors_agree(case, check):
    check(case)
