"""The state of the least held-out loss, kept on the disk while a run goes on.

Its arrays lie beside the checkpoints, in a file named after its update: a copy in memory would be a
second one of what is trained. Which update it is follows from the records, so that a run that is
resumed, from whichever checkpoint, agrees with one that was not stopped.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.cli._checkpoint import remove_checkpoints
from jaxkfac.cli._interrupts import interrupts_deferred
from jaxkfac.cli._run_state import flatten_state
from jaxkfac.cli.finetune._loop import TuneState
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.cli.finetune._problem import FinetuneProblem
from jaxkfac.files import Archive, write_archive
from jaxkfac.interception import with_leaves
from jaxkfac.report import ExamRecord, FinetuneRecords

_FORM = "jaxkfac.best"
_CHECKPOINTS = 3  # the two that are kept, and the one that may not be on the disk yet


class BestKept:
    """What is trained, as it was at the best evaluation so far.

    Evaluations count from the first update on, where ``--evaluate-every`` asks for them and there
    are records to validate with.
    """

    def __init__(self, arguments: FinetuneArguments, problem: FinetuneProblem, folder: Path):
        self._problem, self._folder = problem, folder
        self._patience = arguments.patience
        self._asked = arguments.evaluate_every is not None
        self._saved: list[int] = []

    def best(self, records: FinetuneRecords) -> ExamRecord | None:
        """The evaluation whose state is kept."""
        return records.best if self._asked else None

    def stops(self, records: FinetuneRecords) -> bool:
        """Whether the last ``--patience`` evaluations were no better than one before them."""
        best = self.best(records)
        if self._patience is None or best is None:
            return False
        since = sum(exam.loss is not None and exam.step > best.step for exam in records.exams)
        return since >= self._patience

    def keep(self, state: TuneState) -> None:
        """Write the state down if it is the best one; every process calls."""
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
        """A checkpoint is about to be written: files that none of those kept needs can go."""
        best = self.best(records)
        self._saved = [*self._saved, 0 if best is None else best.step][-_CHECKPOINTS:]
        if len(self._saved) == _CHECKPOINTS and self._problem.devices.processes.first:
            for path in self._folder.glob("*"):
                if path.name.isdigit() and int(path.name) < min(self._saved):
                    path.unlink()

    def resumed(self, step: int) -> None:
        """Forget what was kept after the update where the run goes on."""
        if self._problem.devices.processes.first:
            for path in self._folder.glob("*"):
                if path.name.isdigit() and int(path.name) > step:
                    path.unlink()

    def restored(self, state: TuneState) -> TuneState:
        """The state with what was trained as it was at the best evaluation.

        The arrays that are replaced are deleted, before others take memory.

        Raises:
            FileNotFoundError: the file is gone.
            DamagedFileError: it is not what was written.
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
        return state._replace(adapters=self._problem.devices.whole(adapters))

    def _file(self, step: int) -> Path:
        return self._folder / str(step)


def best_folder(checkpoints: Path) -> Path:
    """Beside the checkpoints."""
    return checkpoints / "best"


def remove_best(checkpoints: Path) -> None:
    """Delete what an earlier run has kept."""
    remove_checkpoints(best_folder(checkpoints))
