"""The training loop of a fine-tuning run, update by update.

Each update is a pure function of the state and reads the batches that follow the previous update's
position in the data. A run that was stopped and resumed therefore gives the same bits as an
uninterrupted one. Losses stay on the device until those of many updates are read at once.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac.jobs.cli._checkpoint import is_whole
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._loop import (
    NonFiniteLossError,
    finite_or_none,
    gradient_norm,
    skipped_updates,
)
from jaxkfac.jobs.cli._progress import phase, said_if_slow
from jaxkfac.jobs.cli.finetune._exam import fourier_record
from jaxkfac.jobs.cli.finetune._family import check_ids
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.cli.finetune._problem import (
    FinetuneProblem,
    collector,
    learning_rate,
    micro_batches,
    objective_of,
)
from jaxkfac.jobs.data.stream import BatchStream, Position
from jaxkfac.jobs.report import FinetuneRecords

# ---------------- one micro-batch as one compiled program


_LABELS, _DROPOUT = 0, 1  # folded into the run's key, so that labels and dropout get other bits


class PreparedStep(NamedTuple):
    """A micro-batch on the device, with the counts that the host needs.

    Attributes:
        number: Number of the micro-batch in the run.
        position: Position in the data after it.
        batch: ``(inputs, targets, mask)``.
        tokens: Tokens read, without padding.
        learnt: Tokens in the loss.
        examples: Examples in all rows.
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
    """Build the next micro-batch and start its transfer, without waiting for it.

    Raises:
        ValueError: the batch has ids that the model does not have.
    """
    batch, position = next(batches)
    if isinstance(problem.train, BatchStream):  # batches in memory were checked when built
        check_ids(batch.largest_id, problem.vocabulary)
    counts = batch.num_tokens, batch.num_terms, batch.num_examples
    arrays = problem.family.batch(batch, np.asarray)
    return PreparedStep(number, position, problem.devices.put_batch(arrays), *counts)


class MicroResult(NamedTuple):
    """State and numbers after a micro-batch.

    Attributes:
        adapters: The adapters; only the last micro-batch of an update changes them.
        optimizer: The optimizer state.
        numbers: Loss before the update (mean over the learned tokens), weighted regularizer before
            the update, number of skips so far, and norm of the gradient including the
            regularizer's.
    """

    adapters: ArrayTree
    optimizer: ArrayTree
    numbers: jax.Array


def empty_history(rows: int) -> jax.Array:
    """Zeros for the numbers of ``rows`` micro-batches."""
    return jnp.zeros((rows, 4))


@functools.partial(jax.jit, donate_argnums=0)
def write(history: jax.Array, numbers: jax.Array, row: jax.Array) -> jax.Array:
    """Write one row; kept out of the step because the history's size would change its bits."""
    return history.at[row].set(numbers.astype(history.dtype))


