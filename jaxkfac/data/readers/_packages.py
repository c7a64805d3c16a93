"""Packages that only some files need."""

import importlib
from typing import Any


def pyarrow(module: str) -> Any:
    """``pyarrow``, or a module of it; or how to get it."""
    return data_package(f"pyarrow.{module}" if module else "pyarrow")


def data_package(name: str) -> Any:
    """A package of the extra ``data``.

    Raises:
        ModuleNotFoundError: saying how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        raise ModuleNotFoundError(
            f'{package} is not installed: pip install "jaxkfac[data]"', name=error.name
        ) from None
