"""Three training steps of an adapter, each equal to PyTorch's, with the weighted regulariser."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
import pytest

from parity_tests.accumulation_test import ADAM, CPU, OPTIMIZERS, SUMS
from parity_tests.adapters import Setting, gradient_program, leaf_pairs, linked, reference_loss
from parity_tests.cases import cases, over
from parity_tests.compare import Pair
from parity_tests.sides import Sides

STEPS = 3


def training(name: str, setting: Setting) -> Callable[[Sides], Iterable[Pair]]:
    """Adapters after every step, and that the base model stands still."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        (ours, theirs), pair = OPTIMIZERS[name], linked(sides, setting)
        gradients, tx, adapters = gradient_program(sides, setting), ours(), pair.adapters
        leaves = [leaf for leaf in pair.model.parameters() if leaf.requires_grad]
        optimizer, state = theirs(leaves), tx.init(adapters)

        @jax.jit
        def update(grads: Any, state: Any, adapters: Any) -> Any:
            updates, state = tx.update(grads, state, adapters)
            return optax.apply_updates(adapters, updates), state

        for seed in range(STEPS):
            found = gradients(sides.params, adapters, sides.our_batch(seed))
            with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and its count
                adapters, state = update(found.adapters, state, adapters)
            optimizer.zero_grad()
            value = reference_loss(sides, setting, pair.model, sides.batch(seed))
            value.backward()
            optimizer.step()
            yield Pair(f"step {seed + 1}", "value", found.value, value)
            yield from leaf_pairs(sides, adapters, pair.model, f"step {seed + 1},")
        still = pair.model.state_dict()
        for twin in sides.problem.twins:
            for module in twin.modules:
                weight = sides.model.get_submodule(module).weight
                yield Pair(module, "base weight", weight, still[f"{module}.base_layer.weight"])

    return pairs


CASES = [
    case
    for name, tolerances in (("SGD", SUMS), ("Adam", ADAM))
    for placement in ("output", "bottleneck")
    for case in cases(
        "adapter training",
        f"three steps, {name}, {placement}",
        ["classifier", "projections"],
        training(name, Setting(placement)),
        covers=("attach", "Adapter", "fourier_loss"),
        tolerances={dtype: tolerances[dtype] for dtype in CPU},
    )
] + cases(
    "adapter training",
    "three steps, Adam, plain LoRA",
    "projections",
    training("Adam", Setting("none")),
    covers=("attach", "Adapter"),
    tolerances={dtype: ADAM[dtype] for dtype in CPU},
)


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_adapters_are_trained_alike(case, check):
    check(case)
