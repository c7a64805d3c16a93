"""Checkpoints of a run: written whole or not at all, read only by the run they belong to."""

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.cli._interrupts import interrupts_deferred
from jaxkfac.cli._phases import phase
from jaxkfac.interception import leaves_by_path, with_leaves

PyTree = Any
_SHOWN = 12
DATA_CRC = "data_crc32"  # beside a config's options: what they cannot say of the data


class Checkpoint(NamedTuple):
    """What is stored.

    Attributes:
        leaves: ``{path: array}`` of the parameters and the optimizer's state.
        config: The experiment, as plain values; where they may change, ``DATA_CRC`` of the data.
        optimizer: ``"kfac"`` or ``"adamw"``.
        records: What the run has measured so far, as plain values.
        step: Updates made.
    """

    leaves: dict[str, np.ndarray]
    config: dict[str, Any]
    optimizer: str
    records: dict[str, Any]
    step: int


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder/step``, keeping the newest two; Ctrl-C waits until it is complete."""
    import orbax.checkpoint as ocp

    target = folder.absolute() / str(checkpoint.step)
    # Orbax refuses empty arrays; they hold nothing, and the template has them.
    leaves = {path: leaf for path, leaf in checkpoint.leaves.items() if leaf.size}
    about = {
        "config": checkpoint.config,
        "optimizer": checkpoint.optimizer,
        "records": checkpoint.records,
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with (
        interrupts_deferred("writing the checkpoint"),
        phase("writing the checkpoint"),
        _quiet(),
        ocp.CheckpointManager(target.parent, options=options) as m,
    ):
        if m.latest_step() != checkpoint.step:
            state, run = ocp.args.StandardSave(leaves), ocp.args.JsonSave(about)
            m.save(checkpoint.step, args=ocp.args.Composite(state=state, run=run))
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, the newest of a folder of them, or the K-FAC one of an output folder.

    Raises:
        FileNotFoundError: there is none at ``path``; what is there is said.
    """
    import orbax.checkpoint as ocp

    found = find_checkpoint(path)
    if found is None:
        held = sorted(p.name for p in path.iterdir()) if path.is_dir() else None
        content = "does not exist" if held is None else f"holds {', '.join(held) or 'nothing'}"
        raise FileNotFoundError(
            f"no checkpoint at {path}, which {content}; expected a folder written by "
            "`jaxkfac train`, such as runs/digits or runs/digits/kfac/1320"
        )
    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(), run=ocp.args.JsonRestore())
    with _quiet(), ocp.CheckpointManager(found.parent.absolute()) as manager:
        item = manager.restore(int(found.name), args=wanted)
    leaves = {path: np.asarray(leaf) for path, leaf in item.state.items()}
    return Checkpoint(leaves, step=int(found.name), **item.run)


def find_checkpoint(path: Path) -> Path | None:
    """The step folder that ``path`` means, or ``None``."""
    if path.name.isdigit() and (path / "state").is_dir():
        return path
    steps = [p for p in path.glob("*") if p.name.isdigit() and (p / "state").is_dir()]
    if steps:
        return max(steps, key=lambda p: int(p.name))
    below = (path / name for name in ("kfac", "adamw"))
    return next((found for p in below if p.is_dir() and (found := find_checkpoint(p))), None)


def flatten_state(params: PyTree, optimizer_state: PyTree) -> dict[str, np.ndarray]:
    """``{path: array}`` of everything that a run carries from one update to the next."""
    tree = {"params": params, "optimizer": optimizer_state}
    # On a CPU device_get would leave a view of its memory in each array, which keeps it from
    # being donated.
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(tree).items()}


def is_whole(*trees: PyTree) -> bool:
    """Whether all arrays are there: those donated to a program that was broken off are not."""
    return not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(trees))


def say_nothing_saved(folder: Path) -> None:
    """Say on standard error which checkpoint counts after a state was lost."""
    found = find_checkpoint(folder)
    last = "there is none" if found is None else f"it is from update {found.name}"
    print(f"stopped inside an update: the last checkpoint counts; {last}", file=sys.stderr)


