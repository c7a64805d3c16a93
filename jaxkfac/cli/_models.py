"""`jaxkfac models`: which pretrained weights are known, and which are here."""

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelsArguments:
    """Show the pretrained weights that are known, where they are kept and how large they are.

    Nothing is downloaded: `jaxkfac.models.smollm2()` does that when it is first called.

    For example, with the weights in a folder of your own:
    `jaxkfac models --cache-dir weights`
    """

    cache_dir: Path | None = None
    """Where weights are kept; by default $JAXKFAC_CACHE or ~/.cache/jaxkfac."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""


def run_models(arguments: ModelsArguments) -> None:
    """Print what is known."""
    from jaxkfac.models.pretrained import KNOWN, cache_folder

    rows = [_row(known, arguments.cache_dir) for known in KNOWN]
    if arguments.json:
        print(json.dumps({"cache": str(cache_folder(arguments.cache_dir)), "models": rows}))
        return
    from rich.console import Console
    from rich.markup import escape

    from jaxkfac.memory import bytes_text
    from jaxkfac.report import terminal_table

    cells = []
    for row in rows:
        have = row["cached_bytes"]
        here = "no" if have is None else "yes"
        if have is not None and have != row["bytes"]:
            here = f"damaged: {bytes_text(have)}; delete it"
        texts = (row["name"], bytes_text(row["bytes"]), row["licence"], row["requirement"], here)
        cells.append([escape(text) for text in texts])
    head = ["name", "size", "licence", "from", "in the cache"]
    console = Console()
    console.print(terminal_table("Pretrained weights", head, cells, words=(0, 2, 3, 4)))
    for row in rows:
        console.print(f"{row['about']}\n  {row['path']}", style="dim", highlight=False)


def _row(known: Any, cache_dir: Path | None) -> dict[str, Any]:
    from jaxkfac.models.pretrained import cached_file

    file = cached_file(known, cache_dir)
    return {
        "name": known.name,
        "about": known.about,
        "licence": known.licence,
        "requirement": known.requirement,
        "bytes": known.nbytes,
        "path": str(file),
        "cached_bytes": file.stat().st_size if file.is_file() else None,
    }
