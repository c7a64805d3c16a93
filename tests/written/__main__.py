"""Write every kind of file anew, and the numbers that each was written from.

Run: python -m tests.written FOLDER, or --write to replace the files in the repository.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

from tests.written import COMMITTED, KINDS, write_kind


def main(argv: Sequence[str] | None = None) -> int:
    """Write the kinds that are named, by default all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=COMMITTED)
    parser.add_argument("--write", action="store_true", help="replace the files in the repository")
    parser.add_argument("--only", nargs="*", choices=[*KINDS], default=[*KINDS], metavar="KIND")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    is_committed = folder == COMMITTED or COMMITTED in folder.parents
    if is_committed and not arguments.write:
        parser.error(
            f"{folder} holds the files that an earlier version wrote, which no later one can write "
            "again: give another folder, or --write if they are to be replaced"
        )
    if jax.default_backend() != "cpu":
        parser.error("the files are written on a CPU: set JAX_PLATFORMS=cpu")
    for name in arguments.only:
        print(name, flush=True)
        write_kind(name, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
