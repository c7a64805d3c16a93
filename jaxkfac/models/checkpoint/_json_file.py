"""Small JSON files that lie beside weights."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ValueError: it is damaged, or no object.
    """
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON object: {error}; download it again") from error
