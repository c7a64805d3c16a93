"""Capacity of a checkpoint: of its factor averages, over batches, against another one."""

from collections.abc import Iterator

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac.cli._checkpoint import load_checkpoint
from jaxkfac.cli._options import AnalyzeArguments
from jaxkfac.cli._restored import Restored, restore
from jaxkfac.report import CapacityReport


def capacity_report(arguments: AnalyzeArguments, restored: Restored) -> CapacityReport:
    """The metrics, with intervals and a comparison if they are asked for.

    All are measured with the same number of examples, by default that of the training data
    of the analyzed checkpoint, and the same damping.
    """
    examples = arguments.num_examples
    if examples is None:
        examples = len(restored.problem.train.labels)

    def measure(source: Restored, factors: jk.Factors) -> jk.CapacityMetrics:
        bases = source.decompose(factors, arguments.max_condition)
        return jk.capacity_metrics(bases, num_examples=examples, damping=arguments.damping)

    report = CapacityReport(measure(restored, restored.factors))
    if arguments.batches:
        each = [measure(restored, factors) for factors in held_out(restored, arguments.batches)]
        size = len(restored.problem.test.labels) // arguments.batches
        words = f"{arguments.batches} batches of {size} held-out examples"
        report = report._replace(interval=jk.capacity_interval(each), batches=words)
    if arguments.compare is not None:
        checkpoint = load_checkpoint(arguments.compare)
        other = restore(checkpoint)
        report = report._replace(
            comparison=jk.compare_capacity(measure(other, other.factors), report.metrics),
            before=f"update {checkpoint.step}",
        )
    return report


def held_out(restored: Restored, batches: int) -> Iterator[jk.Factors]:
    """Factors of the parameters on as many equal batches of the held-out examples.

    Shuffled, without repetition; what does not fill a batch is left out.

    Raises:
        ValueError: there are fewer examples than batches.
    """
    data, seed = restored.problem.test, restored.experiment.seed
    size = len(data.labels) // batches
    if size == 0:
        raise ValueError(f"batches must be at most {len(data.labels)} (held-out examples)")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(data.labels))
    statistics, key = jax.jit(restored.problem.statistics), jax.random.key(seed)
    for i in range(batches):
        rows = order[i * size : (i + 1) * size]
        batch = (data.images[rows], data.labels[rows])
        yield statistics(restored.params, batch, key=jax.random.fold_in(key, i))[2]
