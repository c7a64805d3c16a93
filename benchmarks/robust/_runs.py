"""Runs of adaptive K-FAC and of Adam on problems that are changed in one respect."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from benchmarks.optimizers._kfac import documented
from benchmarks.optimizers._problem import Arrays, Mark, Problem, unmarked

RATES = (1e-3, 3e-3, 1e-2)  # of Adam, constant
HELD_OUT = "validation_"


@dataclasses.dataclass(frozen=True)
class Variation:
    """One change of a problem.

    Attributes:
        name: In the record.
        inputs: Factor of the inputs.
        outputs: Factor of the targets, where the data have some that are numbers, else of the
            network's outputs.
        weights: Factor of the initial parameters.
        examples: Examples in a batch; 0 for the problem's number.
        fixed: Whether every step sees the batch of the first one.
        dtype: Of parameters and data.
    """

    name: str
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0
    examples: int = 0
    fixed: bool = False
    dtype: Any = jnp.float32

    def data(self, problem: Problem) -> Arrays:
        """The problem's data, those held out included, in their new units."""
        factors = {"inputs": self.inputs, "images": self.inputs, "targets": self.outputs}
        data = problem.data()
        scales = {name: factors.get(name.removeprefix(HELD_OUT), 1.0) for name in data}
        return {name: x if scales[name] == 1 else scales[name] * x for name, x in data.items()}

    def of(self, problem: Problem, data: Arrays, seed: int) -> Problem:
        """The changed problem; its measure is the loss where the problem's own lacks the change."""
        marks_scale = self.outputs != 1 and "targets" not in data

        def loss(params: Any, batch: Any, mark: Mark) -> Any:
            def scaling(kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
                return mark(kind, self.outputs * outputs, targets, weight)

            return problem.loss(params, batch, scaling if marks_scale else mark)

        def batch(data: Arrays, seed: int, step: int) -> Any:
            chosen = problem.batch(data, seed, 0 if self.fixed else step)
            return jax.tree.map(lambda x: self._cast(x[: self.examples or None]), chosen)

        held = {k.removeprefix(HELD_OUT): x for k, x in data.items() if k.startswith(HELD_OUT)}
        seen = None
        if self.fixed:
            seen = data
        elif marks_scale and held.keys() & {"images", "inputs"}:
            seen = held
        validate = problem.validate
        if seen is not None:
            examples = jax.tree.map(jnp.asarray, problem.batch(seen, seed if self.fixed else 0, 0))
            validate = lambda params, data: loss(params, examples, unmarked)
        return problem._replace(
            loss=loss,
            batch=batch,
            validate=validate,
            initial=lambda seed: jax.tree.map(
                lambda x: self._cast(self.weights * x), problem.initial(seed)
            ),
        )

    def _cast(self, x: Any) -> Any:
        return jnp.asarray(x, self.dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)


VARIATIONS = (
    Variation("inputs x 100", inputs=100.0),
    Variation("initial weights x 5", weights=5.0),
    Variation("a fixed batch", fixed=True),
    Variation("outputs x 100", outputs=100.0),
    Variation("batches of 8", examples=8),
    Variation("bfloat16", dtype=jnp.bfloat16),
)
UNCHANGED = Variation("unchanged")

Init = Callable[[Any], Any]
Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Runs:
    """Runs of adaptive K-FAC (``"kfac"``) or Adam (``"adam"``); the last program is kept."""

    def __init__(self, method: str) -> None:
        self.method, self.key, self.program = method, (), (None, None)

    def __call__(
        self, problem: Problem, variation: Variation, seed: int, rate: float = 0.0
    ) -> dict[str, Any]:
        """Train for the problem's steps.

        Args:
            problem: What is trained.
            variation: How it is changed.
            seed: Of parameters, batches and sampled labels.
            rate: Adam's learning rate.

        Returns:
            The measure before and after, the first, highest and last loss of a batch, and what
            adaptive K-FAC counted.
        """
        data = variation.data(problem)
        changed = variation.of(problem, data, seed)
        key = problem.name, variation.outputs, variation.examples, variation.dtype
        if key != self.key:
            self.key, self.program = key, self._program(changed, data)
        init, step = self.program
        params, data_here = changed.initial(seed), jax.tree.map(jnp.asarray, data)
        measure = jax.jit(lambda p, d: changed.validate(_as_float32(p), d))
        first, carry, losses = float(measure(params, data_here)), init(params), []
        for i in range(problem.steps):
            key = jax.random.fold_in(jax.random.key(seed), i)
            carry, loss = step(carry, changed.batch(data, seed, i), key, jnp.float32(rate))
            losses.append(loss)
        last, losses = float(measure(carry[0], data_here)), [float(x) for x in losses]
        record = {"first": first, "last": last}
        record |= {"first_loss": losses[0], "highest": max(losses), "last_loss": losses[-1]}
        if self.method == "kfac":
            adapted = carry[1].adaptation._asdict()
            names = ("rejected", "disagreed", "first_damping", "damping")
            record |= {name: adapted[name].item() for name in names}
        return record

    def _program(self, problem: Problem, data: Arrays) -> tuple[Init, Step]:
        if self.method == "kfac":
            make = documented(lambda like, setting: jk.kfac(like=like), every=5, adaptive=True)
            steps = make(problem, data, {})
            return steps.init, jax.jit(steps.step)
        tx = optax.scale_by_adam()

        def step(carry: Any, batch: Any, key: Any, rate: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(problem.loss)(params, batch, unmarked)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, optax.tree.scale(-rate, updates)), state), value

        return lambda params: (params, tx.init(params)), jax.jit(step)


def _as_float32(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)
