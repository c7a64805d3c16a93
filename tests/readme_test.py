"""The Python blocks of every README run, in order, as one script; its commands exist."""

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
CASES = [pytest.param(p, marks=[] if p.parent == ROOT else pytest.mark.slow) for p in READMES]


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


@pytest.mark.parametrize("readme", CASES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run_in_order(readme: Path, tmp_path: Path):
    program = tmp_path / f"{readme.parent.name}_README.py"
    program.write_text(script(readme.read_text()))
    # A user's process: no runtime types, no strict promotion, no second device.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, f"{readme.name}, at its own line numbers:\n{run.stderr}"


def test_quick_start_is_at_most_fifteen_lines():
    quick = next(b for b in blocks((ROOT / "README.md").read_text()) if "jk.kfac(" in b)
    assert len([line for line in quick.splitlines() if line.strip()]) <= 15


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
