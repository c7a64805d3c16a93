"""The page of numbers, from the records: ``python -m benchmarks.numbers --write docs/numbers.md``.

Nothing is measured. Without ``--write`` the page is printed. ``benchmarks._numbers`` says what is
taken from each record.
"""

import argparse
from pathlib import Path

from benchmarks._numbers import page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(page())
    else:
        print(page(), end="")
