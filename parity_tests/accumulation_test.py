"""K micro-batches as one step: parameters after every micro-step, and a last group cut short.

jaxkfac weighs each micro-batch by its loss terms, torch_ref where it is told them. The
micro-batches differ in their number of terms.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import jaxkfac as jk
from parity_tests import reference_training
from parity_tests.cases import cases, divided, exact, over
from parity_tests.compare import Pair
from parity_tests.powers_test import tree_pairs
from parity_tests.sides import Sides
from torch_ref import curvature

EVERY, NUMBER = 3, 7  # two whole groups, and one of a single micro-batch
RATE, MOMENTUM, DECAY, PAIR = 0.05, 0.9, 0.7, (0.05, 0.2)
GROUPS = {"every": EVERY, "number": NUMBER}

OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (
        lambda: optax.sgd(RATE, momentum=MOMENTUM),
        lambda p: torch.optim.SGD(p, lr=RATE, momentum=MOMENTUM),
    ),
    "Adam": (
        lambda: optax.adam(RATE, eps=1e-6),
        lambda p: torch.optim.Adam(p, lr=RATE, eps=1e-6),
    ),
}


def group_size(groups_so_far: Any) -> Any:
    """The last of the seven micro-batches is a group by itself."""
    return jnp.where(jnp.asarray(groups_so_far) < NUMBER // EVERY, EVERY, NUMBER % EVERY)


def micro_steps(sides: Sides, tx: Any, statistics: Any) -> Iterator[tuple[Any, Any]]:
    """``(parameters, state)`` after every micro-step."""

    @jax.jit
    def micro_step(params: Any, state: Any, batch: Any, positions: Any, terms: Any) -> Any:
        grads, extra = statistics(params, batch, positions, terms)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = sides.params, tx.init(sides.params)
    for seed in range(NUMBER):
        terms = jnp.asarray(sides.data(seed).loss_terms, sides.dtype)
        batch, positions = sides.our_batch(seed), sides.our_positions(seed)
        params, state = micro_step(params, state, batch, positions, terms)
        yield params, state


def step_by_step(sides: Sides, found: Iterable[Any], expected: list[Any]) -> Iterable[Pair]:
    """Parameters stand still within a group and are the reference's after it."""
    before, groups = sides.params, 0
    for number, (params, state) in enumerate(found, start=1):
        ended = number % EVERY == 0 or number == NUMBER
        yield Pair(f"micro-step {number}", "has updated", jk.has_updated(state), ended)
        if ended:
            yield from tree_pairs(params, expected[groups])
            groups += 1
        else:
            yield from tree_pairs(params, before)
        before = params
    yield Pair("all", "number of steps", groups, len(expected))


def first_order(name: str) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        ours, theirs = OPTIMIZERS[name]
        gradient = jax.grad(sides.objective)

        def statistics(params: Any, batch: Any, positions: Any, terms: Any) -> Any:
            return gradient(params, batch), {"terms": terms}

        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and its count
            steps = list(micro_steps(sides, jk.multi_steps(ours(), group_size), statistics))
        return step_by_step(
            sides, steps, reference_training.first_order(sides, theirs, weigh=True, **GROUPS)
        )

    return pairs


def second_order(sides: Sides) -> Iterable[Pair]:
    stats = jk.value_grad_and_factors(sides.objective)
    like = stats.factor_shapes(sides.params, sides.our_batch(), positions=sides.our_positions())
    tx = jk.kfac(
        RATE, like=like, damping=PAIR, decay=DECAY, momentum=MOMENTUM, refresh_every=1,
        norm_constraint=None,
    )  # fmt: skip

    def statistics(params: Any, batch: Any, positions: Any, terms: Any) -> Any:
        _, grads, found = stats(params, batch, positions=positions)
        return grads, {"factors": found}

    steps = micro_steps(sides, jk.multi_steps(tx, group_size), statistics)
    hyper = reference_training.Hyper(RATE, MOMENTUM, DECAY, PAIR)
    return step_by_step(sides, steps, reference_training.natural(sides, hyper, **GROUPS))


def equally_weighted(sides: Sides) -> Iterable[Pair]:
    """The documents' loss / K is plain ``optax.MultiSteps``, and ours with equal counts."""
    expected = reference_training.first_order(sides, OPTIMIZERS["SGD"][1], weigh=False, **GROUPS)
    # by itself it accumulates in float32, under float64 too
    multi = optax.MultiSteps(
        OPTIMIZERS["SGD"][0](), group_size, accumulator_dtype=jnp.dtype(sides.dtype)
    )
    gradient = jax.jit(jax.grad(sides.objective))
    params, state = sides.params, multi.init(sides.params)
    found = []
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies arrays by booleans
        for seed in range(NUMBER):
            updates, state = multi.update(gradient(params, sides.our_batch(seed)), state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)

        def statistics(params: Any, batch: Any, positions: Any, terms: Any) -> Any:
            return jax.grad(sides.objective)(params, batch), {"terms": jnp.ones_like(terms)}

        tx = jk.multi_steps(OPTIMIZERS["SGD"][0](), group_size)
        ours = [params for params, _ in micro_steps(sides, tx, statistics)]
    ends = [EVERY - 1, 2 * EVERY - 1, NUMBER - 1]
    for end, step in zip(ends, expected, strict=True):
        yield from tree_pairs(found[end], step)
        yield from tree_pairs(ours[end], step)


def by_bases(sides: Sides) -> Iterable[Pair]:
    """One step of SGD on gradients that eigenbases scale."""
    tx = optax.chain(jk.scale_by_bases(damping=PAIR), optax.sgd(RATE))
    grads, bases = sides.ours().grads, sides.our_bases()
    state = tx.init(sides.params)
    updates, _ = jax.jit(lambda g, s, b: tx.update(g, s, bases=b))(grads, state, bases)
    direction = curvature.natural_gradient(sides.gradients(), sides.bases(), damping=PAIR)
    return tree_pairs(updates, jax.tree.map(lambda x: -RATE * x, sides.tree(direction)))


# ---------------------------------------------------------------- the table

SUMS = exact(times32=2e-5, why="three steps, each from the parameters of the one before")
# Adam divides by the root of a squared gradient, small where the gradient is
ADAM = exact(times32=1e-3, why="three steps; gradients near zero divided by their own size")
CPU = ("float64", "float32")
# one of the micro-batches of the last has no loss term at all
UNEVEN = ["classifier", "masked tokens", "masked regression"]

CASES = [
    *(
        case
        for name, tolerances in (("SGD", SUMS), ("Adam", ADAM))
        for case in cases(
            "accumulation",
            name,
            UNEVEN,
            first_order(name),
            covers=("multi_steps", "MultiStepsState", "has_updated"),
            tolerances={dtype: tolerances[dtype] for dtype in CPU},
        )
    ),
    *cases(
        "accumulation",
        "K-FAC",
        UNEVEN,
        second_order,
        covers=("multi_steps", "kfac", "KfacState", "has_updated"),
        tolerances=divided(100),
    ),
    *cases(
        "accumulation",
        "loss divided by K, optax.MultiSteps",
        "classifier",
        equally_weighted,
        covers="multi_steps",
        tolerances={dtype: SUMS[dtype] for dtype in CPU},
    ),
    *cases(
        "natural gradient",
        "scale_by_bases and SGD",
        ["classifier", "scanned"],
        by_bases,
        covers=("scale_by_bases", "ScaleByBasesState"),
        tolerances=divided(100),
    ),
]


@pytest.mark.default(1, slow=2)
@over(CASES)
def test_accumulation_agrees(case, check):
    check(case)
