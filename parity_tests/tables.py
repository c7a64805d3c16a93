"""Every table of this folder: each ``*_test.py`` that has ``CASES``."""

import functools
import importlib
from pathlib import Path

from parity_tests.cases import Case


@functools.cache
def every_case() -> tuple[Case, ...]:
    """The cases of all parts. A new part is one more file with a table."""
    files = sorted(Path(__file__).parent.glob("*_test.py"))
    modules = [importlib.import_module(f"parity_tests.{file.stem}") for file in files]
    return tuple(case for module in modules for case in getattr(module, "CASES", ()))
