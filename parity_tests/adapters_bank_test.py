"""Several named adapters: a bank that mixes them by row, against torch_ref one at a time."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxkfac as jk
from jaxkfac import lslora
from parity_tests.adapters import Setting, attach_numbers, leaf_pairs, linked
from parity_tests.adapters_test import CANCELLING, POLYNOMIALS
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.sides import Sides
from torch_ref import lslora as reference

# Other ranks, scalings and kinds, padded and scaled into one bank; in the order of their names,
# which is the order of a dictionary that went through jax.jit.
SETTINGS = {
    "first": Setting(alpha=3.0, seed=1),
    "plain": Setting("none", rank=3, alpha=2.0, by_layer=True, seed=3),
    "second": Setting(rank=1, alpha=5.0, rslora=True, seed=2),
}
BASE = -1


class Mixed(NamedTuple):
    """What a batch of mixed rows gives on jaxkfac's side, and PyTorch's model with all adapters."""

    outputs: Any
    gradients: dict[str, Any]
    regulariser: Any
    disabled: Any
    slots: dict[str, Any]
    model: Any


def slots_of(sides: Sides) -> np.ndarray:
    """The adapter of each example: every one, and the base model."""
    number = len(sides.data().targets)
    return np.random.default_rng(29).permutation(np.arange(number) % 4 - 1)


def mixed(sides: Sides) -> Mixed:
    """Both sides of one problem; PyTorch's gradients are not there yet."""

    def make() -> Mixed:
        problem, adapters, configs = sides.problem, {}, {}
        for name, setting in SETTINGS.items():
            pair = linked(sides, setting)
            adapters[name], configs[name] = pair.adapters, pair.config
        adapted = lslora.attach(problem.apply(), configs["first"])
        likelihood, rows = getattr(jk, problem.likelihood)(), jnp.asarray(slots_of(sides))

        @jax.jit
        def program(params: Any, adapters: Any, batch: Any) -> Any:
            def outputs(adapters: Any, inputs: Any, chosen: Any = rows) -> Any:
                return adapted(params, lslora.stack(adapters, configs), inputs, adapter=chosen)

            grads = jax.grad(jk.Objective(outputs, likelihood))(adapters, batch)
            bank = lslora.stack(adapters, configs)
            off = adapted(params, bank.disable("first"), batch[0], adapter=rows)
            each = {n: outputs(adapters, batch[0], bank.index(n)) for n in configs}
            return outputs(adapters, batch[0]), grads, lslora.fourier_loss(bank), off, each

        return Mixed(*program(sides.params, adapters, sides.our_batch()), torch_model(sides))

    return sides.kept("bank", make)


def torch_model(sides: Sides) -> Any:
    """PyTorch's model with every adapter by name."""
    names = list(SETTINGS)
    model = linked(sides, SETTINGS["first"]).model
    reference.delete_adapter(model, "default")
    for name in names:
        attach_numbers(
            sides, model, SETTINGS[name], SETTINGS[name].numbers(sides.problem), name=name
        )
    return model


def by_name(model: Any, name: str | None, x: torch.Tensor) -> torch.Tensor:
    """Outputs with one adapter, or none."""
    reference.set_active(model, *([] if name is None else [name]))
    with torch.no_grad():
        return model(x)


def outputs(sides: Sides) -> Iterable[Pair]:
    found, inputs = mixed(sides), sides.batch()[0]
    slots = torch.from_numpy(slots_of(sides))
    expected = by_name(found.model, None, inputs)
    disabled = expected.clone()
    for slot, name in enumerate(SETTINGS):
        alone = by_name(found.model, name, inputs)
        yield Pair(name, "outputs of the whole batch", found.slots[name], alone)
        expected[slots == slot] = alone[slots == slot]
        if name != "first":
            disabled[slots == slot] = alone[slots == slot]
    yield Pair("model", "outputs of mixed rows", found.outputs, expected)
    yield Pair("model", "outputs with one disabled", found.disabled, disabled)


def gradients(sides: Sides) -> Iterable[Pair]:
    """PyTorch runs each adapter on its own rows; the mean is over all rows."""
    found, (inputs, targets) = mixed(sides), sides.batch()
    slots, model = torch.from_numpy(slots_of(sides)), torch_model(sides)
    for slot, name in enumerate(SETTINGS):
        own = slots == slot
        reference.set_active(model, name)
        value = sides.loss(model, (inputs[own], targets[own]))
        (value * own.sum() / len(own)).backward()
        yield from leaf_pairs(
            sides,
            found.gradients[name],
            model,
            f"{name}: gradient of",
            lambda leaf: leaf.grad,
            name=name,
        )


def regulariser(sides: Sides) -> Iterable[Pair]:
    found, model = mixed(sides), torch_model(sides)
    reference.set_active(model, *SETTINGS)
    yield Pair("bank", "regulariser", found.regulariser, reference.fourier_loss(model))


VALUES, SUMS = exact(why=POLYNOMIALS), exact(times32=5e-4, why=CANCELLING)

CASES = [
    case
    for name, pairs, tolerances in (
        ("outputs by row, by slot, one disabled", outputs, VALUES),
        ("gradients of every adapter", gradients, SUMS),
        ("regulariser", regulariser, exact()),
    )
    for case in cases(
        "adapter bank",
        name,
        ["regression", "projections"],
        pairs,
        covers=("Bank", "stack", "attach", "fourier_loss"),
        tolerances={dtype: tolerances[dtype] for dtype in ("float64", "float32")},
    )
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_banks_agree(case, check):
    check(case)
