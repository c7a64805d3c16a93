"""Intermediate results of a run: one file per stage, tied to the options of the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.files import PARTIAL, Archive, write_archive
from jaxkfac.jobs.cli._checkpoint import option_differences
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._progress import phase

_FORM = "jaxkfac.influence"
STAGES = ("factors", "bases", "scores")


class Stages:
    """The stage files of a run, in one folder.

    Args:
        folder: Folder of the files.
        goes_on: Whether to read existing files.
    """

    def __init__(self, folder: Path, *, goes_on: bool = True) -> None:
        self._folder, self._goes_on = folder, goes_on

    def holds(self, stage: str) -> bool:
        """Whether the file of a stage exists."""
        return self._goes_on and (self._folder / stage).is_file()

    def tree(
        self, stage: str, config: Mapping[str, Any], like: ArrayTree, make: Callable[[], Any]
    ) -> Any:
        """A pytree of arrays, read if it is stored; otherwise made and stored.

        Args:
            stage: Name of the stage.
            config: Every option that decides the result.
            like: Shapes of the pytree.
            make: Function that makes the pytree.
        """
        if self.holds(stage):
            stored = self.read(stage, config)
            leaves = [jnp.asarray(stored.pop(name)) for name in sorted(stored)]
            return jax.tree.unflatten(jax.tree.structure(like), leaves)
        result = make()
        leaves = jax.tree.leaves(result)
        names = (f"{number:06d}" for number in range(len(leaves)))
        self.write(stage, config, dict(zip(names, map(np.asarray, leaves), strict=True)))
        return result

    def read(self, stage: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Read the arrays of a stage.

        Raises:
            CheckpointMismatchError: the file belongs to another run; lists the differences.
            DamagedFileError: the file is damaged.
        """
        path = self._folder / stage
        with Archive(path, _FORM, f"file of {stage}") as stored:
            differences = list(option_differences(stored.about["config"], dict(config)))
            if differences:
                raise CheckpointMismatchError(
                    f"{path} was written by another run:\n  "
                    + "\n  ".join(differences)
                    + "\ngive the options it was written with, or choose another --output"
                )
            return {name: stored.read(name) for name in stored.names}

    def write(
        self, stage: str, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Store a stage atomically; Ctrl-C waits until it is done."""
        doing, nbytes = f"writing the {stage}", sum(x.nbytes for x in arrays.values())
        with interrupts_deferred(doing), phase(doing):
            self._folder.mkdir(parents=True, exist_ok=True)
            about = {"config": dict(config)}
            path, what = self._folder / stage, f"the {stage}"
            write_archive(path, _FORM, about, arrays.items(), what=what, nbytes=nbytes)

    def remove(self, stages: Sequence[str] = STAGES) -> None:
        """Delete the files of stages, and partial files that a killed run left."""
        for path in (
            *(self._folder / stage for stage in stages),
            *self._folder.glob(f".*{PARTIAL}"),
        ):
            path.unlink(missing_ok=True)
