"""`jaxkfac adapter inspect`: the nonlinearity of every layer of a saved adapter."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxkfac._errors import DamagedFileError
from jaxkfac.cli._options import AdapterArguments
from jaxkfac.lslora import Diagnosis, Nonlinearity, SavedModules, diagnose, read_modules
from jaxkfac.report import terminal_table

_NUMBERS = {"sigma": "σ", "deviation": "deviation", "nonlinearity": "nonlin."}


def run_adapter(arguments: AdapterArguments) -> None:
    """Do what was asked for, which is to inspect."""
    run_adapter_inspect(arguments.folder, name=arguments.name, as_json=arguments.json)


def run_adapter_inspect(folder: Path, *, name: str = "default", as_json: bool = False) -> None:
    """Print settings and diagnosis of an adapter written here or by PEFT; no model is needed.

    Files that do not have the checksums that they were written with are shown, with a warning.

    Args:
        folder: Of the adapters.
        name: Of the adapter.
        as_json: Print JSON instead of a table.

    Raises:
        FileNotFoundError: there is no such adapter.
        ValueError: the files cannot be read, or are of something else than LoRA or LS-LoRA.
    """
    record, modules, phi = _read(folder, name)
    found = {} if phi is None else jax.device_get(diagnose(modules, nonlinearity=phi.name))
    rows = {}
    for module, adapter in modules.items():
        shape = {"rank": adapter.a.shape[-1], "in": adapter.a.shape[0], "out": adapter.b.shape[1]}
        rows[module] = shape | _numbers(found.get(module))
    if as_json:
        print(json.dumps({"config": record, "modules": rows}, allow_nan=False))
        return
    console = Console()
    table = _table(rows, phi, f"{record['peft_type']} adapter {name!r}")
    # A line too long for the terminal is wrapped by it; a squeezed column would be lost.
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(width=max(console.width, needed)).print(table)
    settings = ("r", "lora_alpha", *(() if phi is None else phi.settings))
    words = [f"{key} {record[key]}" for key in settings if key in record]
    plain = "" if phi else "; plain LoRA: there is no nonlinearity"
    console.print(", ".join(words) + plain, highlight=False)
    if phi is not None:
        console.print(_legend(phi), style="dim")


def _read(folder: Path, name: str) -> SavedModules:
    try:
        return read_modules(folder, name)
    except DamagedFileError as error:
        found = read_modules(folder, name, verify=False)
        print(f"warning: {error}", file=sys.stderr)
        return found


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


def _table(rows: Mapping[str, Mapping[str, Any]], phi: Nonlinearity | None, title: str) -> Table:
    head = ["module", "rank", "in", "out"]
    if phi is not None:
        head += [*(f"c{i}" for i in range(len(phi.initial))), *_NUMBERS.values()]
    cells = []
    for module, row in rows.items():
        sizes = [str(row[key]) for key in ("rank", "in", "out")]
        numbers = [*row.get("coefficients", ()), *(row[k] for k in _NUMBERS if k in row)]
        cells.append([module, *sizes, *(f"{x:.3g}" for x in numbers)])
    return terminal_table(title, head, cells, no_wrap=True)
