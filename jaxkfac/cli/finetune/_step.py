"""One micro-batch as one compiled program."""

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from jaxkfac.cli._interrupts import interrupts_deferred
from jaxkfac.cli._loop import gradient_norm, skipped_updates
from jaxkfac.cli._phases import phase
from jaxkfac.cli.finetune._family import check_ids
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import FinetuneProblem, collector, objective_of
from jaxkfac.data.stream import BatchStream, Position

PyTree = Any
_LABELS, _DROPOUT = 0, 1  # folded into the run's key: K-FAC's labels and dropout differ


class PreparedStep(NamedTuple):
    """A micro-batch on the device, and what of it the host counts.

    Attributes:
        number: Of the micro-batch in the run.
        position: In the data, behind it.
        batch: ``(inputs, targets, mask)``.
        tokens: That are read, without padding.
        learnt: Of them in the loss.
        examples: In all rows.
    """

    number: int
    position: Position
    batch: Any
    tokens: int
    learnt: int
    examples: int


def prepare(
    problem: FinetuneProblem, number: int, batches: Iterator[tuple[Any, Position]]
) -> PreparedStep:
    """Build the next micro-batch and send it; does not wait until it has arrived.

    Raises:
        ValueError: it has ids that the model has not.
    """
    batch, position = next(batches)
    if isinstance(problem.train, BatchStream):  # others are checked when they are made
        check_ids(batch.largest_id, problem.vocabulary)
    counts = batch.num_tokens, batch.num_terms, batch.num_examples
    arrays = problem.family.batch(batch, np.asarray)
    return PreparedStep(number, position, problem.devices.put_batch(arrays), *counts)


class MicroResult(NamedTuple):
    """After a micro-batch.

    Attributes:
        adapters: Changed by the last micro-batch of an update only.
        optimizer: State.
        numbers: Loss (mean over the learnt tokens, before), the regulariser times its weight,
            before, what the optimizer has skipped so far, and the norm of the gradient, the
            regulariser's included.
    """

    adapters: PyTree
    optimizer: PyTree
    numbers: jax.Array


def empty_history(rows: int) -> jax.Array:
    """Room for the numbers of ``rows`` micro-batches."""
    return jnp.zeros((rows, 4))


@functools.partial(jax.jit, donate_argnums=0)
def write(history: jax.Array, numbers: jax.Array, row: jax.Array) -> jax.Array:
    """One more row; not in the step, whose bits the size of the history would change."""
    return history.at[row].set(numbers.astype(history.dtype))


class MicroStep:
    """``step(adapters, optimizer, given)``, compiled for each shape of a batch.

    The first two are donated: what comes back lies in their memory.

    Attributes:
        compile_seconds: Spent so far.
        programs: Compiled so far.
    """

    def __init__(
        self,
        problem: FinetuneProblem,
        experiment: Finetuning,
        tx: optax.GradientTransformationExtraArgs,
    ) -> None:
        self.compile_seconds, self.programs = 0.0, 0
        self._params, self._devices = problem.params, problem.devices
        step, options = _micro_step(problem, experiment, tx), problem.devices.of_program()
        self._run = jax.jit(step, donate_argnums=(1, 2), **options)
        self._compiled: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(self, adapters: PyTree, optimizer: PyTree, given: PreparedStep) -> MicroResult:
        """Take a micro-batch into account."""
        number = self._devices.whole(jnp.asarray(given.number, jnp.int32))
        arguments = (self._params, adapters, optimizer, given.batch, number)
        return self._devices.processes.settled(self.program(*arguments)(*arguments))

    def program(self, *arguments: Any) -> Any:
        """The compiled program of these arguments: of parameters, then those of a call."""
        shape = tuple(x.shape for x in jax.tree.leaves(arguments[3]))
        if shape not in self._compiled:
            jax.block_until_ready(arguments)  # what is under way is no part of the compilation
            started = time.perf_counter()
            # A trace that is broken off can take the process down when it ends.
            with interrupts_deferred("compiling"), phase("compiling"), self._devices.set():
                lowered = self._run.lower(*arguments)
                self._compiled[shape] = self._devices.processes.compiled(lowered)
            self.compile_seconds += time.perf_counter() - started
            self.programs += 1
        return self._compiled[shape]


def _micro_step(
    problem: FinetuneProblem, experiment: Finetuning, tx: optax.GradientTransformationExtraArgs
) -> Any:
    config, weight, drops = problem.config, 0.0, problem.drops(experiment)
    if config is not None:
        weight = 0.0 if config.fourier_placement == "none" else config.reg_weight

    def penalty_of(adapters: PyTree) -> jax.Array:
        assert config is not None
        return weight * jk.lslora.regulariser(adapters, config.nonlinearity)

    def micro_step(
        params: PyTree,
        adapters: PyTree,
        state: PyTree,
        batch: Any,
        number: jax.Array,
    ) -> MicroResult:
        objective = objective_of(experiment, problem, params)
        _, _, mask = batch
        key = jax.random.fold_in(jax.random.key(experiment.seed), number)
        drop = jax.random.fold_in(key, _DROPOUT) if drops else None
        extra: dict[str, Any]
        if experiment.optimizer == "kfac":
            collect = collector(experiment, objective)
            labels = drop if drop is not None else jax.random.fold_in(key, _LABELS)
            exist = problem.family.exist(batch)
            loss, grads, factors = collect(adapters, batch, key=labels, positions=exist)
            extra = {"factors": factors}
        else:
            loss, grads = jax.value_and_grad(objective)(adapters, batch, drop)
            extra = {"terms": mask.sum()}
        penalty = jnp.zeros((), jnp.float32)
        if weight:
            penalty, penalty_grads = jax.value_and_grad(penalty_of)(adapters)
            grads = jax.tree.map(jnp.add, grads, penalty_grads)
        updates, state = tx.update(grads, state, adapters, **extra)
        found = (loss, penalty, skipped_updates(state), gradient_norm(grads))
        numbers = jnp.stack([x.astype(loss.dtype) for x in found])
        return MicroResult(optax.apply_updates(adapters, updates), state, numbers)

    return micro_step
