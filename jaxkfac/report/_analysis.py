"""What the analysis of a pretrained model measures, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkfac._text import number
from jaxkfac.memory import Stage
from jaxkfac.report._capacity import CapacityReport
from jaxkfac.report._coverage import CoverageRow
from jaxkfac.report._spectra import SpectrumRecord


class MemoryRow(NamedTuple):
    """Bytes that a stage of an analysis needs.

    Attributes:
        stage: In which; ``"always"`` in each.
        what: What they are for.
        nbytes: How many.
        on_device: Whether they are the device's; on a CPU all are.
    """

    stage: str
    what: str
    nbytes: int
    on_device: bool = True


class ModelMemory(NamedTuple):
    """Plan and peaks of one model's analysis.

    Attributes:
        model: What it is called.
        plan: Of the memory, as it was printed beforehand.
        peaks: ``{stage: most bytes of main memory}``, measured.
        passes: Backward passes over each batch.
        disk: Planned bytes of the disk.
    """

    model: str
    plan: Sequence[MemoryRow]
    peaks: Mapping[str, int]
    passes: int
    disk: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [row._asdict() for row in self.plan]
        return self._asdict() | {"plan": rows, "peaks": dict(self.peaks)}


class AnalysisRecord(NamedTuple):
    """An analysis of a pretrained model.

    Attributes:
        model: What it is called.
        texts: ``{"texts", "tokens" in the loss, "left out", "loss" in nats a token}``.
        spectra: Of every factor that was decomposed.
        capacity: Metrics, perhaps beside those of another model.
        exact: ``{"eigenvalues", "error_bounds", "steps"}`` of the exact Fisher, or ``None``.
        plans: Of its memory, with peaks; behind it those of the model it is compared with.
        coverage: Which parameters factors cover.
        config: Everything that decided the result.
        versions: Of the software.
        stages: Times and peaks of this process.
        host_memory: ``{"resident": bytes at the end, "peak": bytes}`` of main memory.
    """

    model: str
    texts: Mapping[str, float]
    spectra: Sequence[SpectrumRecord]
    capacity: CapacityReport
    exact: Mapping[str, Any] | None
    plans: Sequence[ModelMemory]
    coverage: Sequence[CoverageRow]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    stages: Stage
    host_memory: Mapping[str, int | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first, *compared = self.plans
        own = {name: x for name, x in first.to_dict().items() if name != "model"}
        return {
            "model": self.model,
            "texts": dict(self.texts),
            "spectra": [record._asdict() for record in self.spectra],
            **self.capacity.to_dict(),
            "exact": self.exact,
            **own,
            "compared": compared[0].to_dict() if compared else None,
            "coverage": [row._asdict() for row in self.coverage],
            "config": dict(self.config),
            "versions": dict(self.versions),
            "host_memory": dict(self.host_memory),
            "memory": self.stages.to_dict(),
        }


def stage_sums(plan: Sequence[MemoryRow], *, on_device: bool) -> dict[str, int]:
    """``{stage: bytes}`` of a plan, with what is always there in each."""
    stages = [name for row in plan for name in row.stage.split(", ") if name != "always"]
    return {
        stage: sum(
            row.nbytes
            for row in plan
            if row.on_device == on_device and (row.stage == "always" or stage in row.stage)
        )
        for stage in dict.fromkeys(stages)
    }


def exact_lines(record: AnalysisRecord) -> list[str]:
    """Sentences on the eigenvalues of the exact Fisher; none where it was left out."""
    if record.exact is None:
        return []
    pairs = zip(record.exact["eigenvalues"], record.exact["error_bounds"], strict=True)
    found = ", ".join(f"{number(value)} ± {number(bound)}" for value, bound in pairs)
    largest = record.capacity.metrics.model.scalars()["largest"]
    return [
        f"Exact Fisher on the first texts, after {record.exact['steps']} steps of Lanczos: "
        f"largest eigenvalues {found}.",
        f"Largest of the Kronecker factors over all texts: {number(largest)}.",
    ]
