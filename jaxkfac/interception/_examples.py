"""Uses whose rows no longer run along the examples: their statistics would be wrong."""

from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._axes import AxisTable
from jaxkfac.interception._rows import own_axes
from jaxkfac.interception._values import Data, Finding, Use


def split_lost(analysis: Analysis) -> tuple[list[Use], list[Finding]]:
    """The uses that keep their examples, and a finding for each that does not.

    A scale multiplied by a batch statistic (BatchNorm in training), or a weight multiplied
    by a mean over the batch, receives a cotangent that is already summed over examples; its
    square is nobody's statistic. The example axis is the first axis of the first output, or
    for a scalar loss the first axis of any data argument.
    """
    table, first = analysis.table, analysis.outputs[0]
    leading = [first.axes] if isinstance(first, Data) and first.axes else analysis.data_axes
    examples = {a for axes in leading if axes for a in table.atoms(axes[0])}
    uses = analysis.plan.all_uses()
    if not examples:  # a single example: nothing can be lost
        return uses, []
    kept, findings = [], []
    for use in uses:
        if use.data is None or _runs_along(table, use, examples):
            kept.append(use)
        else:
            reason = f"has the example axis lost at `{use.eqn.primitive.name}`"
            findings.append(Finding(use.view.path, reason, fatal=True))
    return kept, findings


def _runs_along(table: AxisTable, use: Use, examples: set[int]) -> bool:
    mine = own_axes(use)
    atoms = [a for d, axis in enumerate(use.rows) if d not in mine for a in table.atoms(axis)]
    return any(a in examples or "derived" in table.kinds(a) for a in atoms)
