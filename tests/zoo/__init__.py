"""Programs that JAX users really have: one builder each, checked, and the docs' table made of them.

A file of this folder holds one family. A builder returns a ``Case``; ``@program`` gives it its name
and its place in the table. ``zoo_test.py`` runs every row; ``python -m tests.zoo --write`` makes
``docs/zoo.md``.
"""

import importlib
import pkgutil

from tests.zoo._program import PROGRAMS, Case, Program, program

__all__ = ["PROGRAMS", "Case", "Program", "all_programs", "program"]


def all_programs() -> dict[str, Program]:
    """Every row, by name, in the order of the files and of the builders in them."""
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        if not module.startswith("_") and not module.endswith("_test"):
            importlib.import_module(f"{__name__}.{module}")
    return dict(PROGRAMS)