def restore_state(
    checkpoint: Checkpoint, params: PyTree, optimizer_state: PyTree, config: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """The stored values in the structure of ``params`` and ``optimizer_state``.

    Both may be of ``jax.ShapeDtypeStruct``: nothing is read of them but shapes and dtypes.

    Raises:
        CheckpointMismatchError: the checkpoint is of another model or configuration; every
            path and option that differs is listed.
    """
    tree = {"params": params, "optimizer": optimizer_state}
    expected = leaves_by_path(tree)
    ignored = {"kfac": "adamw", "adamw": "kfac"}[checkpoint.optimizer]
    differences = [
        *_option_differences(checkpoint.config, config, ignored),
        *sorted(_leaf_differences(checkpoint.leaves, expected), key=_parameters_first),
    ]
    if differences:
        shown = differences[:_SHOWN]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        raise CheckpointMismatchError(
            "the checkpoint was written by another model or configuration:\n  "
            + "\n  ".join(shown)
            + "\nresume with the options it was written with, or choose another --output"
        )
    stored = {path: jnp.asarray(leaf) for path, leaf in checkpoint.leaves.items()}
    empty = {path: jnp.zeros(x.shape, x.dtype) for path, x in expected.items() if not x.size}
    restored = with_leaves(tree, stored | empty)
    return restored["params"], restored["optimizer"]


def check_output(output: Path, folders: Sequence[Path], *, resume: bool, overwrite: bool) -> None:
    """Make way for a run in ``output`` whose checkpoints go to ``folders``.

    Raises:
        ValueError: there is a run, and neither ``resume`` nor ``overwrite`` was asked for; or
            both were.
        NotADirectoryError: ``output`` is a file, or lies below one.
    """
    held = next(path for path in (output, *output.parents) if path.exists())
    if not held.is_dir():
        raise NotADirectoryError(f"--output {output}: {held} is a file, and no folder can be there")
    if resume and overwrite:
        raise ValueError("--resume continues and --overwrite starts over: give one of them")
    for folder in folders:
        found = find_checkpoint(folder)
        if found is None or resume:
            continue
        if not overwrite:
            raise ValueError(
                f"{output} already holds a run ({found}): continue it with --resume, "
                "replace it with --overwrite, or choose another --output"
            )
        remove_checkpoints(folder)


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def remove_checkpoints(folder: Path) -> None:
    """Delete the step folders in ``folder`` and nothing else."""
    while (found := find_checkpoint(folder)) is not None:
        shutil.rmtree(found)


def as_config(experiment: Any) -> dict[str, Any]:
    """A dataclass as plain values, exactly as they come back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(experiment)))


def _leaf_differences(stored: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    for path in expected:
        if expected[path].size and path not in stored:
            yield f"{path}: not in the checkpoint, expected {expected[path].shape}"
    for path, leaf in stored.items():
        if path not in expected:
            yield f"{path}: {leaf.shape} in the checkpoint, not expected"
        elif (leaf.shape, leaf.dtype) != (expected[path].shape, expected[path].dtype):
            was, want = (f"{x.dtype}{list(x.shape)}" for x in (leaf, expected[path]))
            yield f"{path}: {was} in the checkpoint, expected {want}"


def _option_differences(
    stored: dict[str, Any], wanted: dict[str, Any], ignored: str, prefix: str = ""
) -> Iterator[str]:
    for name in sorted(stored.keys() | wanted.keys()):
        if name == ignored:
            continue
        was, want = stored.get(name), wanted.get(name)
        if isinstance(was, dict) and isinstance(want, dict):
            yield from _option_differences(was, want, ignored, f"{prefix}{name}.")
        elif was != want and name == DATA_CRC:
            yield f"the data have changed: CRC-32 {was} in the checkpoint, {want} now"
        elif was != want:
            yield f"option {prefix}{name}: {was} in the checkpoint, {want} requested"


def _parameters_first(difference: str) -> bool:
    return not difference.startswith("params/")


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
