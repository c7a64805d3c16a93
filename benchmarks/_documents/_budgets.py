"""The documents' two budgets beside what ``jaxkfac plan`` says of the same training."""

import functools
import json
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks._documents._bytes import GB


class Budget(NamedTuple):
    """A table of a document.

    Attributes:
        title: Of what.
        words: Of ``jaxkfac plan``.
        option: The column of the plan: as it stands, or with this option.
        claimed: ``{row of the plan: GB in the document}``; other rows it forgot.
        extra: ``{row that is in no plan: GB}``.
        remark: What the difference comes from.
    """

    title: str
    words: tuple[str, ...]
    option: str | None
    claimed: dict[str, float]
    extra: dict[str, float]
    remark: str


KFAC_7B = Budget(
    "K-FAC analysis of a 7B model, 80 GB",
    (
        *("--preset", "llama-7b", "--batch", "1", "--tokens", "2048", "--dtype", "bfloat16"),
        *("--curvature", "analyze", "--device-bytes", "80e9"),
    ),
    None,
    {"parameters": 14, "optimizer": 28, "factors": 30, "activations": 10},
    {"retained graph": 5},
    "The document's row of activations and gradients is one; the plan has a row for each.",
)
T5_XL = Budget(
    "FLAN-T5-XL, 8 examples times 16 accumulated steps, bfloat16, recomputation, 32 GB",
    (
        *("--preset", "t5-xl", "--batch", "8", "--tokens", "256", "--dtype", "bfloat16"),
        *("--gradient-accumulation-steps", "16", "--curvature", "none", "--device-bytes", "32e9"),
    ),
    "remat",
    {"parameters": 6, "optimizer": 6, "gradients": 6, "activations": 8},
    {"overhead": 2},
    "The column “remat” of the plan. The document has no row for accumulated gradients: PyTorch "
    "adds them up in the gradients themselves, and jk.multi_steps in float32 unless "
    "accumulator_dtype says otherwise.",
)
BUDGETS = (KFAC_7B, T5_XL)


@functools.cache
def plan(words: tuple[str, ...]) -> dict[str, Any]:
    """What ``jaxkfac plan`` prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxkfac", "plan", *words, "--json"], capture_output=True, text=True
    )
    if not done.stdout:
        raise RuntimeError(f"jaxkfac plan {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def compared(budget: Budget) -> dict[str, Any]:
    """Rows of both, in GB; ``None`` where one has no such row."""
    planned = _rows(budget)
    names = [*planned, *budget.extra]
    rows = [
        (
            name,
            {**budget.claimed, **budget.extra}.get(name),
            planned[name] / GB if name in planned else None,
        )
        for name in names
        if planned.get(name) or name in budget.extra
    ]
    claimed = sum({**budget.claimed, **budget.extra}.values())
    rows.append(("total", claimed, sum(planned.values()) / GB))
    return {
        "title": budget.title,
        "rows": rows,
        "remark": budget.remark,
        "command": "jaxkfac plan " + " ".join(budget.words),
    }


def planned_gb(*, leaving_out: str = "", row: str = "") -> float:
    """Of FLAN-T5-XL's training: one row, or the sum of all but one, in GB."""
    rows = _rows(T5_XL)
    return (rows[row] if row else sum(rows.values()) - rows.get(leaving_out, 0)) / GB


def _rows(budget: Budget) -> dict[str, int]:
    found = plan(budget.words)
    return (found["now"] if budget.option is None else found["alone"][budget.option])["device"]
