"""One micro-batch as one compiled program."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from jaxkfac.cli._interrupts import interrupts_deferred
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import Problem, as_batch, collector, objective_of
from jaxkfac.data.text import TokenBatch

PyTree = Any
_LABELS, _DROPOUT = 0, 1  # folded into the run's key: K-FAC's labels and dropout differ


class MicroResult(NamedTuple):
    """After a micro-batch.

    Attributes:
        adapters: Changed by the last micro-batch of an update only.
        optimizer: State.
        loss: Mean over the learnt tokens, before.
        penalty: The regulariser times its weight, before.
    """

    adapters: PyTree
    optimizer: PyTree
    loss: jax.Array
    penalty: jax.Array


class MicroStep:
    """``step(adapters, optimizer, batch, number)``, compiled for each shape of a batch.

    Attributes:
        compile_seconds: Spent so far.
        programs: Compiled so far.
    """

    def __init__(
        self,
        problem: Problem,
        experiment: Finetuning,
        tx: optax.GradientTransformationExtraArgs,
    ) -> None:
        self.compile_seconds, self.programs = 0.0, 0
        self._params = problem.params
        self._run = jax.jit(_micro_step(problem, experiment, tx))
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, adapters: PyTree, optimizer: PyTree, batch: TokenBatch, number: int
    ) -> MicroResult:
        """Take micro-batch ``number`` of the run into account."""
        at = jnp.asarray(number, jnp.int32)
        arguments = (self._params, adapters, optimizer, as_batch(batch), at)
        shape = batch.ids.shape
        if shape not in self._compiled:
            started = time.perf_counter()
            # A trace that is broken off can take the process down when it ends.
            with interrupts_deferred("compiling"):
                self._compiled[shape] = self._run.lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - started
            self.programs += 1
        return self._compiled[shape](*arguments)


def _micro_step(
    problem: Problem, experiment: Finetuning, tx: optax.GradientTransformationExtraArgs
) -> Any:
    weight = 0.0 if experiment.adapter.fourier_placement == "none" else problem.config.reg_weight

    def penalty_of(adapters: PyTree) -> jax.Array:
        if not weight:
            return jnp.zeros((), jnp.float32)
        return weight * jk.lslora.regulariser(adapters, problem.config.nonlinearity)

    def micro_step(
        params: PyTree, adapters: PyTree, state: PyTree, batch: Any, number: jax.Array
    ) -> MicroResult:
        objective = objective_of(problem, params)
        inputs, _, mask = batch
        key = jax.random.fold_in(jax.random.key(experiment.seed), number)
        drop = jax.random.fold_in(key, _DROPOUT) if problem.config.dropout else None
        extra: dict[str, Any]
        if experiment.optimizer == "kfac":
            collect = collector(experiment, objective)
            labels = drop if drop is not None else jax.random.fold_in(key, _LABELS)
            exist = inputs.segments > 0
            loss, grads, factors = collect(adapters, batch, key=labels, positions=exist)
            extra = {"factors": factors}
        else:
            loss, grads = jax.value_and_grad(objective)(adapters, batch, drop)
            extra = {"terms": mask.sum()}
        penalty, pull = jax.value_and_grad(penalty_of)(adapters)
        grads = jax.tree.map(jnp.add, grads, pull)
        updates, state = tx.update(grads, state, adapters, **extra)
        return MicroResult(optax.apply_updates(adapters, updates), state, loss, penalty)

    return micro_step
