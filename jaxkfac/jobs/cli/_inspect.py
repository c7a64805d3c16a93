"""Commands that only look: at a saved adapter, at the cached weights, at this machine."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxkfac._errors import DamagedFileError
from jaxkfac.jobs.cli._inspect_options import (
    AdapterArguments,
    DoctorArguments,
    ModelsArguments,
)
from jaxkfac.jobs.report import terminal_table, versions
from jaxkfac.lslora import Diagnosis, Nonlinearity, SavedModules, diagnose, read_modules
from jaxkfac.memory import TROUBLESHOOTING_PAGE, Finding, bytes_text, inspect_environment

# ---------------- `jaxkfac adapter inspect`: the nonlinearity of every layer of a saved adapter


_NUMBERS = {"sigma": "σ", "deviation": "deviation", "nonlinearity": "nonlin."}


def run_adapter(arguments: AdapterArguments) -> None:
    """Run the chosen action, which is always inspect.

    It prints settings and diagnosis of an adapter written here or by PEFT; no model is needed.
    Files whose checksums do not match are shown, with a warning.

    Raises:
        FileNotFoundError: there is no such adapter.
        ValueError: the files cannot be read, or hold something other than LoRA or LS-LoRA.
    """
    record, modules, phi = _read(arguments.folder, arguments.name)
    diagnoses = {} if phi is None else jax.device_get(diagnose(modules, nonlinearity=phi.name))
    rows = {}
    for module, adapter in modules.items():
        shape = {"rank": adapter.a.shape[-1], "in": adapter.a.shape[0], "out": adapter.b.shape[1]}
        rows[module] = shape | _numbers(diagnoses.get(module))
    if arguments.json:
        print(json.dumps({"config": record, "modules": rows}, allow_nan=False))
        return
    console = Console()
    title = f"{record['peft_type']} adapter {arguments.name!r}"
    console.print(title, soft_wrap=True, markup=False, highlight=False)
    for heading, table in _families(rows, phi) if phi else [("", _sizes(rows))]:
        if heading:
            console.print(f"\n{heading}", soft_wrap=True, markup=False, highlight=False)
        # A line too long for the terminal is wrapped by it; a squeezed column would be lost.
        needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        Console(width=max(console.width, needed)).print(table)
    settings = ("r", "lora_alpha", *(() if phi is None else phi.settings))
    shown_settings = [f"{key} {record[key]}" for key in settings if key in record]
    plain = "" if phi else "; plain LoRA: there is no nonlinearity"
    console.print(", ".join(shown_settings) + plain, highlight=False)
    if phi is not None:
        console.print(_legend(phi), style="dim")


def _read(folder: Path, name: str) -> SavedModules:
    try:
        return read_modules(folder, name)
    except DamagedFileError as error:
        unverified = read_modules(folder, name, verify=False)
        print(f"warning: {error}", file=sys.stderr)
        return unverified


def _legend(phi: Nonlinearity) -> str:
    initial = ", ".join(f"{c:g}" for c in phi.initial)
    return (
        f"c0 to c{len(phi.initial) - 1}: {phi.formula}; deviation: mean |c - [{initial}]|; "
        f"nonlin.: {phi.strength_formula}. What is saturated depends on data: "
        "jaxkfac.lslora.diagnose(adapters, adapted, params, inputs)"
    )


def _numbers(diagnosis: Diagnosis | None) -> dict[str, Any]:
    if diagnosis is None:
        return {}
    return {
        "coefficients": np.asarray(diagnosis.coefficients).tolist(),
        **{name: float(getattr(diagnosis, name)) for name in _NUMBERS},
    }


_BLOCK = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between the dots of a module's name


def _families(
    rows: Mapping[str, Mapping[str, Any]], phi: Nonlinearity
) -> Iterator[tuple[str, Table]]:
    """For modules that differ in their block alone: their name and sizes, and a row for each.

    With the names and sizes in every row, lines would have more than 80 characters.
    """
    families: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for module, row in rows.items():
        family = (_BLOCK.sub("*", module), row["in"], row["out"], row["rank"])
        numbers = [*row.get("coefficients", ()), *(row[key] for key in _NUMBERS if key in row)]
        families.setdefault(family, {})[module] = [f"{x:.3g}" for x in numbers]
    head = ["block", *(f"c{i}" for i in range(len(phi.initial))), *_NUMBERS.values()]
    for (name, inputs, outputs, rank), members in families.items():
        name = name if len(members) > 1 else next(iter(members))
        blocks = [".".join(_BLOCK.findall(module)) for module in members]
        cells = [[block, *numbers] for block, numbers in zip(blocks, members.values(), strict=True)]
        yield (
            f"{name}: {inputs} → {outputs}, rank {rank}",
            terminal_table("", head, cells, no_wrap=True),
        )


def _sizes(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each module of an adapter without a nonlinearity."""
    cells = [
        [module, *(str(row[key]) for key in ("rank", "in", "out"))] for module, row in rows.items()
    ]
    return terminal_table("", ["module", "rank", "in", "out"], cells, no_wrap=True)