class MicroStep:
    """Callable ``step(adapters, optimizer, prepared)``, compiled once for each shape of a batch.

    The step donates its first two arguments and returns its results in their memory.

    Attributes:
        compile_seconds: Seconds spent compiling so far.
        programs: Number of programs compiled so far.
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

    def __call__(
        self, adapters: ArrayTree, optimizer: ArrayTree, prepared: PreparedStep
    ) -> MicroResult:
        """Process one micro-batch."""
        number = self._devices.replicated(jnp.asarray(prepared.number, jnp.int32))
        arguments = (self._params, adapters, optimizer, prepared.batch, number)
        return self._devices.processes.settled(self.program(*arguments)(*arguments))

    def program(self, *arguments: Any) -> Any:
        """The compiled program for these arguments: the parameters, then those of a call."""
        shape = tuple(x.shape for x in jax.tree.leaves(arguments[3]))
        if shape not in self._compiled:
            jax.block_until_ready(arguments)  # keeps earlier work out of the compile time
            started = time.perf_counter()
            # Interrupting a trace can crash the process when it exits.
            # The progress display announces the first program.
            quiet = not self.programs or not self._devices.processes.first
            doing = "finetune: compiling for rows of another length"
            with (
                said_if_slow(doing, quiet=quiet),
                interrupts_deferred("compiling"),
                phase("compiling"),
                self._devices.set(),
            ):
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

    def penalty_of(adapters: ArrayTree) -> jax.Array:
        assert config is not None
        return weight * jk.lslora.regulariser(adapters, config.nonlinearity)

    def micro_step(
        params: ArrayTree,
        adapters: ArrayTree,
        state: ArrayTree,
        batch: ArrayTree,
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
        measured = (loss, penalty, skipped_updates(state), gradient_norm(grads))
        numbers = jnp.stack([x.astype(loss.dtype) for x in measured])
        return MicroResult(optax.apply_updates(adapters, updates), state, numbers)

    return micro_step


# ---------------- a run, update by update


class TuneState(NamedTuple):
    """State of a run between updates.

    Attributes:
        adapters: The adapters trained so far.
        optimizer: The optimizer state.
        step: Number of updates made.
        records: Records of the run; they grow whenever numbers are read.
        position: Position in the data of the next update; ``None`` is the beginning.
    """

    adapters: ArrayTree
    optimizer: ArrayTree
    step: int
    records: FinetuneRecords
    position: Position | None = None


class _Unread(NamedTuple):
    """An update whose numbers are still on the device.

    Attributes:
        micro_batches: The update's micro-batches, without their arrays.
        numbers: Numbers of its last micro-batch; ready when the update has ended.
        look: Result of ``look`` on the adapters after the update, or ``None``.
    """

    micro_batches: list[PreparedStep]
    numbers: jax.Array
    look: Any


class Tuning:
    """Runs updates and reads their numbers from time to time.

    Every micro-batch donates the state, so only the newest exists. The host builds and sends the
    next batch while the device works, and runs at most one update ahead, so a stop never waits
    longer than one update.

    Attributes:
        state: State after the last update; its records end at the last read.
        seconds: Seconds of each finished update of this session, without compilation.
    """

    def __init__(
        self,
        experiment: Finetuning,
        problem: FinetuneProblem,
        tx: optax.GradientTransformationExtraArgs,
        state: TuneState,
        *,
        total: int,
        unread: int,
        look: Callable[[int, ArrayTree], Any],
    ) -> None:
        """Start at ``state``.

        Args:
            experiment: Options of the run.
            problem: The problem to train.
            tx: The optimizer.
            state: The initial state; its arrays are donated.
            total: Number of updates of the run.
            unread: Largest number of updates between two reads.
            look: ``look(step, adapters)``, called after each update; a result other than ``None``
                is read together with the losses and becomes a ``FourierRecord``.
        """
        self.state = state
        self.seconds: list[float] = []
        self._first = state.step
        self._experiment, self._problem, self._look = experiment, problem, look
        self._micro_step = MicroStep(problem, experiment, tx)
        self._rate = learning_rate(experiment, total)
        self._compiled_before = state.records.compile_seconds, state.records.programs
        history = empty_history(unread * experiment.gradient_accumulation_steps)
        self._history = problem.devices.replicated(history)
        self._last = micro_batches(experiment, problem, total - 1).stop - 1
        self._unread: list[_Unread] = []
        self._ahead: PreparedStep | None = None
        self._batches = problem.train.iterate(state.position)
        self._clock = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the state exists, with all its records or the numbers they are made from."""
        state = self.state
        counted = len(state.records.losses) + len(self._unread) == state.step
        return counted and is_whole(state.adapters, state.optimizer)

    def update(self) -> None:
        """Start the next update, and wait until the one before it has ended."""
        adapters, optimizer, step, *_ = self.state
        if not self._unread:
            self._clock = time.perf_counter()
        compiled, prepared = self._micro_step.compile_seconds, []
        row = sum(len(update.micro_batches) for update in self._unread)
        for number in micro_batches(self._experiment, self._problem, step):
            micro = self._ahead if self._ahead is not None else self._prepared(number)
            adapters, optimizer, numbers = self._micro_step(adapters, optimizer, micro)
            self._history = write(self._history, numbers, jnp.asarray(row + len(prepared)))
            prepared.append(micro._replace(batch=None))
            self._ahead = None if number == self._last else self._prepared(number + 1)
        self._clock += self._micro_step.compile_seconds - compiled
        look = self._look(step + 1, adapters)
        self.state = self.state._replace(
            adapters=adapters,
            optimizer=optimizer,
            step=step + 1,
            position=prepared[-1].position,
        )
        self._unread.append(_Unread(prepared, numbers, look))
        self._wait(ahead=1)

    def read(self) -> None:
        """Read the numbers of all updates since the last read and add them to the records.

        Raises:
            NonFiniteLossError: naming the first update whose loss was not finite.
        """
        if not self._unread:
            return
        self._wait(ahead=0)
        first = self.state.step - len(self._unread)
        rates = self._rate(jnp.arange(first, self.state.step))
        on_device = (self._history, rates, [update.look for update in self._unread])
        history, rates, looks = jax.device_get(on_device)
        losses, penalties, norms, row = [], [], [], 0
        for i, update in enumerate(self._unread):
            rows = history[row : row + len(update.micro_batches)].tolist()
            row += len(rows)
            learnt = sum(x.learnt for x in update.micro_batches)
            loss = sum(x[0] * y.learnt for x, y in zip(rows, update.micro_batches)) / max(learnt, 1)
            penalty = sum(x[1] / len(rows) for x in rows)
            if not (math.isfinite(loss) and math.isfinite(penalty)):
                raise NonFiniteLossError(_explain(self._experiment, first + i, loss))
            losses.append(loss)
            penalties.append(penalty)
            norms.append(sum(x[3] for x in rows) / len(rows))
        fourier_records = [
            fourier_record(first + i + 1, x) for i, x in enumerate(looks) if x is not None
        ]

        def counted(name: str) -> list[int]:
            return [sum(getattr(x, name) for x in update.micro_batches) for update in self._unread]

        records, step = self.state.records, self._micro_step
        records = records._replace(
            losses=[*records.losses, *losses],
            penalties=[*records.penalties, *penalties],
            tokens=[*records.tokens, *counted("tokens")],
            learnt=[*records.learnt, *counted("learnt")],
            examples=[*records.examples, *counted("examples")],
            seconds=[*records.seconds, *self.seconds[-len(self._unread) :]],
            fourier=[*records.fourier, *fourier_records],
            compile_seconds=self._compiled_before[0] + step.compile_seconds,
            programs=self._compiled_before[1] + step.programs,
            skipped=int(history[row - 1][2]),
            gradient_norms=[*records.gradient_norms, *finite_or_none(norms)],
            learning_rates=[*records.learning_rates, *rates.tolist()],
        )
        self.state, self._unread = self.state._replace(records=records), []

    def _prepared(self, number: int) -> PreparedStep:
        return prepare(self._problem, number, self._batches)

    def _wait(self, *, ahead: int) -> None:
        """Wait for all but the newest ``ahead`` updates to end, without reading anything."""
        read = self.state.step - self._first - len(self._unread)
        for update in self._unread[len(self.seconds) - read : len(self._unread) - ahead]:
            jax.block_until_ready(update.numbers)
            now = time.perf_counter()
            self.seconds.append(now - self._clock)
            self._clock = now


def _explain(experiment: Finetuning, step: int, loss: float) -> str:
    name = experiment.optimizer
    rate = getattr(experiment, name).learning_rate
    return (
        f"the loss of {name} is {loss} at step {step}; the last checkpoint is from before. "
        f"Try --{name}.learning-rate {rate / 3:.2g}"
        + (f" or --kfac.damping {experiment.kfac.damping * 10:.2g}" if name == "kfac" else "")
    )
