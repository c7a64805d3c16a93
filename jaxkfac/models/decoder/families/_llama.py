"""Llama: no window, whatever the file says."""

from collections.abc import Mapping
from typing import Any


def llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``llama``."""
    return {}
