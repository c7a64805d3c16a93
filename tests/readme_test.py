"""The Python blocks of every README run, in order, as one script; its commands exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READMES = sorted(
    path
    for pattern in ("README.md", "*/README.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    and BLOCK.search(path.read_text())
)
# Pages of one family each: first steps, adapters, members from outside. The other pages run in the
# exhaustive suite and by `make docs-check`; lint reads the types of all blocks.
IN_SLOW = {"getting_started", "adapters", "extending"}


def _mark(page: Path) -> list[pytest.MarkDecorator]:
    if page.parent == ROOT:
        return []
    return [pytest.mark.slow if page.stem in IN_SLOW else pytest.mark.exhaustive]


CASES = [pytest.param(page, marks=_mark(page)) for page in READMES]


def blocks(text: str) -> list[str]:
    """The fenced Python blocks of a Markdown text."""
    return BLOCK.findall(text)


def script(text: str) -> str:
    """The blocks as one script, each line at its own line number, so that tracebacks fit."""
    lines = [""] * text.count("\n")
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(1))
        code = match.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def run_by_a_user(program: Path) -> subprocess.CompletedProcess[str]:
    """A user's process: no runtime types, no strict promotion, no second device."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, program.name],
        cwd=program.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("readme", CASES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run_in_order(readme: Path, tmp_path: Path):
    program = tmp_path / f"{readme.parent.name}_README.py"
    program.write_text(script(readme.read_text()))
    run = run_by_a_user(program)
    assert run.returncode == 0, f"{readme.name}, at its own line numbers:\n{run.stderr}"


def sides(difference: str) -> tuple[list[str], list[str]]:
    """The lines of a difference before and after it."""
    lines = [(line[:1], line[1:]) for line in difference.splitlines()]
    return [x for sign, x in lines if sign != "+"], [x for sign, x in lines if sign != "-"]


@pytest.mark.slow
def test_both_sides_of_the_difference_to_optax_train(tmp_path: Path):
    text = (ROOT / "docs" / "migrating.md").read_text()
    (difference,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert sum(line[:1] in ("+", "-") for line in difference.splitlines()) <= 12
    before, after = sides(difference)
    assert "optax.adam" in "\n".join(before)
    assert "jk.Optimizer(" in "\n".join(after)
    program = tmp_path / "loops.py"
    first = script((ROOT / "README.md").read_text())
    objective = "import optax\nobjective = jk.Objective(apply_fn, jk.Categorical())"
    loops = ("params_at_first = params", *before, "params = params_at_first", *after)
    program.write_text("\n".join([first, objective, *loops, "assert loss < 0.01"]))
    run = run_by_a_user(program)
    assert run.returncode == 0, run.stderr


def test_every_page_that_is_slow_has_blocks():
    assert {page.stem for page in READMES} > IN_SLOW


def words(text: str) -> int:
    """Words of a Markdown text without its blocks of code."""
    return len(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split())


def test_the_readme_is_short_and_its_program_can_be_pasted():
    text = (ROOT / "README.md").read_text()
    assert words(text) <= 450
    (program,) = blocks(text)
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 14
    assert "jk.Optimizer(" in program


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"run", "test"} <= named <= targets


def test_a_block_keeps_its_line_numbers():
    text = "# T\n\n```python\nx = 1\n```\n\nwords\n\n```python\nassert x == 2\n```\n"
    assert script(text).splitlines()[3] == "x = 1"
    assert script(text).splitlines()[9] == "assert x == 2"
    with pytest.raises(AssertionError):
        exec(compile(script(text), "T", "exec"), {})


def test_the_first_figure_is_a_record_in_which_the_default_ends_lowest():
    folder = ROOT / "benchmarks" / "results" / "poisson"
    record = json.loads((folder / "poisson.json").read_text())
    text = (ROOT / "README.md").read_text()
    assert "results/wins.svg" in text and (folder.parent / "wins.svg").exists()
    assert f"after {record['seconds']:g} CPU s" in text
    ends = {name: errors[-1] for name, (_, errors) in record["curves"].items()}
    ours = next(iter(ends))
    assert min(ends, key=ends.__getitem__) == ours and ours.startswith("jk.")
    pairs = re.findall(r"(\d+) × below ([\w-]+)'s", text)
    assert pairs
    for factor, name in pairs:
        (peer,) = (end for other, end in ends.items() if other.startswith(name))
        assert round(peer / ends[ours]) == int(factor), name
