"""Work of a run between updates: evaluations, samples, and saving its best state."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import ArrayTree, with_leaves
from jaxkfac._text import number
from jaxkfac.files import Archive, write_archive
from jaxkfac.jobs.cli._checkpoint import flatten_state, remove_checkpoints
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._progress import phase, said_if_slow
from jaxkfac.jobs.cli.finetune._exam import Examiner, fourier_record
from jaxkfac.jobs.cli.finetune._loggers import MetricLogger
from jaxkfac.jobs.cli.finetune._loop import TuneState
from jaxkfac.jobs.cli.finetune._options import FinetuneArguments
from jaxkfac.jobs.cli.finetune._problem import FinetuneProblem
from jaxkfac.jobs.report import ExamRecord, FinetuneRecords, FourierRecord
from jaxkfac.memory import bytes_text, resident_bytes

# ---------------- the best state, kept on disk
#
# Its arrays lie next to the checkpoints, in a file named after its update; a copy in memory would
# be a second one of what is trained. The records say which update it is, so a run resumed from
# any checkpoint agrees with one that was not stopped.


_FORM = "jaxkfac.best"
_CHECKPOINTS = 3  # the two on disk, and one that may still be being written


class BestKept:
    """Keeps the trained parameters of the best evaluation so far.

    It is active where ``--evaluate-every`` is set and there are validation records. Evaluations
    count from the first update on.
    """

    def __init__(self, arguments: FinetuneArguments, problem: FinetuneProblem, folder: Path):
        self._problem, self._folder = problem, folder
        self._patience = arguments.patience
        self._is_active = arguments.evaluate_every is not None
        self._saved: list[int] = []

    def best(self, records: FinetuneRecords) -> ExamRecord | None:
        """The evaluation whose state is saved."""
        return records.best if self._is_active else None

    def stops(self, records: FinetuneRecords) -> bool:
        """Whether the last ``--patience`` evaluations were no better than an earlier one."""
        best = self.best(records)
        if self._patience is None or best is None:
            return False
        since = sum(exam.loss is not None and exam.step > best.step for exam in records.exams)
        return since >= self._patience

    def keep(self, state: TuneState) -> None:
        """Save the state if it is the best so far; every process calls this."""
        best = self.best(state.records)
        if best is None or best.step != state.step or self._file(best.step).exists():
            return
        first = self._problem.devices.processes.first
        leaves = flatten_state(state.adapters, (), keep=first)
        if first:
            with interrupts_deferred("writing the best state"):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_archive(
                    self._file(best.step),
                    _FORM,
                    {"step": best.step, "loss": best.loss},
                    leaves.items(),
                    what=f"the best state, of update {best.step}",
                    nbytes=sum(leaf.nbytes for leaf in leaves.values()),
                )

    def saved(self, records: FinetuneRecords) -> None:
        """Delete files that no remaining checkpoint needs, before a checkpoint is written."""
        best = self.best(records)
        self._saved = [*self._saved, 0 if best is None else best.step][-_CHECKPOINTS:]
        if len(self._saved) == _CHECKPOINTS and self._problem.devices.processes.first:
            for path in self._folder.glob("*"):
                if path.name.isdigit() and int(path.name) < min(self._saved):
                    path.unlink()

    def resumed(self, step: int) -> None:
        """Delete states saved after the update where the run resumes."""
        if self._problem.devices.processes.first:
            for path in self._folder.glob("*"):
                if path.name.isdigit() and int(path.name) > step:
                    path.unlink()

    def restored(self, state: TuneState) -> TuneState:
        """The state with the trained parameters of the best evaluation.

        Deletes the arrays that it replaces before it allocates others.

        Raises:
            FileNotFoundError: the file is missing.
            DamagedFileError: the file is damaged.
        """
        best = self.best(state.records)
        if best is None or best.step == state.step:
            return state
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.adapters)
        with Archive(self._file(best.step), _FORM, "best state") as stored:
            for array in jax.tree.leaves(state.adapters):
                array.delete()
            leaves = {name: jnp.asarray(stored.read(name)) for name in stored.names}
        adapters: Any = with_leaves({"params": shapes}, leaves)["params"]
        return state._replace(adapters=self._problem.devices.replicated(adapters))

    def _file(self, step: int) -> Path:
        return self._folder / str(step)


def best_folder(checkpoints: Path) -> Path:
    """Folder of the best state, next to the checkpoints."""
    return checkpoints / "best"


def remove_best(checkpoints: Path) -> None:
    """Delete the states that an earlier run saved."""
    remove_checkpoints(best_folder(checkpoints))


# ---------------- evaluations, samples and numbers for loggers


class Watch:
    """Evaluates states when they are due, and hands numbers to the logger."""

    def __init__(
        self, arguments: FinetuneArguments, examiner: Examiner, logger: MetricLogger, total: int
    ) -> None:
        self._arguments, self._examiner = arguments, examiner
        self._logger, self._total = logger, total

    def reads(self, step: int) -> bool:
        """Whether numbers are read after this update."""
        arguments = self._arguments
        every = (arguments.log_every, arguments.checkpoint_every, arguments.evaluate_every)
        return step == self._total or any(step % n == 0 for n in every if n is not None)

    def look(self, step: int, adapters: ArrayTree) -> Any:
        """Measure the adapter's nonlinearity if it is due, on the device."""
        if step % self._arguments.diagnose_every and step != self._total:
            return None
        return self._examiner.nonlinearity(adapters)

    def note(self, records: FinetuneRecords, step: int) -> None:
        """Log the numbers of the updates after ``step``."""
        bytes_in_use = float(memory_in_use() or 0)
        for i in range(step, len(records.losses)):
            values = {
                "loss/train": records.losses[i],
                "loss/penalty": records.penalties[i],
                "learning_rate": records.learning_rates[i - len(records.losses)],
                "tokens_per_second": records.tokens[i] / records.seconds[i],
                "memory_bytes": bytes_in_use,
                "skipped": float(records.skipped),
            }
            if (norm := records.gradient_norms[i - len(records.losses)]) is not None:
                values["gradient_norm"] = norm
            self._logger.numbers(i + 1, values)
        for fourier in records.fourier:
            if fourier.step > step:
                self._note_fourier(fourier)

    @phase("examining")
    def examine(self, state: TuneState) -> TuneState:
        """Add the evaluations that are due after this update and not yet in its records."""
        step, records, arguments = state.step, state.records, self._arguments
        end = step in (0, self._total)
        if step == 0 and not records.fourier:
            values = jax.device_get(self._examiner.nonlinearity(state.adapters))
            if values is not None:
                records = records._replace(fourier=[fourier_record(0, values)])
                self._note_fourier(records.fourier[0])
        due = end or (arguments.evaluate_every and step % arguments.evaluate_every == 0)
        quiet = not (due and step and self._examiner.problem.devices.processes.first)
        with said_if_slow(f"finetune: examining update {step}", quiet=quiet):
            return state._replace(records=self._examined(state, records) if due else records)

    def _examined(self, state: TuneState, records: FinetuneRecords) -> FinetuneRecords:
        """The records with the evaluation and the samples of this update."""
        step, arguments = state.step, self._arguments
        if not any(exam.step == step for exam in records.exams):
            exam = self._examiner.exam(step, state.adapters)
            if exam is not None:
                records = records._replace(exams=[*records.exams, exam])
                values = {f"accuracy/{k}": ends[0] for k, ends in exam.accuracy.items()}
                if exam.loss is not None:
                    values["loss/validation"] = exam.loss
                values |= {
                    f"generated/{name}": value for name, value in (exam.scores or {}).items()
                }
                self._logger.numbers(step, values)
        if arguments.samples and not any(sample.step == step for sample in records.samples):
            samples = self._examiner.samples(step, state.adapters, count=arguments.samples)
            records = records._replace(samples=[*records.samples, *samples])
            for number, sample in enumerate(samples):
                self._logger.text(step, f"sample/{number}", f"{sample.prompt} → {sample.answer}")
        return records

    def _note_fourier(self, record: FourierRecord) -> None:
        for layer, values in record.layers.items():
            names = ("sigma", "deviation", "nonlinearity", "saturated")
            means = {f"{name}/{layer}": float(np.mean(values[name])) for name in names}
            self._logger.numbers(record.step, means)


def words_of(records: FinetuneRecords) -> str:
    """A line about the progress of a run; empty before the first read."""
    if not records.losses:
        return ""
    bytes_in_use = memory_in_use()
    memory = "" if bytes_in_use is None else f"  {bytes_text(bytes_in_use)}"
    speed = f"{records.tokens_per_second:,.0f} tokens/s{memory}"
    rate, norm = records.learning_rates[-1], records.gradient_norms[-1]
    return f"loss {records.losses[-1]:.4f}  rate {rate:.2g}  gradient {number(norm)}  {speed}"


def memory_in_use() -> int | None:
    """Bytes in use on the first device, or in main memory where devices report none."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else resident_bytes()
