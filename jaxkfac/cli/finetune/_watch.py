"""What is asked of a run while it goes on: evaluations, samples, numbers for loggers."""

from typing import Any

import jax
import numpy as np

from jaxkfac._text import number
from jaxkfac.cli._phases import phase
from jaxkfac.cli.finetune._exam import Examiner, fourier_record
from jaxkfac.cli.finetune._loggers import MetricLogger
from jaxkfac.cli.finetune._loop import TuneState
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.memory import bytes_text, resident_bytes
from jaxkfac.report import FinetuneRecords


class Watch:
    """Examines the states whose turn it is, and hands numbers to the logger."""

    def __init__(
        self, arguments: FinetuneArguments, examiner: Examiner, logger: MetricLogger, total: int
    ) -> None:
        self._arguments, self._examiner = arguments, examiner
        self._logger, self._total = logger, total

    def reads(self, step: int) -> bool:
        """Whether numbers are read after this update."""
        asked = self._arguments
        every = (asked.log_every, asked.checkpoint_every, asked.evaluate_every)
        return step == self._total or any(step % n == 0 for n in every if n is not None)

    def look(self, step: int, adapters: Any) -> Any:
        """The adapter's nonlinearity where it is its turn, on the device."""
        if step % self._arguments.diagnose_every and step != self._total:
            return None
        return self._examiner.nonlinearity(adapters)

    def note(self, records: FinetuneRecords, step: int) -> None:
        """Hand over the numbers of the updates after ``step``."""
        held = float(memory_in_use() or 0)
        for i in range(step, len(records.losses)):
            values = {
                "loss/train": records.losses[i],
                "loss/penalty": records.penalties[i],
                "learning_rate": records.learning_rates[i - len(records.losses)],
                "tokens_per_second": records.tokens[i] / records.seconds[i],
                "memory_bytes": held,
                "skipped": float(records.skipped),
            }
            if (norm := records.gradient_norms[i - len(records.losses)]) is not None:
                values["gradient_norm"] = norm
            self._logger.numbers(i + 1, values)
        for found in records.fourier:
            if found.step > step:
                self._note_fourier(found)

    @phase("examining")
    def examine(self, state: TuneState) -> TuneState:
        """Add what is due after this update, and not in the records of it yet."""
        step, records, asked = state.step, state.records, self._arguments
        end = step in (0, self._total)
        if step == 0 and not records.fourier:
            found = jax.device_get(self._examiner.nonlinearity(state.adapters))
            if found is not None:
                records = records._replace(fourier=[fourier_record(0, found)])
                self._note_fourier(records.fourier[0])
        due = end or (asked.evaluate_every and step % asked.evaluate_every == 0)
        if due and not any(exam.step == step for exam in records.exams):
            exam = self._examiner.exam(step, state.adapters)
            if exam is not None:
                records = records._replace(exams=[*records.exams, exam])
                found = {f"accuracy/{k}": ends[0] for k, ends in exam.accuracy.items()}
                if exam.loss is not None:
                    found["loss/validation"] = exam.loss
                found |= {f"generated/{name}": value for name, value in (exam.scores or {}).items()}
                self._logger.numbers(step, found)
        if due and asked.samples and not any(sample.step == step for sample in records.samples):
            samples = self._examiner.samples(step, state.adapters, count=asked.samples)
            records = records._replace(samples=[*records.samples, *samples])
            for number, sample in enumerate(samples):
                self._logger.text(step, f"sample/{number}", f"{sample.prompt} → {sample.answer}")
        return state._replace(records=records)

    def _note_fourier(self, found: Any) -> None:
        for layer, values in found.layers.items():
            names = ("sigma", "deviation", "nonlinearity", "saturated")
            means = {f"{name}/{layer}": float(np.mean(values[name])) for name in names}
            self._logger.numbers(found.step, means)


def words_of(records: FinetuneRecords) -> str:
    """How a run stands, in a line; empty before the first reading."""
    if not records.losses:
        return ""
    held = memory_in_use()
    memory = "" if held is None else f"  {bytes_text(held)}"
    speed = f"{records.tokens_per_second:,.0f} tokens/s{memory}"
    rate, norm = records.learning_rates[-1], records.gradient_norms[-1]
    return f"loss {records.losses[-1]:.4f}  rate {rate:.2g}  gradient {number(norm)}  {speed}"


def memory_in_use() -> int | None:
    """Bytes in use on the first device, or of main memory where devices do not count."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else resident_bytes()
