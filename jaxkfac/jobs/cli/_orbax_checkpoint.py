"""Checkpoints as they were written at first: folders of Orbax, without checksums."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkfac._errors import DamagedFileError


def is_orbax_checkpoint(path: Path) -> bool:
    """Whether ``path`` is such a folder."""
    return (path / "state").is_dir()


def load_orbax_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The leaves, and what is stored beside them; that they are unchecked is said.

    Raises:
        DamagedFileError: Orbax cannot read it.
    """
    import orbax.checkpoint as ocp

    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(), run=ocp.args.JsonRestore())
    try:
        with _quiet(), ocp.CheckpointManager(path.parent.absolute()) as manager:
            item = manager.restore(int(path.name), args=wanted)
    except Exception as error:  # whatever Orbax and its storage raise
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(f"the checkpoint {path} cannot be read: {reason}") from error
    print(
        f"{path} was written by an earlier jaxkfac, without checksums: it is read unchecked",
        file=sys.stderr,
    )
    return {name: np.asarray(leaf) for name, leaf in item.state.items()}, item.run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's remarks about its own defaults off the terminal."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
