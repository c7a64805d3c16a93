"""Curvature and adapters for JAX, inside a memory budget.

The names are those of ``jaxkfac/_index.py``. They are imported when one of them is first asked
for, so that what needs none of them, such as ``jaxkfac --help``, does not wait for JAX.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkfac._index import *
    from jaxkfac._index import __all__

__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker knows the names, and a misspelt one by its absence

    def __getattr__(name: str) -> Any:
        # A package, or a private module, waits for none of the others.
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__all__" or not name.startswith("_"):
            index = importlib.import_module("jaxkfac._index")
            if name == "__all__" or name in index.__all__:
                globals()[name] = value = getattr(index, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *importlib.import_module("jaxkfac._index").__all__})