# ---------------- `jaxkfac models`: which pretrained weights are known, and which are here


def run_models(arguments: ModelsArguments) -> None:
    """Print the table of pretrained weights, or JSON."""
    from jaxkfac.jobs.models.pretrained import KNOWN, cache_folder, cached_file

    rows = [_row(model, cached_file(model, arguments.cache_dir)) for model in KNOWN]
    if arguments.json:
        print(json.dumps({"cache": str(cache_folder(arguments.cache_dir)), "models": rows}))
        return
    cells = []
    for row in rows:
        have = row["cached_bytes"]
        cache_state = "no" if have is None else "yes"
        if have is not None and have != row["bytes"]:
            cache_state = f"damaged: {bytes_text(have)}; delete it"
        texts = (
            row["name"],
            bytes_text(row["bytes"]),
            row["licence"],
            row["requirement"],
            cache_state,
        )
        cells.append([escape(text) for text in texts])
    head = ["name", "size", "licence", "from", "in the cache"]
    console = Console()
    console.print(terminal_table("Pretrained weights", head, cells, text_columns=(0, 2, 3, 4)))
    for row in rows:
        console.print(f"{row['about']}\n  {row['path']}", style="dim", highlight=False)


def _row(model: Any, file: Path) -> dict[str, Any]:
    return {
        "name": model.name,
        "about": model.about,
        "licence": model.licence,
        "requirement": model.requirement,
        "bytes": model.nbytes,
        "path": str(file),
        "cached_bytes": file.stat().st_size if file.is_file() else None,
    }


# ---------------- `jaxkfac doctor`: what of this machine decides bytes and bits, and what to change


def run_doctor(arguments: DoctorArguments) -> None:
    """Print the findings, or JSON."""
    findings = _findings()
    if arguments.json:
        plain = [finding._asdict() for finding in findings]
        print(json.dumps({"findings": plain, "versions": versions(), "page": TROUBLESHOOTING_PAGE}))
        return
    rows = []
    for finding in findings:
        mark = "[bold red]![/]" if finding.problem else ""
        rows.append([mark, *(escape(text) for text in finding[:3])])
    console = Console()
    console.print(
        terminal_table("Doctor", ["", "what", "is", "to change"], rows, text_columns=range(4))
    )
    version_list = ", ".join(f"{name} {version}" for name, version in versions().items())
    console.print(f"versions: {version_list}", highlight=False)
    problems = sum(finding.problem for finding in findings)
    console.print(f"{problems} problems" if problems else "no problems", style="bold")
    console.print(f"out of memory, or too slow: {TROUBLESHOOTING_PAGE}", highlight=False)


def _findings() -> list[Finding]:
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    environ = dict(os.environ)
    # Looking must not take the memory that somebody else is training in. The allocator reads
    # this when the first device is asked for.
    os.environ[name] = "false"
    try:
        return inspect_environment(environ)
    finally:
        os.environ.pop(name)
        os.environ.update(environ)
