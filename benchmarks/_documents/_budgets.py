"""The documents' two budgets beside what ``jaxkfac plan`` says of the same training.

All bytes are counted from shapes and equations: no compiler starts, so that a test can repeat it.
"""

import contextlib
import functools
import io
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks._documents._bytes import GB
from benchmarks._documents._claim import Context, Holds, Measured
from benchmarks._documents._rules import Rule
from jaxkfac.jobs.cli import main

COUNTED = ("--compiler", "h100", "--compiled", "none", "--options", "remat")
Columns = Mapping[str, Mapping[str, int]]


class Budget(NamedTuple):
    """A table of a document.

    Attributes:
        title: The training.
        words: Arguments of ``jaxkfac plan``.
        column: The column of the plan: ``"now"``, or an option.
        claimed: ``{row of the plan: GB in the document}``; other rows it forgot.
        extra: ``{row that is in no plan: GB}``.
        remark: What the difference comes from.
    """

    title: str
    words: tuple[str, ...]
    column: str
    claimed: dict[str, float]
    extra: dict[str, float]
    remark: str


def t5_xl_words(tokens: int) -> tuple[str, ...]:
    """Arguments of ``jaxkfac plan`` for FLAN-T5-XL's training on rows of one length."""
    return (
        *("--preset", "t5-xl", "--batch", "8", "--tokens", str(tokens), "--dtype", "bfloat16"),
        *("--gradient-accumulation-steps", "16", "--curvature", "none", "--device-bytes", "32e9"),
        *COUNTED,
    )


TOKENS = 256  # an example of the length that the document does not state
LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
KFAC_7B = Budget(
    "K-FAC analysis of a 7B model, 80 GB",
    (
        *("--preset", "llama-7b", "--batch", "1", "--tokens", "2048", "--dtype", "bfloat16"),
        *("--curvature", "analyze", "--device-bytes", "80e9", *COUNTED),
    ),
    "now",
    {"parameters": 14, "optimizer": 28, "factors": 30, "activations": 10},
    {"retained graph": 5},
    "The document has one row for activations and gradients; the plan has a row for each. The "
    "document names neither the model nor its batch and length: these are Llama 7B and one row of "
    "2048 tokens.",
)
T5_XL = Budget(
    f"FLAN-T5-XL, 8 examples of {TOKENS} tokens times 16 accumulated steps, bfloat16, "
    "recomputation, 32 GB",
    t5_xl_words(TOKENS),
    "remat",
    {"parameters": 6, "optimizer": 6, "gradients": 6, "activations": 8},
    {"overhead": 2},
    f"The column “remat” of the plan. The document states no length: {TOKENS} tokens are ours. It "
    "has no row for accumulated gradients: PyTorch adds them up in the gradients themselves, and "
    "`jk.multi_steps` keeps sums in float32 unless `accumulator_dtype` says otherwise.",
)
BUDGETS = (KFAC_7B, T5_XL)


@functools.cache
def plan(words: tuple[str, ...]) -> Columns:
    """The bytes on the device by ``jaxkfac plan``: ``{column: {row: bytes}}``."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        main(["plan", *words, "--json"])  # exit code 2 where nothing fits; the plan is printed
    if not printed.getvalue():
        raise RuntimeError(f"jaxkfac plan {' '.join(words)} failed:\n{said.getvalue()[-2000:]}")
    whole = json.loads(printed.getvalue())
    columns = {"now": whole["now"], **whole["alone"]}
    return {name: column["device"] for name, column in columns.items()}


def by_length() -> dict[int, Columns]:
    """Plans of FLAN-T5-XL's training, for each of ``LENGTHS``."""
    return {tokens: plan(t5_xl_words(tokens)) for tokens in LENGTHS}


def compared(budget: Budget) -> dict[str, Any]:
    """Rows of both, in GB; ``None`` where one has no such row."""
    planned = plan(budget.words)[budget.column]
    claimed = {**budget.claimed, **budget.extra}
    rows = [
        [name, claimed.get(name), planned[name] / GB if name in planned else None]
        for name in [*planned, *budget.extra]
        if planned.get(name) or name in budget.extra
    ]
    rows.append(["total", sum(claimed.values()), sum(planned.values()) / GB])
    return {
        "title": budget.title,
        "rows": rows,
        "remark": budget.remark,
        "command": "jaxkfac plan " + " ".join(budget.words),
    }


def activations(columns: Columns) -> float:
    """Activations of FLAN-T5-XL with every block recomputed, in GB."""
    return columns["remat"]["activations"] / GB


def saved(columns: Columns) -> float:
    """What recomputation takes from the total, in GB."""
    now, remat = (sum(columns[name].values()) for name in ("now", "remat"))
    return (now - remat) / GB


def total(columns: Columns, *, leaving_out: str = "") -> float:
    """Sum of all rows but one, with every block recomputed, in GB."""
    rows = columns["remat"]
    return (sum(rows.values()) - rows.get(leaving_out, 0)) / GB


def at_the_example(value: Callable[[Columns], float]) -> float:
    """A quantity of FLAN-T5-XL's training, for rows of ``TOKENS``."""
    return value(plan(t5_xl_words(TOKENS)))


def lengths_that(value: Callable[[Columns], float], rule: Rule) -> Callable[[Context], Holds]:
    """For which lengths of a row the planned quantity makes a claim true.

    Between the planned lengths the quantity is interpolated, so ends are stated in two digits.
    """

    def holds(context: Context) -> Holds:
        lengths = sorted(context.lengths)
        planned = [value(context.lengths[n]) for n in lengths]
        every = np.arange(lengths[0], lengths[-1] + 1)
        between = np.interp(every, lengths, planned)
        true = [n for n, x in zip(every, between) if rule.verdict(Measured(float(x))) == "true"]
        ends = f"{lengths[0]} to {lengths[-1]:,} tokens"
        if not true:
            return Holds(f"at no length of a row from {ends}", "false")
        if len(true) == len(every):
            return Holds(f"at every length of a row from {ends}", "true")
        low, high = (int(float(f"{end:.2g}")) for end in (true[0], true[-1]))
        if true[0] == every[0]:
            return Holds(f"for rows of up to about {high} tokens")
        if true[-1] == every[-1]:
            return Holds(f"for rows of about {low} tokens or more")
        return Holds(f"for rows of about {low} to {high} tokens")

    return holds
