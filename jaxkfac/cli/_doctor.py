"""`jaxkfac doctor`: what of this machine decides bytes and bits, and what to change."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nothing heavy: the command line's help reads this file too
    from jaxkfac.memory import Finding


@dataclasses.dataclass(frozen=True)
class DoctorArguments:
    """Show devices, allocator, precision, attention, memory, threads and versions.

    Each line says how it is and what to change; `!` marks what will go wrong as it is. Only
    the settings are read, and nothing is changed. docs/troubleshooting.md says what to do when
    memory runs out.

    For example, before a training whose bits are to be compared:
    `OPENBLAS_NUM_THREADS=1 jaxkfac doctor`
    """

    json: bool = False
    """Print the findings as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""


def run_doctor(arguments: DoctorArguments) -> None:
    """Print the findings."""
    from jaxkfac.memory import TROUBLESHOOTING_PAGE
    from jaxkfac.report import terminal_table, versions

    findings = _findings()
    if arguments.json:
        plain = [finding._asdict() for finding in findings]
        print(json.dumps({"findings": plain, "versions": versions(), "page": TROUBLESHOOTING_PAGE}))
        return
    from rich.console import Console
    from rich.markup import escape

    rows = []
    for finding in findings:
        mark = "[bold red]![/]" if finding.problem else ""
        rows.append([mark, *(escape(text) for text in finding[:3])])
    console = Console()
    console.print(terminal_table("Doctor", ["", "what", "is", "to change"], rows, words=range(4)))
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    console.print(f"versions: {found}", highlight=False)
    problems = sum(finding.problem for finding in findings)
    console.print(f"{problems} problems" if problems else "no problems", style="bold")
    console.print(f"out of memory, or too slow: {TROUBLESHOOTING_PAGE}", highlight=False)


def _findings() -> "list[Finding]":
    from jaxkfac.memory import inspect_environment

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
