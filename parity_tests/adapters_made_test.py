"""Adapters that are made, merged, measured or made trainable: what the model then computes."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxkfac import lslora
from parity_tests.adapters import Setting, linked
from parity_tests.adapters_test import POLYNOMIALS
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.sides import Sides
from torch_ref import lslora as reference

PLAIN, WIDTH = Setting("none", rslora=True, by_layer=True), 1.7


def fresh(sides: Sides) -> Iterable[Pair]:
    """Shapes and first values; A is random, and changes nothing where B is zero."""
    setting = Setting(by_layer=True)
    pair, config = linked(sides, setting), setting.config(sides.problem)
    apply, batch = sides.problem.apply(), sides.our_batch()
    ours = lslora.init(apply, config, sides.params, batch[0], key=jax.random.key(0))
    for layer in reference.adapted_layers(pair.model).values():
        layer.add_adapter("default", setting.reference(sides.problem))
    pair.model.to(sides.tensor_dtype).eval()
    outputs = jax.jit(lslora.attach(apply, config))(sides.params, ours, batch[0])
    with torch.no_grad():
        yield Pair("model", "outputs", outputs, pair.model(sides.batch()[0]))
    layers = reference.adapted_layers(pair.model)
    for twin in sides.problem.twins:
        layer, found = layers[twin.modules[0]], ours[twin.name]
        stack = found.sigma.shape
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        yield Pair(twin.name, "shape of A", found.a.shape, (*stack, *a.mT.shape))
        yield Pair(
            twin.name, "B", found.b, np.broadcast_to(b.mT.detach().cpu(), (*stack, *b.mT.shape))
        )
        phi = layer.fourier_params["default"]
        first = np.broadcast_to(phi.weight.detach().cpu(), (*stack, 4))
        yield Pair(twin.name, "coefficients", found.coefficients, first)
        sigma = np.broadcast_to(phi.sigma.detach().cpu(), stack)
        yield Pair(twin.name, "sigma", found.sigma, sigma)


def merged(sides: Sides) -> Iterable[Pair]:
    """The base program with merged kernels, against PyTorch's branch beside the layer."""
    pair, apply, inputs = linked(sides, PLAIN), sides.problem.apply(), sides.our_batch()[0]
    params = lslora.merge(lslora.attach(apply, pair.config), sides.params, pair.adapters, inputs)
    with torch.no_grad():
        yield Pair("model", "outputs", jax.jit(apply)(params, inputs), pair.model(sides.batch()[0]))


def warmed(sides: Sides) -> Iterable[Pair]:
    """Plain LoRA with a nonlinearity of slope 1 at zero."""
    first = np.array([0, WIDTH + 1e-6, 0, 0])  # phi divides by sigma + 1e-6
    for placement in ("output", "bottleneck"):
        plain, own = linked(sides, PLAIN), dataclasses.replace(PLAIN, placement=placement)
        ours, config = lslora.as_fourier(
            plain.adapters, plain.config, sigma=WIDTH, fourier_placement=placement
        )
        numbers = {
            module: x | {"coefficients": first, "sigma": np.array(WIDTH)}
            for module, x in PLAIN.numbers(sides.problem).items()
        }
        pair, apply = linked(sides, own, numbers), sides.problem.apply()
        found = jax.jit(lslora.attach(apply, config))(sides.params, ours, sides.our_batch()[0])
        with torch.no_grad():
            yield Pair("model", f"outputs, {placement}", found, pair.model(sides.batch()[0]))


def calibrated(placement: Any, *, at_first: bool) -> Callable[[Sides], Iterable[Pair]]:
    """Sigma from a batch: a hook of PyTorch's on what enters each nonlinearity."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        setting = Setting(placement)
        pair, apply, inputs = linked(sides, setting), sides.problem.apply(), sides.our_batch()[0]
        if at_first:
            config = dataclasses.replace(pair.config, init_sigma=lslora.RmsSigma(WIDTH))
            ours = lslora.init(apply, config, sides.params, inputs, key=jax.random.key(0))
            numbers = _numbers(sides, ours)
            pair = linked(sides, setting, numbers)
        else:
            adapted = lslora.attach(apply, pair.config)
            ours = lslora.calibrate(adapted, sides.params, pair.adapters, inputs, factor=WIDTH)
        seen: dict[str, torch.Tensor] = {}
        for module, layer in reference.adapted_layers(pair.model).items():

            def see(phi: Any, args: Any, module: str = module) -> None:
                seen[module] = args[0].square().mean().sqrt().detach().cpu()

            layer.fourier_params["default"].register_forward_pre_hook(see)
        with torch.no_grad():
            pair.model(sides.batch()[0])
        for twin in sides.problem.twins:
            rms = twin.stacked(seen, lambda x: WIDTH * x.numpy())
            yield Pair(twin.name, "sigma", ours[twin.name].sigma, rms)

    return pairs


def _numbers(sides: Sides, ours: dict[str, lslora.Adapter]) -> dict[str, Any]:
    """PyTorch's numbers of fresh adapters of jaxkfac; sigma is not read by what follows."""
    found = {}
    for twin in sides.problem.twins:
        for i, module in enumerate(twin.modules):
            one = jax.tree.map(np.asarray, ours[twin.name])
            one = one if len(twin.modules) == 1 else jax.tree.map(lambda x, i=i: x[i], one)
            found[module] = one._asdict() | {"coefficients": np.array([0.0, 1, 0, 0])}
    return found


PROBLEMS = ["classifier", "projections"]
CPU = ("float64", "float32")


def _table(name: str, pairs: Any, covers: Any, why: str) -> list[Any]:
    tolerances = {dtype: exact(why=why)[dtype] for dtype in CPU}
    return cases("adapter made", name, PROBLEMS, pairs, covers=covers, tolerances=tolerances)


CASES = [
    *_table("fresh", fresh, "init", "the base model and constants"),
    *_table("plain LoRA merged", merged, "merge", "one product in place of three"),
    *_table("plain LoRA made trainable", warmed, "as_fourier", POLYNOMIALS),
    *_table(
        "sigma measured, output", calibrated("output", at_first=False), "calibrate", POLYNOMIALS
    ),
    *_table(
        "sigma measured at first, bottleneck",
        calibrated("bottleneck", at_first=True),
        ("init", "RmsSigma"),
        POLYNOMIALS,
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_made_adapters_agree(case, check):
    check(case)
