"""`jaxkfac analyze`: the spectra of the factors stored in a checkpoint."""

import dataclasses
import json
from typing import Any

import jax
from rich.console import Console

from jaxkfac.cli._checkpoint import Checkpoint, load_checkpoint, restore_state
from jaxkfac.cli._loop import total_updates
from jaxkfac.cli._options import (
    AdamwOptions,
    AnalyzeArguments,
    Experiment,
    KfacOptions,
    ModelOptions,
)
from jaxkfac.cli._problem import build_optimizer, digits_problem
from jaxkfac.cli._train import spectra_of
from jaxkfac.report import (
    RunRecords,
    SpectrumRecord,
    report_page,
    spectra_table,
    versions,
)


def run_analyze(arguments: AnalyzeArguments) -> None:
    """Decompose, print the table, and write the page if one is asked for."""
    checkpoint = load_checkpoint(arguments.checkpoint)
    records = checkpoint_spectra(checkpoint, arguments.max_condition)
    if arguments.report:
        page = report_page(
            title="Spectra of the factors",
            lead=f"After {checkpoint.step} updates of a vision transformer on handwritten digits.",
            runs={checkpoint.optimizer: RunRecords.from_plain(checkpoint.records)}
            if checkpoint.records["epochs"]
            else {},
            spectra=records,
            coverage=[],
            config=checkpoint.config,
            versions=versions(),
        )
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(page, encoding="utf-8")
    if arguments.json:
        plain = [record._asdict() for record in records]
        print(json.dumps({"step": checkpoint.step, "spectra": plain}, allow_nan=False))
        return
    console = Console()
    console.print(spectra_table(records))
    console.print(
        "condition: largest over smallest eigenvalue, – where the smallest is not positive; "
        "clipped: the same after clipping; effective rank: exp(entropy) of the spectrum",
        style="dim",
    )
    if arguments.report:
        console.print(f"report: {arguments.report}", soft_wrap=True, highlight=False)


def checkpoint_spectra(
    checkpoint: Checkpoint, max_condition: float | None = None
) -> list[SpectrumRecord]:
    """The spectra of a K-FAC checkpoint: the same numbers as at the end of its run.

    Raises:
        ValueError: the checkpoint holds no factors, or no update has been made yet.
    """
    if checkpoint.optimizer != "kfac":
        raise ValueError(
            f"this checkpoint is of {checkpoint.optimizer}, which keeps no factors; analyze the "
            "kfac folder beside it"
        )
    if checkpoint.step == 0:
        raise ValueError("this checkpoint is from before the first update: it holds no factors")
    experiment = experiment_from(checkpoint.config)
    problem = digits_problem(experiment)
    tx = build_optimizer("kfac", experiment, problem, total_updates(experiment, problem))
    template = jax.eval_shape(tx.init, problem.params)
    _, state = restore_state(checkpoint, problem.params, template, checkpoint.config)
    return spectra_of(state, experiment, max_condition)


def experiment_from(config: dict[str, Any]) -> Experiment:
    """The experiment that :func:`as_config` has written down."""
    parts = {"model": ModelOptions, "kfac": KfacOptions, "adamw": AdamwOptions}
    known = {field.name for field in dataclasses.fields(Experiment)}
    if unknown := config.keys() - known:
        raise ValueError(f"this checkpoint has options of another version: {sorted(unknown)}")
    return Experiment(
        **{name: parts[name](**x) if name in parts else x for name, x in config.items()}
    )
