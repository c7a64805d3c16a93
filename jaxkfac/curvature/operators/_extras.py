"""The outside libraries, imported when they are needed."""

import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module of the ``operators`` extra.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {module.partition('.')[0]}, which is not installed: "
            'pip install "jaxkfac[operators]"'
        ) from error
