"""The record as Markdown: a row for each claim, the budgets, and the page of the documentation."""

from collections.abc import Mapping
from typing import Any

COLUMNS = ("id", "the document says", "PyTorch", "JAX", "verdict", "why")
VERDICTS = ("true", "partly", "false", "not decidable", "needs a GPU")
TITLES = {
    "kfac-7b": "K-FAC analysis of a 7B model",
    "clipping": "Clipped eigenvalues, put together on the host",
    "flan-t5-xl": "Fine-tuning FLAN-T5-XL",
    "few-shot": "Few-shot training with accumulated gradients",
    "phi3-lora": "A Fourier adapter on Phi-3",
}
OUT_OF_SCOPE = (
    ("kfac-7b", "5 GB for the retained graph", "of a batch that the document does not state"),
    ("flan-t5-xl", "notifications by webhook", "a training loop's own business"),
    ("flan-t5-xl", "containers and their compose files", "deployment, not memory"),
    ("flan-t5-xl", "2000 to 5000 samples a second from a loader in Rust", "another library's"),
    (
        "flan-t5-xl",
        "3 to 5 batches a second, 95 to 100 % utilisation, 28 to 31 GB in use, 15 to 18 GB of RAM",
        "figures of one machine, which no other decides",
    ),
    (
        "flan-t5-xl",
        "a log that says both that nothing is converted and that the float32 model is freed",
        "the two branches of one condition",
    ),
    (
        "flan-t5-xl",
        "the cache cleared every 10, 5 or 50 batches; three more settings of the allocator",
        "no figure of their own: see few-shot/clear-cache and few-shot/expandable-segments",
    ),
    (
        "kfac-7b",
        "what the hooks kept is cleared in `finally`",
        "the document claims no bytes for it; it is a safeguard for a pass that fails",
    ),
    (
        "few-shot",
        "the loop has no line that resets gradients, and its counter has no first value",
        "a sketch, which leaves out the same lines before the change and after it",
    ),
    ("few-shot", "2.35 GiB asked for, 363 MiB of 15.89 free", "a report of one error"),
    ("clipping", "5 ms for the product on the GPU; 50 MB of workspace", "of a GPU not named"),
    ("phi3-lora", "how long each remedy takes to write", "not a property of a program"),
    ("phi3-lora", "accuracy on OpenBookQA", "its data is not here; one run of 500 questions"),
)


def record_text(record: Mapping[str, Any], marks: Mapping[str, str]) -> str:
    """``benchmarks/results/documents.md``; marks say which rows' sources have changed."""
    parts = [
        "# Every figure of the five documents, answered",
        "",
        _circumstances(record),
        "",
        "Before → after are those of the document's own program and of its own remedy, in the unit",
        "at the end. PyTorch's bytes are counted as storages are made and freed, JAX's as its",
        "compiler plans them: no clock or heap has a part in them, except where resident memory or",
        "time is the claim; then a process of its own measures it. The verdict follows from",
        "PyTorch's numbers by the rule in `documents.json`; see `benchmarks/_documents/_rules.py`.",
        "Arithmetic, shapes and plans are counted, and a test counts them again; every other row",
        "is marked if a function that its measurement entered has changed since.",
        "",
        _counts(record),
        "",
        *_claims(record, marks, heading="##"),
        "## The two budgets",
        "",
        *_budgets(record),
        "## Lessons of this project",
        "",
        "In none of the documents. Peaks, before and after.",
        "",
        *_lessons(record),
        "## Out of scope",
        "",
        "Not claims about memory or time of a program here, and not counted above.",
        "",
        *_lines(("document", "what", "why"), OUT_OF_SCOPE),
    ]
    return "\n".join(parts)


