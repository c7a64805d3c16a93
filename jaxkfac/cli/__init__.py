"""The commands ``jaxkfac train`` and ``jaxkfac analyze``."""

from jaxkfac.cli._main import main

__all__ = ["main"]
