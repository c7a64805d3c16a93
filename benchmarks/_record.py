"""What every record says of where and when it was made."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax


def stamp(**settings: Any) -> dict[str, Any]:
    """Date, versions, device and load, then the settings of the run."""
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0]),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "unset"),
        **settings,
    }


def shown(name: str, values: dict[str, Any]) -> None:
    """Print one part of a record, rounded."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
    print(name, rounded, flush=True)


def write(record: Any, path: Path | None) -> None:
    """The record as JSON, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")
