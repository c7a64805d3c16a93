"""What a run has come to: one file for each stage, for no other run than that it belongs to."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.files import PARTIAL, Archive, write_archive
from jaxkfac.jobs.cli._checkpoint import option_differences
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._progress import phase

_FORM = "jaxkfac.influence"
STAGES = ("factors", "bases", "scores")


class Stages:
    """The files of a run, in one folder.

    Args:
        folder: Where they are.
        goes_on: Whether what is there is read.
    """

    def __init__(self, folder: Path, *, goes_on: bool = True) -> None:
        self._folder, self._goes_on = folder, goes_on

    def holds(self, stage: str) -> bool:
        """Whether a stage has been reached."""
        return self._goes_on and (self._folder / stage).is_file()

    def tree(
        self, stage: str, config: Mapping[str, Any], like: Any, make: Callable[[], Any]
    ) -> Any:
        """A pytree of arrays as it was stored, or as ``make`` makes it; then it is stored.

        Args:
            stage: Its name.
            config: All that decides it.
            like: Its shapes.
            make: Makes it.
        """
        if self.holds(stage):
            stored = self.read(stage, config)
            leaves = [jnp.asarray(stored.pop(name)) for name in sorted(stored)]
            return jax.tree.unflatten(jax.tree.structure(like), leaves)
        made = make()
        leaves = jax.tree.leaves(made)
        names = (f"{number:06d}" for number in range(len(leaves)))
        self.write(stage, config, dict(zip(names, map(np.asarray, leaves), strict=True)))
        return made

    def read(self, stage: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of a stage.

        Raises:
            CheckpointMismatchError: they are of another run; what differs is listed.
            DamagedFileError: a byte is not what was written.
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
        """Store a stage, whole or not at all; Ctrl-C waits until it is."""
        doing, nbytes = f"writing the {stage}", sum(x.nbytes for x in arrays.values())
        with interrupts_deferred(doing), phase(doing):
            self._folder.mkdir(parents=True, exist_ok=True)
            about = {"config": dict(config)}
            path, what = self._folder / stage, f"the {stage}"
            write_archive(path, _FORM, about, arrays.items(), what=what, nbytes=nbytes)

    def remove(self, stages: Sequence[str] = STAGES) -> None:
        """Delete the files of stages, and what a killed run has left of any."""
        for path in (
            *(self._folder / stage for stage in stages),
            *self._folder.glob(f".*{PARTIAL}"),
        ):
            path.unlink(missing_ok=True)
