"""Options of `adapter`, `models` and `doctor`. Imports nothing slow, for quick help."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from jaxkfac.jobs.cli._paths import absent, kind_of


@dataclasses.dataclass(frozen=True)
class AdapterArguments:
    """Look at LS-LoRA adapters on disk.

    `jaxkfac adapter inspect FOLDER` shows an adapter's settings and the coefficients of every
    layer. It needs no model.
    """

    action: tyro.conf.Positional[Literal["inspect"]]
    """Action: inspect."""
    folder: tyro.conf.Positional[Path]
    """Folder of the adapter."""
    name: str = "default"
    """Name of the adapter."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse a path without an adapter."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"no adapter in {self.folder}, which {absent(self.folder)}: give its folder"
            )
        places = (self.folder, self.folder / self.name)
        if not any((place / "adapter_config.json").exists() for place in places) and (
            kind := kind_of(self.folder)
        ):
            raise FileNotFoundError(f"no adapter in {self.folder}, which is {kind}")


@dataclasses.dataclass(frozen=True)
class ModelsArguments:
    """Show the pretrained weights that are known, where they are kept and how large they are.

    The command downloads nothing: `jaxkfac.models.smollm2()` downloads when first called.

    Example, with the weights in a folder of your own:
    `jaxkfac models --cache-dir weights`
    """

    cache_dir: Path | None = None
    """Folder of the weights; by default $JAXKFAC_CACHE or ~/.cache/jaxkfac."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""


@dataclasses.dataclass(frozen=True)
class DoctorArguments:
    """Show devices, allocator, precision, attention, memory, threads and versions.

    Each line shows a setting and what to change; `!` marks a problem. The command reads the
    settings and changes nothing. docs/troubleshooting.md says what to do when memory runs out.

    Example, before a training run whose bits are to be compared:
    `OPENBLAS_NUM_THREADS=1 jaxkfac doctor`
    """

    json: bool = False
    """Print the findings as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""
