"""Adapters on a base in NF4 whose blocks are recomputed in the backward pass: the whole stack."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from jaxkfac.lslora import nf4
from parity_tests.adapters import (
    Placement,
    Setting,
    gradient_program,
    leaf_pairs,
    linked,
    reference_loss,
)
from parity_tests.cases import Tolerance, cases, over
from parity_tests.compare import Pair
from parity_tests.layout import Twin
from parity_tests.recomputed_models import PACKED
from parity_tests.sides import Sides
from torch_ref import lslora as reference

STEPS, BATCHES = 20, 4
# Small steps: at a rate of 0.05 every step multiplies what differs by five, in PyTorch alone too.
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (
        lambda: optax.sgd(5e-4, momentum=0.9),
        lambda leaves: torch.optim.SGD(leaves, lr=5e-4, momentum=0.9),
    ),
    "Adam": (
        lambda: optax.adam(1e-3, eps=1e-6),
        lambda leaves: torch.optim.Adam(leaves, lr=1e-3, eps=1e-6),
    ),
}
WEIGHT = "weight"  # the key of a kernel in the tensors of its module


class Base(NamedTuple):
    """One base model in four bits.

    Attributes:
        model: PyTorch's, its blocks quantised by bitsandbytes.
        params: jaxkfac's, the same codes and scales.
        tensors: As bitsandbytes writes them, by module.
    """

    model: nn.Module
    params: dict[str, Any]
    tensors: dict[str, dict[str, np.ndarray]]


def base_of(sides: Sides) -> Base:
    """Quantised once by bitsandbytes; what it would write into a file is what jaxkfac reads."""

    def make() -> Base:
        model = copy.deepcopy(sides.model)
        tensors = {}
        for module in reference.quantize(model, PACKED):
            weight: Any = model.get_submodule(module).weight
            state = weight.quant_state.as_dict(packed=True)
            parts = {f"{WEIGHT}.{key}": x.cpu().numpy() for key, x in state.items()}
            tensors[module] = {WEIGHT: weight.detach().cpu().numpy(), **parts}
        blocks = copy.copy(sides.params["blocks"])
        for twin in packed(sides):
            name = twin.kernel.split("/")[1]
            blocks[name] = blocks[name] | {"kernel": in_dtype(read(twin, tensors), sides.dtype)}
        return Base(model, sides.params | {"blocks": blocks}, tensors)

    return sides.kept("NF4 base", make)


def packed(sides: Sides) -> list[Twin]:
    return [twin for twin in sides.problem.twins if twin.name.startswith("blocks/")]


def read(twin: Twin, tensors: dict[str, dict[str, np.ndarray]]) -> nf4.NF4:
    """A scanned stack from what bitsandbytes wrote."""
    slices = [nf4.from_bitsandbytes(tensors[module], WEIGHT) for module in twin.modules]
    return jax.tree.map(lambda *x: jnp.stack(x), *slices)


def in_dtype(kernel: nf4.NF4, dtype: str) -> nf4.NF4:
    """Decoded in float32 as ever, and then converted."""
    return dataclasses.replace(kernel, dtype=jnp.dtype(dtype))


# ---------------------------------------------------------------- what is compared


def same_bits(sides: Sides) -> Iterable[Pair]:
    """Codes, both levels of scales and decoded weights; each difference is a difference in bits."""
    base = base_of(sides)
    for twin in packed(sides):
        kernels = [sides.model.get_submodule(m).weight.detach().cpu().numpy() for m in twin.modules]
        slices = [jnp.asarray(kernel.T.astype(np.float32)) for kernel in kernels]
        own = nf4.quantize({"kernel": jnp.stack(slices)}, stack=1)["kernel"]
        one_by_one = nf4.quantize_slices(iter(slices), length=len(slices))
        found = read(twin, base.tensors)
        decoded = nf4.dequantize(found)
        for i, module in enumerate(twin.modules):
            theirs = base.tensors[module]
            codes = theirs[WEIGHT].reshape(own.codes[i].shape)
            yield Pair(module, "codes", own.codes[i], codes)
            yield Pair(module, "codes, slice by slice", one_by_one.codes[i], codes)
            weight: Any = base.model.get_submodule(module).weight
            yield Pair(module, "decoded", decoded[i].T, _decoded(weight))
            one: nf4.NF4 = jax.tree.map(lambda x, i=i: x[i], found)
            written = nf4.to_bitsandbytes(one, WEIGHT)
            for key in (WEIGHT, f"{WEIGHT}.absmax", f"{WEIGHT}.nested_absmax"):
                yield Pair(module, f"{key} written", written[key], theirs[key])


def second_level(sides: Sides) -> Iterable[Pair]:
    """What jaxkfac quantised itself, scales and weights decoded, against bitsandbytes'."""
    base = base_of(sides)
    for twin in packed(sides):
        kernels = [sides.model.get_submodule(m).weight.detach().cpu().numpy() for m in twin.modules]
        stacked = jnp.stack([jnp.asarray(kernel.T.astype(np.float32)) for kernel in kernels])
        own = nf4.quantize({"kernel": stacked}, stack=1)["kernel"]
        theirs, decoded = read(twin, base.tensors), nf4.dequantize(own)
        assert own.nested is not None and theirs.nested is not None
        yield Pair(twin.name, "offset", own.nested.offset, theirs.nested.offset)
        yield Pair(twin.name, "nested scales", own.nested.absmax, theirs.nested.absmax)
        yield Pair(twin.name, "scales", own.scales(), theirs.scales())
        for i, module in enumerate(twin.modules):
            weight: Any = base.model.get_submodule(module).weight
            yield Pair(module, "decoded from own codes", decoded[i].T, _decoded(weight))


