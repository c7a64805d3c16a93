"""Adapters on both sides of a problem, from one set of NumPy numbers."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxkfac as jk
from jaxkfac import lslora
from parity_tests.compare import Pair, to_numpy
from parity_tests.precision import TORCH_DTYPE
from parity_tests.problem import Problem
from parity_tests.sides import Sides
from torch_ref import lslora as reference

Placement = Literal["output", "bottleneck", "none"]
PARTS = ("a", "b", "coefficients", "sigma")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An adapter of every layer of a problem.

    Attributes:
        placement: Where the nonlinearity is.
        rank: Of the layers.
        alpha: Of the layers.
        rslora: Whether alpha is divided by the root of the rank.
        by_layer: Whether the first layer has rank 1 and alpha 5.
        seed: Of the numbers.
    """

    placement: Placement = "output"
    rank: int = 2
    alpha: float = 3.0
    rslora: bool = False
    by_layer: bool = False
    seed: int = 0

    @property
    def is_linear(self) -> bool:
        return self.placement == "none"

    def _common(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "fourier_placement": self.placement,
            "init_sigma": 0.75,  # exact in float32, in which torch_ref makes it
            "reg_weight": 0.3,
            "rslora": self.rslora,
            "dropout": 0.1,  # in training only, on both sides
        }

    def config(self, problem: Problem) -> lslora.Config:
        """Settings of jaxkfac, by names of kernels."""
        own = {re.escape(problem.twins[0].name): 1} if self.by_layer else {}
        return lslora.Config(
            target="|".join(re.escape(twin.name) for twin in problem.twins),
            rank_pattern=own,
            alpha_pattern=dict.fromkeys(own, 5.0),
            **self._common(),
        )

    def reference(self, problem: Problem) -> reference.Config:
        """Settings of torch_ref, by names of modules."""
        first = "|".join(re.escape(module) for module in problem.twins[0].modules)
        own = {first: 1} if self.by_layer else {}
        return reference.Config(
            target="|".join(re.escape(m) for twin in problem.twins for m in twin.modules),
            rank_pattern=own,
            alpha_pattern=dict.fromkeys(own, 5.0),
            **self._common(),
        )

    def numbers(self, problem: Problem) -> dict[str, dict[str, np.ndarray]]:
        """``{module: leaves}`` in jaxkfac's orientation, of float32: a file holds them exactly."""
        config, rng = self.config(problem), np.random.default_rng([11, self.seed])
        found: dict[str, dict[str, np.ndarray]] = {}
        for twin in problem.twins:
            (n_out, n_in), rank = twin.shape, config.rank_of(twin.name)
            for module in twin.modules:
                sign = (-1) ** len(found)  # sigma counts by its absolute value
                leaves = {
                    "a": rng.normal(size=(n_in, rank)) / np.sqrt(n_in),
                    "b": 0.5 * rng.normal(size=(rank, n_out)),
                    "coefficients": np.array([0.0, 1.0, 0.0, 0.0]) + 0.4 * rng.normal(size=4),
                    "sigma": np.array(sign * (0.5 + rng.random())),
                }
                found[module] = {part: x.astype(np.float32) for part, x in leaves.items()}
        return found


class Linked(NamedTuple):
    """One adapter on both sides.

    Attributes:
        config: jaxkfac's settings.
        adapters: jaxkfac's adapters.
        model: PyTorch's model with the same ones, in evaluation mode.
    """

    config: lslora.Config
    adapters: dict[str, lslora.Adapter]
    model: nn.Module


def wide_dtype(sides: Sides) -> str:
    """Of coefficients and sigma: float32 at the least."""
    return "float32" if sides.dtype == "bfloat16" else sides.dtype


def linked(
    sides: Sides, setting: Setting, numbers: Any = None, *, base: nn.Module | None = None
) -> Linked:
    """The same numbers on both sides; a new model each time, since it is trained in place.

    Args:
        sides: The problem.
        setting: The adapter.
        numbers: Of the adapters; by default the setting's own.
        base: PyTorch's model, by default that of the problem; it is copied.
    """
    numbers = setting.numbers(sides.problem) if numbers is None else numbers
    model = copy.deepcopy(sides.model if base is None else base)
    attach_numbers(sides, model, setting, numbers)
    adapters = {}
    for twin in sides.problem.twins:
        leaves = {
            part: jnp.asarray(
                twin.stacked(numbers, lambda x, part=part: x[part]),
                sides.dtype if part in ("a", "b") else wide_dtype(sides),
            )
            for part in PARTS
        }
        adapter = lslora.Adapter(**leaves)
        if setting.is_linear:
            adapter = adapter._replace(coefficients=None, sigma=None)
        adapters[twin.name] = adapter
    return Linked(setting.config(sides.problem), adapters, model.eval())


