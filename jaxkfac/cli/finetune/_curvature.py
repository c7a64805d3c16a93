"""Curvature of the adapter: what is covered, spectra and capacity."""

import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac.cli.finetune._loop import TuneState
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import FinetuneProblem, objective_of
from jaxkfac.interception import leaves_by_path, selector
from jaxkfac.report import (
    CapacityReport,
    CoverageRow,
    SpectrumRecord,
    coverage_rows,
    spectrum_records,
)

PyTree = Any


class AdapterCurvature(NamedTuple):
    """Of the factors of one batch at the end of a run.

    Attributes:
        spectra: Eigenvalues of each factor of each slice.
        capacity: Metrics of the layers that were asked for.
    """

    spectra: list[SpectrumRecord]
    capacity: CapacityReport


def adapter_coverage(experiment: Finetuning, problem: FinetuneProblem) -> list[CoverageRow]:
    """Which of the trained parameters factors cover; nothing is computed."""
    objective = objective_of(experiment, problem, problem.params)
    table = jk.find_layers(objective, problem.adapters, problem.rows)
    sizes = {path: int(np.prod(x.shape)) for path, x in leaves_by_path(problem.adapters).items()}
    return coverage_rows(table, sizes)


def resolve_pattern(pattern: str, coverage: list[CoverageRow]) -> str:
    """The pattern, or for ``"auto"`` one of the adapter whose largest factor is smallest.

    Called before training, so that a pattern that matches nothing shows at once.

    Raises:
        UnknownLayerError: it matches no covered layer; the nearest names are said.
    """
    covered = [row for row in coverage if not row.reason]
    if pattern == "auto":
        sides: dict[str, int] = {}
        for row in covered:
            adapter = row.name.rpartition("/")[0]
            sides[adapter] = max(sides.get(adapter, 0), row.inputs or 0, row.outputs or 0)
        return re.escape(min(sides, key=lambda adapter: sides[adapter])) + "/[^/]*"
    selector(pattern, [row.name for row in covered])
    return pattern


def adapter_curvature(
    problem: FinetuneProblem, experiment: Finetuning, state: TuneState, pattern: str
) -> AdapterCurvature:
    """Factors of the adapter's layers that ``pattern`` names, on the first training batch.

    The Fisher is ``experiment.kfac.fisher``, and sides beyond ``max_dense`` are diagonals. Nothing
    is dropped.
    """
    devices = problem.devices

    @functools.partial(jax.jit, **devices.of_program())
    def collect(params: PyTree, adapters: PyTree, batch: Any, key: jax.Array) -> Any:
        collected = jk.value_grad_and_factors(
            objective_of(experiment, problem, params, drops=False),
            fisher=experiment.kfac.fisher,
            layers=pattern,
            uncovered="ignore",
            max_dense=experiment.kfac.max_dense,
        )
        exist = problem.family.exist(batch)
        return collected(adapters, batch, key=key, positions=exist).factors

    batch = problem.family.batch(problem.train.first())
    key = jax.random.key(experiment.seed)
    given = devices.whole(batch)
    factors = devices.processes.settled(collect(problem.params, state.adapters, given, key))
    bases = jk.eigendecompose(
        factors, max_condition=experiment.kfac.max_condition, placement="host", vectors=False
    )
    assert state.position is not None  # after an update
    metrics = jk.capacity_metrics(bases, num_examples=problem.learnt(state.position))
    return AdapterCurvature(spectrum_records(bases), CapacityReport(metrics))
