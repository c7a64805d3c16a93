"""The loop of a fine-tuning run: update by update, each a pure function of the state.

An update reads the batches behind the position of the one before, so a run that was stopped and
resumed gives the same bits as one that was not. Its numbers stay on the device until those of many
updates are read at once.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac.cli._loop import NonFiniteLossError, finite_or_none
from jaxkfac.cli._run_state import is_whole
from jaxkfac.cli.finetune._exam import fourier_record
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import FinetuneProblem, learning_rate, micro_batches
from jaxkfac.cli.finetune._step import MicroStep, PreparedStep, empty_history, prepare, write
from jaxkfac.data.stream import Position
from jaxkfac.report import FinetuneRecords

PyTree = Any


class TuneState(NamedTuple):
    """What one update hands to the next.

    Attributes:
        adapters: Trained so far.
        optimizer: State.
        step: Updates made.
        records: They only grow, whenever numbers are read.
        position: In the data, where the next update begins; ``None`` is the beginning.
    """

    adapters: PyTree
    optimizer: PyTree
    step: int
    records: FinetuneRecords
    position: Position | None = None


class _Unread(NamedTuple):
    """An update whose numbers are on the device.

    Attributes:
        given: Its micro-batches' counts.
        numbers: Of its last micro-batch: they are there when the update has ended.
        look: What was asked about the adapters after it, or ``None``.
    """

    given: list[PreparedStep]
    numbers: jax.Array
    look: Any


class Tuning:
    """A run of updates between readings.

    The state is donated to every micro-batch, so there is one of it: the newest. The next batch
    is built and sent while the device works, and the host runs no more than one update ahead of
    it, so that it need not wait longer than that when it is stopped.

    Attributes:
        state: After the last update; its records go as far as the last reading.
        seconds: Of each update of this session that has ended, without compilation.
    """

    def __init__(
        self,
        experiment: Finetuning,
        problem: FinetuneProblem,
        tx: Any,
        state: TuneState,
        *,
        total: int,
        unread: int,
        look: Callable[[int, PyTree], Any],
    ) -> None:
        """Begin at ``state``.

        Args:
            experiment: What was asked for.
            problem: What is trained.
            tx: The optimizer.
            state: Where the run begins; its arrays are donated.
            total: Updates of the run.
            unread: Most updates between two readings.
            look: ``look(step, adapters)`` after each update; what it returns, but ``None``, is
                read with the losses and becomes a ``FourierRecord``.
        """
        self.state = state
        self.seconds: list[float] = []
        self._first = state.step
        self._experiment, self._problem, self._look = experiment, problem, look
        self._micro_step = MicroStep(problem, experiment, tx)
        self._rate = learning_rate(experiment, total)
        self._compiled_before = state.records.compile_seconds, state.records.programs
        history = empty_history(unread * experiment.gradient_accumulation_steps)
        self._history = problem.devices.whole(history)
        self._last = micro_batches(experiment, problem, total - 1).stop - 1
        self._unread: list[_Unread] = []
        self._ahead: PreparedStep | None = None
        self._batches = problem.train.iterate(state.position)
        self._clock = 0.0

    @property
    def whole(self) -> bool:
        """Whether the state is there, and all of its records or their numbers with it."""
        state = self.state
        counted = len(state.records.losses) + len(self._unread) == state.step
        return counted and is_whole(state.adapters, state.optimizer)

    def update(self) -> None:
        """Start the next update, and wait until the one before it has ended."""
        adapters, optimizer, step, *_ = self.state
        if not self._unread:
            self._clock = time.perf_counter()
        compiled, given = self._micro_step.compile_seconds, []
        row = sum(len(update.given) for update in self._unread)
        for number in micro_batches(self._experiment, self._problem, step):
            micro = self._ahead if self._ahead is not None else self._prepared(number)
            adapters, optimizer, numbers = self._micro_step(adapters, optimizer, micro)
            self._history = write(self._history, numbers, jnp.asarray(row + len(given)))
            given.append(micro._replace(batch=None))
            self._ahead = None if number == self._last else self._prepared(number + 1)
        self._clock += self._micro_step.compile_seconds - compiled
        look = self._look(step + 1, adapters)
        self.state = self.state._replace(
            adapters=adapters,
            optimizer=optimizer,
            step=step + 1,
            position=given[-1].position,
        )
        self._unread.append(_Unread(given, numbers, look))
        self._wait(ahead=1)

    def read(self) -> None:
        """Add the numbers of all updates since the last reading to the records, at once.

        Raises:
            NonFiniteLossError: naming the first update whose loss was not finite.
        """
        if not self._unread:
            return
        self._wait(ahead=0)
        first = self.state.step - len(self._unread)
        rates = self._rate(jnp.arange(first, self.state.step))
        asked = (self._history, rates, [update.look for update in self._unread])
        history, rates, looks = jax.device_get(asked)
        losses, penalties, norms, row = [], [], [], 0
        for i, update in enumerate(self._unread):
            rows = history[row : row + len(update.given)].tolist()
            row += len(rows)
            learnt = sum(x.learnt for x in update.given)
            loss = sum(x[0] * y.learnt for x, y in zip(rows, update.given)) / max(learnt, 1)
            penalty = sum(x[1] / len(rows) for x in rows)
            if not (math.isfinite(loss) and math.isfinite(penalty)):
                raise NonFiniteLossError(_explain(self._experiment, first + i, loss))
            losses.append(loss)
            penalties.append(penalty)
            norms.append(sum(x[3] for x in rows) / len(rows))
        found = [fourier_record(first + i + 1, x) for i, x in enumerate(looks) if x is not None]

        def counted(name: str) -> list[int]:
            return [sum(getattr(x, name) for x in update.given) for update in self._unread]

        records, step = self.state.records, self._micro_step
        records = records._replace(
            losses=[*records.losses, *losses],
            penalties=[*records.penalties, *penalties],
            tokens=[*records.tokens, *counted("tokens")],
            learnt=[*records.learnt, *counted("learnt")],
            examples=[*records.examples, *counted("examples")],
            seconds=[*records.seconds, *self.seconds[-len(self._unread) :]],
            fourier=[*records.fourier, *found],
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
        """Until all but the newest ``ahead`` updates have ended; waiting reads nothing."""
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