def attach_numbers(
    sides: Sides, model: nn.Module, setting: Setting, numbers: Any, *, name: str = "default"
) -> None:
    """One more adapter of a PyTorch model, with given numbers."""
    reference.attach(model, setting.reference(sides.problem), name=name)
    with torch.no_grad():
        for module, layer in reference.adapted_layers(model).items():
            for part, leaf in torch_leaves(layer, name).items():
                # coefficients and sigma are made in float32, and all of a base in four bits
                dtype = wide_dtype(sides) if part in ("coefficients", "sigma") else sides.dtype
                leaf.data = leaf.data.to(TORCH_DTYPE[dtype])
                number = numbers[module][part]
                leaf.copy_(torch.as_tensor(number.T if part in ("a", "b") else number))
            if name in layer.fourier_params:
                layer.fourier_params[name].to(TORCH_DTYPE[wide_dtype(sides)])
    model.eval()


def torch_leaves(layer: reference.LSLoRALinear, name: str = "default") -> dict[str, Any]:
    """PyTorch's parameters of one adapter in one layer, by jaxkfac's names."""
    leaves = {"a": layer.lora_A[name].weight, "b": layer.lora_B[name].weight}
    if name in layer.fourier_params:
        phi = layer.fourier_params[name]
        leaves |= {"coefficients": phi.weight, "sigma": phi.sigma}
    return leaves


def leaf_pairs(
    sides: Sides,
    ours: dict[str, lslora.Adapter],
    model: nn.Module,
    what: str,
    read: Callable[[Any], Any] = lambda leaf: leaf,
    *,
    name: str = "default",
) -> Iterable[Pair]:
    """A and B of every layer, and its five scalars one by one.

    Args:
        sides: The problem.
        ours: What jaxkfac has for each leaf.
        model: PyTorch's.
        what: It is called in the report.
        read: From PyTorch's leaf to the same.
        name: Of the adapter in PyTorch's model.
    """
    layers = reference.adapted_layers(model)
    for twin in sides.problem.twins:
        adapter = ours[twin.name]
        expected = {}
        for module in twin.modules:
            leaves = torch_leaves(layers[module], name)
            found = {part: to_numpy(read(leaf)) for part, leaf in leaves.items()}
            expected[module] = found | {part: found[part].T for part in ("a", "b")}
        stacked = {
            part: twin.stacked(expected, lambda x, part=part: x[part])
            for part in expected[twin.modules[0]]
        }
        yield Pair(twin.name, f"{what} A", adapter.a, stacked["a"])
        yield Pair(twin.name, f"{what} B", adapter.b, stacked["b"])
        if "sigma" in stacked:
            assert adapter.coefficients is not None
            for k in range(4):
                both = adapter.coefficients[..., k], stacked["coefficients"][..., k]
                yield Pair(twin.name, f"{what} c{k}", *both)
            yield Pair(twin.name, f"{what} sigma", adapter.sigma, stacked["sigma"])


# ---------------------------------------------------------------- value and gradient


class Gradients(NamedTuple):
    """What jaxkfac gives for one batch: of the mean loss plus the weighted regulariser."""

    outputs: Any
    value: Any
    adapters: Any
    inputs: Any


def gradient_program(sides: Sides, setting: Setting) -> Any:
    """``(params, adapters, batch) -> Gradients`` of jaxkfac, compiled once for a setting."""
    config, likelihood = setting.config(sides.problem), getattr(jk, sides.problem.likelihood)()

    def make() -> Any:
        adapted = lslora.attach(sides.problem.apply(), config)

        @jax.jit
        def program(params: Any, adapters: Any, batch: Any) -> Gradients:
            def loss(adapters: Any, inputs: Any) -> Any:
                objective = jk.Objective(lambda a, x: adapted(params, a, x), likelihood)
                value = objective(adapters, (inputs, *batch[1:]))
                if not setting.is_linear:
                    weight = jnp.asarray(config.reg_weight, value.dtype)
                    value += weight * lslora.fourier_loss(adapters).astype(value.dtype)
                return value

            outputs = adapted(params, adapters, batch[0])
            value, grads = jax.value_and_grad(loss, (0, 1))(adapters, batch[0])
            return Gradients(outputs, value, *grads)

        return program

    return sides.kept(("adapter program", setting), make)


def reference_loss(
    sides: Sides, setting: Setting, model: nn.Module, batch: tuple[Any, ...]
) -> torch.Tensor:
    """PyTorch's mean loss plus the weighted regulariser."""
    value = sides.loss(model, batch)
    if setting.is_linear:
        return value
    weight = setting.reference(sides.problem).reg_weight
    return value + weight * reference.fourier_loss(model)