def page_text(record: Mapping[str, Any], marks: Mapping[str, str]) -> str:
    """``docs/documents.md``, the page for readers; marks as above."""
    rows = record["claims"]
    parts = [
        "# What the documents got right and wrong",
        "",
        "jaxkfac began with five reports of people who ran out of GPU memory. Each says what went",
        "wrong, what was changed, and how much it saved. We wrote every fault and every remedy",
        "anew, measured both in PyTorch and in JAX, and let stated rules decide. A claim is judged",
        "on what its document says: where a length, a batch, a machine or a place is not stated,",
        "the claim is not decidable, and its row says for which values it is true. Remarks of our",
        "own are labelled so.",
        "",
        f"This page is made from that record by `{record['command']}`. A test counts arithmetic,",
        "shapes and plans again (`python -m benchmarks.documents --counted`).",
        _marked(record, marks),
        "",
        _counts(record),
        "",
    ]
    headings = {
        "true": "What holds",
        "partly": "What holds in part",
        "false": "What does not hold",
        "not decidable": "What its document does not decide",
        "needs a GPU": "What only a GPU can decide",
    }
    for verdict in VERDICTS:
        parts += [f"## {headings[verdict]}", ""]
        parts += [
            f"- **{row['text']}** {_explained(row)} ({_numbers(row['torch'])}; "
            f"`{row['name']}`{_mark(row, marks)})"
            for row in rows
            if row["verdict"] == verdict
        ]
        parts += [""]
    parts += ["## The two budgets", "", *_budgets(record)]
    parts += [
        "## What does save memory",
        "",
        "Lessons of this project, in none of the documents.",
        "",
        *_lessons(record),
        "## Where to go on",
        "",
        "- The whole record, with JAX's numbers: `benchmarks/results/documents.md`.",
        "- Eight of them measured as it runs: "
        "[notebook](../notebooks/07_the_documents_measured.ipynb).",
        "- What to do when memory runs out: [troubleshooting](troubleshooting.md).",
        "",
    ]
    return "\n".join(parts)


def _circumstances(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {record[name]}" for name in ("python", "torch", "jax"))
    where = f"{record['device']}, {record['cores']} cores ({record['machine']})"
    return f"{record['date']}, {where}; {versions}. Made by `{record['command']}`."


def _counts(record: Mapping[str, Any]) -> str:
    verdicts = [row["verdict"] for row in record["claims"]]
    true, partly, false, undecided, gpu = map(verdicts.count, VERDICTS)
    return (
        f"{len(verdicts)} claims and figures: {true} true, {partly} true in part, {false} false; "
        f"{undecided} not decidable from the document; {gpu} need a GPU."
    )


def _explained(row: Mapping[str, Any]) -> str:
    """The reason, for which values the claim is true, and the remark."""
    parts = [row["reason"]]
    if row["holds"]:
        parts.append(f"True {row['holds']}.")
    if row["remark"]:
        parts.append(f"*Our remark:* {row['remark']}")
    return " ".join(parts)


def _mark(row: Mapping[str, Any], marks: Mapping[str, str]) -> str:
    return f"; {marks[row['name']]}" if row["name"] in marks else ""


def _marked(record: Mapping[str, Any], marks: Mapping[str, str]) -> str:
    """How many measured rows have changed sources, in a sentence."""
    measured = [
        row
        for row in record["claims"]
        if row.get("measured") and any(isinstance(row[side], Mapping) for side in ("torch", "jax"))
    ]
    changed = sum(row["name"] in marks for row in measured)
    return (
        f"{changed} of the {len(measured)} measured rows are marked: a function that the "
        "measurement entered has changed since, or its functions were not recorded."
        if changed
        else f"The functions behind all {len(measured)} measured rows are unchanged since."
    )


def _claims(record: Mapping[str, Any], marks: Mapping[str, str], *, heading: str) -> list[str]:
    parts: list[str] = []
    for document, title in TITLES.items():
        rows = [row for row in record["claims"] if row["name"].startswith(document + "/")]
        if rows:
            cells = [
                (
                    f"`{row['name']}`{_mark(row, marks)}",
                    row["text"],
                    _numbers(row["torch"]),
                    _numbers(row["jax"]),
                    row["verdict"],
                    _explained(row),
                )
                for row in rows
            ]
            parts += [f"{heading} {title}", "", *_lines(COLUMNS, cells)]
    return parts


def _lessons(record: Mapping[str, Any]) -> list[str]:
    cells = [
        (row["text"], _numbers(row["torch"]), _numbers(row["jax"])) for row in record["lessons"]
    ]
    return _lines(("what", "PyTorch", "JAX"), cells)


def _budgets(record: Mapping[str, Any]) -> list[str]:
    parts: list[str] = []
    for budget in record["budgets"]:
        cells = [(name, _gb(claimed), _gb(planned)) for name, claimed, planned in budget["rows"]]
        parts += [
            f"### {budget['title']}",
            "",
            *_lines(("row", "document, GB", "`jaxkfac plan`, GB"), cells),
            f"{budget['remark']} Made by `{budget['command']}`.",
            "",
        ]
    return parts


def _lines(columns: tuple[str, ...], cells: Any) -> list[str]:
    rows = [columns, ("---",) * len(columns), *cells]
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def _numbers(side: Any) -> str:
    if side is None:
        return "–"
    if isinstance(side, str):
        return side
    numbers = [side["before"], *([] if side["after"] is None else [side["after"]])]
    return f"{' → '.join(map(_number, numbers))} {side['unit']}".strip()


def _number(value: float) -> str:
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
