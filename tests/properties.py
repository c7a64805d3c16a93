"""What each room promises, and the default test that holds it.

``python -m tests.properties --write`` writes ``benchmarks/results/properties.md``. A row is a test
of the default suite, and the property is its name. A test file contributes the tests that have
killed an injected fault (``mutants.json``, ``mutants-again.json``, ``faults.json`` beside it), or
its first test if none has.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "properties.md"
RECORDS = ("mutants.json", "mutants-again.json", "faults.json")
HEAD = """# Properties

What each room promises, and the test of the default suite that holds it. A test that has killed an
injected fault stands here, or the first test of a file if none has. CI fails where this page is not
that of the tests (`python -m tests.properties --write`): when a test leaves the default suite, the
difference shows it.
"""


def killers() -> set[str]:
    """Files and functions of the tests that have killed an injected fault."""
    names = set[str]()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(killer := value.get("killed_by"), str):
                names.add(killer.partition("[")[0])
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    for record in RECORDS:
        visit(json.loads((ROOT / "benchmarks" / "results" / record).read_text()))
    return names


def default_tests(file: Path) -> list[str]:
    """Functions of a file of which at least some cases are in the default suite, in its order."""
    tree = ast.parse(file.read_text())
    marks = [ast.unparse(x) for x in tree.body if isinstance(x, ast.Assign)]
    if any(x.startswith("pytestmark") and _leaves_out(x) for x in marks):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(_leaves_out(ast.unparse(x)) for x in node.decorator_list)
    ]


def _leaves_out(mark: str) -> bool:
    """Whether a decorator takes all cases out of the default suite; a case's own mark does not."""
    before = mark.partition("parametrize")[0]
    return any(f"mark.{name}" in before for name in ("slow", "exhaustive", "gpu", "default(0"))


def room_of(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    depth = 3 if parts[:2] == ("jaxkfac", "jobs") else 2
    return "/".join(parts[:depth]) if parts[0] == "jaxkfac" and len(parts) > 2 else parts[0]


def rows() -> Iterator[tuple[str, str, Path]]:
    """Room, test and file."""
    killing = killers()
    for folder in ("jaxkfac", "torch_ref", "parity_tests", "tests"):
        for file in sorted((ROOT / folder).rglob("*_test.py")):
            tests = default_tests(file)
            path = str(file.relative_to(ROOT))
            chosen = [name for name in tests if f"{path}::{name}" in killing] or tests[:1]
            yield from ((room_of(file), name, file) for name in chosen)


def page() -> str:
    """The tables, one for each room."""
    lines, room = [HEAD], ""
    for new, name, file in rows():
        if new != room:
            room = new
            lines += ["", f"## {room}", "", "| property | default test |", "|---|---|"]
        sentence = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {sentence} | `{file.relative_to(ROOT)}` |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