def _decoded(weight: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def one_batch(placement: Placement) -> Callable[[Sides], Iterable[Pair]]:
    """Outputs and value, and the gradients of every adapter and of the inputs."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        setting, base = Setting(placement), base_of(sides)
        pair = linked(sides, setting, base=base.model)
        ours = gradient_program(sides, setting)(base.params, pair.adapters, sides.our_batch())
        inputs, *rest = sides.batch()
        inputs = inputs.clone().requires_grad_()
        value = reference_loss(sides, setting, pair.model, (inputs, *rest))
        value.backward()
        with torch.no_grad():
            yield Pair("model", "outputs", ours.outputs, pair.model(inputs))
        yield Pair("objective", "value", ours.value, value)
        yield Pair("model", "gradient of x", ours.inputs, inputs.grad)
        yield from leaf_pairs(
            sides, ours.adapters, pair.model, "gradient of", lambda leaf: leaf.grad
        )

    return pairs


def training(name: str, placement: Placement) -> Callable[[Sides], Iterable[Pair]]:
    """The adapters after every step; and that the base stands still, bit by bit."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        setting, base = Setting(placement), base_of(sides)
        pair = linked(sides, setting, base=base.model)
        ours, theirs = OPTIMIZERS[name]
        gradients, tx, adapters = gradient_program(sides, setting), ours(), pair.adapters
        leaves = [leaf for leaf in pair.model.parameters() if leaf.requires_grad]
        optimizer, state = theirs(leaves), tx.init(adapters)

        @jax.jit
        def update(grads: Any, state: Any, adapters: Any) -> Any:
            updates, state = tx.update(grads, state, adapters)
            return optax.apply_updates(adapters, updates), state

        values = []
        for step in range(STEPS):
            found = gradients(base.params, adapters, sides.our_batch(step % BATCHES))
            with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and its count
                adapters, state = update(found.adapters, state, adapters)
            optimizer.zero_grad()
            value = reference_loss(sides, setting, pair.model, sides.batch(step % BATCHES))
            value.backward()
            optimizer.step()
            values.append(value.item())
            yield Pair(f"step {step + 1}", "value", found.value, value)
            yield from leaf_pairs(sides, adapters, pair.model, f"step {step + 1},")
        first, last = sum(values[:BATCHES]), sum(values[-BATCHES:])
        yield Pair("objective", "is lower than at first", last < 0.9 * first, True)
        for module, tensors in base.tensors.items():
            weight: Any = pair.model.get_submodule(f"{module}.base_layer").weight
            yield Pair(module, "codes afterwards", weight.data, tensors[WEIGHT])

    return pairs


# ---------------------------------------------------------------- the table

BITS = Tolerance(1e-15, "the same bits: integers, and products and sums of float32 in one order")
WHY = "weights decoded in float32, the same on both sides; nothing is divided"
ONCE = {
    "float64": Tolerance(1e-12, WHY),
    "float32": Tolerance(1e-4, f"gradients of scalars add terms of both signs; {WHY}"),
}
STEP_WHY = f"{STEPS} steps, each from the adapters of the one before"
# Adam divides by the root of a squared gradient, small where the gradient is
ADAM_WHY = f"{STEP_WHY}; gradients near zero divided by their own size"
TRAINED = {
    "SGD": {"float64": Tolerance(1e-12, STEP_WHY), "float32": Tolerance(2e-4, STEP_WHY)},
    "Adam": {"float64": Tolerance(1e-12, ADAM_WHY), "float32": Tolerance(5e-3, ADAM_WHY)},
}

CASES = [
    *cases(
        "NF4 base",
        "codes, scales and decoded weights",
        "recomputed blocks",
        same_bits,
        covers=(
            "NF4",
            "Nested",
            "nf4",
            "dequantize",
            "from_bitsandbytes",
            "quantize",
            "quantize_slices",
            "to_bitsandbytes",
        ),
        tolerances={"float32": BITS},
    ),
    *cases(
        "NF4 base",
        "second level of scales",
        "recomputed blocks",
        second_level,
        covers=("NF4", "Nested", "nf4", "dequantize", "quantize"),
        tolerances={"float32": Tolerance(1e-5, "PyTorch adds the mean of the scales in float32")},
    ),
    *(
        case
        for placement in ("output", "bottleneck")
        for case in (
            *cases(
                "NF4 base",
                f"one batch, {placement}",
                ["blocks", "recomputed blocks"],
                one_batch(placement),
                covers=("attach", "Adapter", "NF4", "from_bitsandbytes", "fourier_loss"),
                tolerances=ONCE,
            ),
            *(
                case
                for name, tolerances in TRAINED.items()
                for case in cases(
                    "NF4 base",
                    f"{STEPS} steps, {name}, {placement}",
                    "recomputed blocks",
                    training(name, placement),
                    covers=("attach", "Adapter", "NF4", "from_bitsandbytes"),
                    tolerances=tolerances,
                )
            ),
        )
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_adapters_on_a_base_in_four_bits_agree(case, check):
    check(case)
