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

RATES = (1e-3, 3e-3, 1e-2)


def _same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Variation:
    """One change of a problem.

    Attributes:
        name: In the record.
        inputs: Factor of the inputs.
        outputs: Factor of a classifier's outputs, or of a regression's targets.
        weights: Factor of the initial parameters.
        examples: Examples in a batch; 0 for the problem's number.
        fixed: Whether every step sees the batch of step 0.
        dtype: Of parameters and data.
    """

    name: str
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0
    examples: int = 0
    fixed: bool = False
    dtype: Any = jnp.float32

    def loss(self, problem: Problem) -> Callable[[Any, Any, Mark], Any]:
        """The problem's loss, whose marks multiply the outputs."""
        if self.outputs == 1:
            return problem.loss

        def loss(params: Any, batch: Any, mark: Mark) -> Any:
            def scaling(kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
                return mark(kind, self.outputs * outputs, targets, weight)

            return problem.loss(params, batch, scaling)

        return loss

    def data(self, problem: Problem) -> Arrays:
        """The problem's data with scaled inputs and a regression's scaled targets."""
        data = problem.data()
        for name, x in data.items():
            if name.removeprefix("validation_") in ("inputs", "images"):
                data[name] = self.inputs * x
        return data

    def initial(self, problem: Problem, seed: int) -> Any:
        """The initial parameters."""
        return jax.tree.map(lambda x: self._cast(self.weights * x), problem.initial(seed))

    def batch(self, problem: Problem, data: Arrays, seed: int, step: int) -> Any:
        """The batch of a step."""
        batch = problem.batch(data, seed, 0 if self.fixed else step)
        return jax.tree.map(lambda x: self._cast(x[: self.examples or None]), batch)

    def _cast(self, x: Any) -> Any:
        return jnp.asarray(x, self.dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)


VARIATIONS = (
    Variation("unchanged"),
    Variation("inputs x 100", inputs=100.0),
    Variation("initial weights x 5", weights=5.0),
    Variation("a fixed batch", fixed=True),
    Variation("outputs x 100", outputs=100.0),
    Variation("batches of 8", examples=8),
    Variation("bfloat16", dtype=jnp.bfloat16),
)

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class Runs:
    """Runs of one optimizer; its last program is kept.

    Args:
        method: "kfac", "adam" or "fixed": ``jk.kfac`` with a learning rate.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.key: Any = None
        self.program: Any = None

    def __call__(
        self, problem: Problem, variation: Variation, seed: int, rate: float = 0.0
    ) -> dict[str, Any]:
        """Train, and return the validation measure before, on the way and at the end."""
        data = variation.data(problem)
        key = problem.name, variation.outputs, variation.examples, variation.dtype
        if key != self.key:
            jax.clear_caches()
            changed = problem._replace(loss=variation.loss(problem), initial=variation.initial)
            changed = changed._replace(
                initial=lambda seed: variation.initial(problem, seed),
                batch=lambda data, seed, step: variation.batch(problem, data, seed, step),
            )
            self.key, self.program = key, self._program(changed, data)
        init, step = self.program
        params = variation.initial(problem, seed)
        carry, held = init(params), jax.tree.map(jnp.asarray, data)
        measure = jax.jit(problem.validate)
        exact = lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params)
        first, values = float(measure(exact(params), held)), []
        for i in range(problem.steps):
            batch = variation.batch(problem, data, seed, i)
            random = jax.random.fold_in(jax.random.key(seed), i)
            carry, value = step(carry, batch, (random, jnp.float32(rate)))
            values.append(value)
        last = float(measure(exact(carry[0]), held))
        values = [float(x) for x in values]
        record = {
            "first": first,
            "last": last,
            "loss": values[0],
            "highest": max(values),
            "end": values[-1],
        }
        if self.method == "kfac":
            a = carry[1].adaptation
            record |= {
                "rejected": int(a.rejected),
                "damping": float(a.damping),
                "disagreed": int(a.disagreed),
                "first_damping": float(a.first_damping),
            }
        return record

    def _program(self, problem: Problem, data: Arrays) -> tuple[Callable[[Any], Any], Step]:
        if self.method == "adam":
            tx = optax.scale_by_adam()

            def step(carry: Any, batch: Any, more: Any) -> Any:
                params, state = carry
                value, grads = jax.value_and_grad(problem.loss)(params, batch, unmarked)
                updates, state = tx.update(grads, state, params)
                updates = optax.tree.scale(-more[1].astype(jnp.float32), updates)
                return (optax.apply_updates(params, updates), state), value

            return lambda params: (params, tx.init(params)), jax.jit(step)
        make = lambda like, setting: jk.kfac(like=like)
        steps = documented(make, adaptive=True)(problem, data, {})
        return steps.init, jax.jit(
            lambda carry, batch, more: steps.step(carry, batch, more[0], 0.0)
        )
