"""`jaxkfac analyze`: spectra and capacity of the factors stored in a checkpoint."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac.files import probe_folder, write_text
from jaxkfac.jobs.cli._checkpoint import Checkpoint, load_checkpoint, restore_state
from jaxkfac.jobs.cli._loop import total_updates
from jaxkfac.jobs.cli._options import AnalyzeArguments, Experiment
from jaxkfac.jobs.cli._problem import DigitsProblem, build_optimizer, digits_problem
from jaxkfac.jobs.cli._progress import phase, said_if_slow
from jaxkfac.jobs.cli._train import factor_average
from jaxkfac.jobs.report import (
    CapacityReport,
    RunRecords,
    SpectrumRecord,
    curvature_answer,
    print_capacity,
    print_curvature,
    report_page,
    spectra_table,
    spectrum_records,
    versions,
    write_factor_figures,
)

# ---------------- restoring a checkpoint: problem, parameters and factor averages


class Restored(NamedTuple):
    """The starting point of an analysis.

    Attributes:
        experiment: Options of the run.
        problem: Data, model and objective.
        params: Parameters at the checkpoint.
        factors: The running average of the factors.
    """

    experiment: Experiment
    problem: DigitsProblem
    params: ArrayTree
    factors: jk.Factors

    def decompose(self, factors: jk.Factors, max_condition: float | None) -> jk.Eigenbases:
        """Eigenvalues only, clipped at ``max_condition`` or as in the run."""
        kappa = self.experiment.kfac.max_condition if max_condition is None else max_condition
        return jk.eigendecompose(factors, max_condition=kappa, placement="host", vectors=False)


def restore(checkpoint: Checkpoint) -> Restored:
    """Rebuild the problem of a K-FAC checkpoint, with the stored values.

    Raises:
        ValueError: the checkpoint is of another command, holds no factors, or is from before the
            first update.
    """
    if "adapter" in checkpoint.config:
        raise ValueError(
            "this checkpoint was written by `jaxkfac finetune`: when the run has ended, give its "
            "output folder, whose adapter or model is analyzed"
        )
    if checkpoint.optimizer != "kfac":
        raise ValueError(
            f"this checkpoint was written by {checkpoint.optimizer}, which keeps no factors; "
            f"analyze the "
            "kfac folder beside it"
        )
    if checkpoint.step == 0:
        raise ValueError("this checkpoint is from before the first update: it holds no factors")
    experiment = experiment_from(checkpoint.config)
    problem = digits_problem(experiment)
    tx = build_optimizer("kfac", experiment, problem, total_updates(experiment, problem))
    template = jax.eval_shape(tx.init, problem.shapes)
    params, state = restore_state(checkpoint, problem.shapes, template, checkpoint.config)
    return Restored(experiment, problem, params, factor_average(state))


def experiment_from(config: dict[str, Any]) -> Experiment:
    """The experiment from a config written by :func:`as_config`."""
    default = Experiment()
    option_names = {field.name for field in dataclasses.fields(Experiment)}
    if unknown := config.keys() - option_names:
        raise ValueError(f"this checkpoint has options of another version: {sorted(unknown)}")
    return Experiment(
        **{
            name: dataclasses.replace(getattr(default, name), **x) if isinstance(x, dict) else x
            for name, x in config.items()
        }
    )


# ---------------- capacity of a checkpoint


def capacity_report(arguments: AnalyzeArguments, restored: Restored) -> CapacityReport:
    """The metrics, with intervals and a comparison if requested.

    All use the same number of examples, by default that of the analyzed checkpoint's training data,
    and the same damping.
    """
    examples = arguments.num_examples
    if examples is None:
        examples = len(restored.problem.train.labels)

    def measure(source: Restored, factors: jk.Factors) -> jk.CapacityMetrics:
        bases = source.decompose(factors, arguments.max_condition)
        return jk.capacity_metrics(bases, num_examples=examples, damping=arguments.damping)

    report = CapacityReport(measure(restored, restored.factors))
    if arguments.batches:
        batch_metrics = [
            measure(restored, factors) for factors in held_out(restored, arguments.batches)
        ]
        size = len(restored.problem.test.labels) // arguments.batches
        description = f"{arguments.batches} batches of {size} test examples"
        report = report._replace(interval=jk.capacity_interval(batch_metrics), batches=description)
    if arguments.compare is not None:
        checkpoint = load_checkpoint(arguments.compare)
        reference = restore(checkpoint)
        report = report._replace(
            comparison=jk.compare_capacity(measure(reference, reference.factors), report.metrics),
            before=f"update {checkpoint.step}",
        )
    return report


def held_out(restored: Restored, batches: int) -> Iterator[jk.Factors]:
    """Factors of the parameters on each of ``batches`` equal batches of the test examples.

    Examples are shuffled, without repetition; those that do not fill a batch are left out.

    Raises:
        ValueError: there are fewer examples than batches.
    """
    data, seed = restored.problem.test, restored.experiment.seed
    size = len(data.labels) // batches
    if size == 0:
        raise ValueError(f"batches must be at most {len(data.labels)} (test examples)")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(data.labels))
    statistics, key = jax.jit(restored.problem.statistics), jax.random.key(seed)
    for i in range(batches):
        rows = order[i * size : (i + 1) * size]
        batch = (data.images[rows], data.labels[rows])
        yield statistics(restored.params, batch, key=jax.random.fold_in(key, i))[2]


# ---------------- the command


def run_analyze(arguments: AnalyzeArguments) -> None:
    """Decompose, print the tables or JSON, and write the requested page and figures."""
    if arguments.is_pretrained:
        from jaxkfac.jobs.cli.analysis._run import run_analysis

        return run_analysis(arguments)
    _check_options(arguments)
    for folder in (arguments.figures, arguments.report and arguments.report.parent):
        if folder:
            probe_folder(folder)
    with phase("loading the checkpoint"), said_if_slow("analyze: loading the checkpoint"):
        checkpoint = load_checkpoint(arguments.checkpoint)
        restored = restore(checkpoint)
    with phase("decomposing the factors"):
        spectra = spectrum_records(restored.decompose(restored.factors, arguments.max_condition))
    with phase("measuring capacity"), said_if_slow("analyze: measuring capacity"):
        capacity = capacity_report(arguments, restored)
    if arguments.report:
        _write_page(arguments.report, checkpoint, spectra, capacity)
    if arguments.figures:
        write_factor_figures(arguments.figures, spectra)
    if arguments.json:
        plain = [record._asdict() for record in spectra]
        result = {"step": checkpoint.step, "spectra": plain, **capacity.to_dict()}
        print(json.dumps(result, allow_nan=False))
        return
    console = Console()
    print_curvature(console, spectra, capacity)
    if arguments.tables:
        console.print(spectra_table(spectra))
        print_capacity(console, capacity)
    for name, written in (("report", arguments.report), ("figures", arguments.figures)):
        if written:
            console.print(f"{name}: {written}", soft_wrap=True, highlight=False)


def _check_options(arguments: AnalyzeArguments) -> None:
    """Refuse options for pretrained models; a mistyped path looks like a checkpoint."""
    default = AnalyzeArguments(arguments.checkpoint)
    names = ("model", "plan", "device_bytes", "output", "resume", "overwrite", "strict",
             "checkpoint_every", "keep_factors")  # fmt: skip
    for name in names:
        if getattr(arguments, name) != getattr(default, name):
            named_options = (
                "options such as --texts are"
                if name == "model"
                else f"--{name.replace('_', '-')} is"
            )
            raise ValueError(
                f"{named_options} for a pretrained model, and {arguments.checkpoint} is none: "
                "expected a folder with config.json, a .gguf file or smollm2"
            )


def _write_page(
    path: Path, checkpoint: Checkpoint, spectra: Sequence[SpectrumRecord], capacity: CapacityReport
) -> None:
    page = report_page(
        title="Spectra and capacity of the factors",
        lead=f"After {checkpoint.step} updates of a vision transformer on handwritten digits.",
        runs={checkpoint.optimizer: RunRecords.from_plain(checkpoint.records)}
        if checkpoint.records["epochs"]
        else {},
        spectra=spectra,
        capacity=capacity,
        config=checkpoint.config,
        versions=versions(),
        answer=curvature_answer(spectra, capacity),
        runs_last=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page, "the report")
