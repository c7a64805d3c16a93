"""Training with torch_ref over groups of micro-batches: parameters after every step."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parity_tests.sides import Sides
from torch_ref import curvature, factors
from torch_ref.accumulation import accumulated_training


class Hyper(NamedTuple):
    """Hyperparameters of K-FAC.

    Attributes:
        rate: Learning rate.
        momentum: Of SGD on natural gradients.
        decay: Of the average of factors.
        damping: Of each factor.
    """

    rate: float
    momentum: float
    decay: float
    damping: tuple[float, float]


def parameters_of(sides: Sides, model: torch.nn.Module) -> dict[str, Any]:
    """The model's parameters as a tree of jaxkfac."""
    weights = {n: p.detach().cpu().numpy().copy() for n, p in model.named_parameters()}
    return sides.problem.parameters(weights)


def first_order(
    sides: Sides,
    optimizer: Any,
    *,
    every: int,
    number: int,
    weigh: bool,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Parameters after every step of ``accumulated_training``; ``between`` two micro-batches."""
    model = copy.deepcopy(sides.model)

    def loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
        between()
        return sides.loss(model, sides.batch(seed))

    steps = accumulated_training(
        model,
        optimizer(model.parameters()),
        loss,
        range(number),
        every=every,
        loss_terms=(lambda seed: sides.data(seed).loss_terms) if weigh else None,
    )
    return [parameters_of(sides, model) for _ in steps]


class _NaturalGradient:
    """torch_ref's pieces put together: pooled factors, their average, SGD with momentum."""

    def __init__(self, sides: Sides, model: torch.nn.Module, hyper: Hyper) -> None:
        self.sides, self.model, self.hyper = sides, model, hyper
        self.optimizer = torch.optim.SGD(model.parameters(), lr=hyper.rate, momentum=hyper.momentum)
        self.sums: dict[str, Any] | None = None
        self.rows: dict[str, float] = {}
        self.terms = 0.0

    def step(self, seeds: list[int]) -> None:
        """One group of micro-batches."""
        sides, decay = self.sides, self.hyper.decay
        counts = [sides.data(seed).loss_terms for seed in seeds]
        total = sum(counts)
        parts = [self._collect(seed) for seed in seeds]
        pooled = factors.pool_factors(parts, loss_terms=counts)
        new = factors.to_sum_scale(pooled, loss_terms=total)
        # sums and counts are averaged, since groups differ in both
        scaled = {n: type(f)(f.a * f.rows, f.g * total, None, f.bias) for n, f in new.items()}
        old = factors.zeros_like(scaled) if self.sums is None else self.sums
        self.sums = factors.update_average(old, scaled, decay)
        self.rows = {
            n: decay * self.rows.get(n, 0.0) + (1 - decay) * (f.rows or 0) for n, f in new.items()
        }
        self.terms = decay * self.terms + (1 - decay) * total
        means = {
            n: type(f)(f.a / self.rows[n], f.g / self.terms, None, f.bias)
            for n, f in self.sums.items()
        }
        bases = curvature.decompose_factors(means, max_condition=1e6)
        self.optimizer.zero_grad(set_to_none=True)
        for seed, count in zip(seeds, counts, strict=True):
            (sides.loss(self.model, sides.batch(seed)) * (count / total)).backward()
        gradients = factors.read_gradients(self.model, means)
        direction = curvature.natural_gradient(gradients, bases, damping=self.hyper.damping)
        factors.write_gradients(self.model, direction)
        self.optimizer.step()

    def _collect(self, seed: int) -> Any:
        positions = self.sides.data(seed).positions
        return factors.collect_factors(
            self.model,
            self.sides.loss,
            self.sides.batch(seed),
            mask=None if positions is None else self.sides.tensor(positions),
        )


def natural(sides: Sides, hyper: Hyper, *, every: int, number: int) -> list[Any]:
    """Parameters after every step of K-FAC over groups."""
    model, found = copy.deepcopy(sides.model), []
    training = _NaturalGradient(sides, model, hyper)
    for start in range(0, number, every):
        training.step(list(range(start, min(start + every, number))))
        found.append(parameters_of(sides, model))
    return found
