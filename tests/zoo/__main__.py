"""The table of the zoo: ``python -m tests.zoo`` prints it, ``--write`` puts it into docs/zoo.md."""

import sys
from itertools import groupby
from pathlib import Path

from tests.zoo import Program, all_programs

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# The zoo: tested models

Every row is a program of the test suite. `pytest tests/zoo -m ""` runs each row whose library is
installed (without `-m`, some rows of each family). A test checks which parameters are covered,
compares value and gradient with plain JAX, and compares the factors with what the last column
names:

- "Brute force" writes every row of every layer out in NumPy, in float64, and agrees to 1e-10
  (1e-5 or 1e-6 where the library computes in float32). Where layers stand behind a semicolon,
  only their gradient is compared.
- "Taps in the library's own layers" runs the library's own model, and its layers report their
  rows; loops and maps over examples are written out.

`make zoo` makes an environment with the libraries of all models, and runs every row in it.
`python -m tests.zoo --write` writes this page.
"""


def table() -> str:
    """The page, a section for each family."""
    lines = [HEAD]
    rows = sorted(all_programs().values(), key=lambda row: row.family)
    for family, members in groupby(rows, key=lambda row: row.family):
        lines += [f"## {family}", "", "| Program | Covered | Checked against |", "|---|---|---|"]
        for row in members:
            apart = ", ".join(f"`{layer}`" for layer in sorted(row.unchecked))
            checked = f"{row.checked}; {apart}: gradient" if apart else row.checked
            lines.append(f"| {row.name} | {_covered(row)} | {checked} |")
        lines.append("")
    return "\n".join(lines)


def _covered(row: Program) -> str:
    """The paths that are not, by the reason."""
    reasons = dict.fromkeys(row.uncovered.values())
    paths = {why: [f"`{p}`" for p, w in row.uncovered.items() if w == why] for why in reasons}
    missing = "; ".join(f"{', '.join(of)} ({why})" for why, of in paths.items())
    return f"all but {missing}" if missing else "all"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(table())
    else:
        print(table())
