"""Checkpoints of a run, and its state as flat arrays and back."""

import contextlib
import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac._errors import CheckpointMismatchError, DamagedFileError
from jaxkfac.files import PARTIAL, Archive, probe_folder, write_archive
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._paths import check_folder, find_checkpoint, no_checkpoint, numbered_files
from jaxkfac.jobs.cli._progress import phase
from jaxkfac.linalg import packed_shape
from jaxkfac.memory import whole_here

# ---------------- checkpoint files


_FORM = "jaxkfac.checkpoint"
_CHECKPOINTS_TO_KEEP = 2  # checkpoints to keep for each run
_ABOUT = ("config", "optimizer", "records", "position")


class Checkpoint(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        leaves: ``{path: array}`` of the parameters and the optimizer's state.
        config: The experiment as plain values, with a checksum of the data where they may change.
        optimizer: ``"kfac"`` or ``"adamw"``.
        records: Measurements of the run so far, as plain values.
        step: Number of updates made.
        position: Position in the data, as plain values; ``None`` where the step determines it.
    """

    leaves: dict[str, np.ndarray]
    config: dict[str, Any]
    optimizer: str
    records: dict[str, Any]
    step: int
    position: dict[str, Any] | None = None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write the file ``folder/step`` and keep the newest two; Ctrl-C waits until it is complete.

    Raises:
        OSError: the file could not be written; the message says which checkpoint counts then.
    """
    target = folder / str(checkpoint.step)
    about = {
        "config": checkpoint.config,
        "optimizer": checkpoint.optimizer,
        "records": checkpoint.records,
        "position": checkpoint.position,
    }
    with interrupts_deferred("writing the checkpoint"), phase("writing the checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f".*{PARTIAL}"):  # left by a killed run
            partial.unlink()
        last = find_checkpoint(folder)
        if last != target:
            write_archive(
                target,
                _FORM,
                about,
                checkpoint.leaves.items(),
                what=f"the checkpoint of update {checkpoint.step}",
                nbytes=sum(leaf.nbytes for leaf in checkpoint.leaves.values()),
                remains="there is no older one"
                if last is None
                else f"that of update {last.name} counts: make room and continue with --resume",
            )
        for old in numbered_files(folder)[:-_CHECKPOINTS_TO_KEEP]:
            _remove(old)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, the newest of a folder, or the K-FAC one of an output folder.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``; the message says what is there.
        DamagedFileError: the file is damaged; the message names the array, and an intact checkpoint
            next to it.
    """
    newest = find_checkpoint(path)
    if newest is None:
        raise no_checkpoint(path)
    with _advice_added(newest), Archive(newest, _FORM, "checkpoint") as stored:
        leaves = {name: stored.read(name) for name in stored.names}
        about = {name: stored.about[name] for name in _ABOUT}
    return Checkpoint(leaves, step=int(newest.name), **about)


@contextlib.contextmanager
def _advice_added(damaged: Path) -> Iterator[None]:
    try:
        yield
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {_advice(damaged)}") from error


def _advice(damaged: Path) -> str:
    """How to continue without this checkpoint."""
    intact = [p for p in numbered_files(damaged.parent) if p != damaged and _is_whole_file(p)]
    if not intact:
        return "no other checkpoint beside it is known to be whole: start again with --overwrite"
    older = [p for p in intact if int(p.name) < int(damaged.name)] or intact
    return (
        f"{older[-1]} is whole: to continue from update {older[-1].name}, delete {damaged} and "
        "run again with --resume"
    )


def _is_whole_file(path: Path) -> bool:
    try:
        Archive(path, _FORM, "checkpoint").close()
    except (ValueError, OSError):
        return False
    return True


def say_nothing_saved(folder: Path) -> None:
    """Report on standard error which checkpoint counts after a state was lost."""
    newest = find_checkpoint(folder)
    last = "there is none" if newest is None else f"it is from update {newest.name}"
    print(f"stopped inside an update: the last checkpoint counts; {last}", file=sys.stderr)


RESUME_OR_OVERWRITE = "--resume continues and --overwrite starts over: give one of them"


def existing_run(folders: Sequence[Path]) -> str:
    """What the folders hold, for :func:`check_output`: the first that has a checkpoint counts."""
    checkpoint = next(filter(None, map(find_checkpoint, folders)), None)
    return "" if checkpoint is None else f"a run ({checkpoint})"


def check_output(arguments: Any, existing: str, *, writes: bool = True) -> None:
    """Refuse a run that would harm the one in its output folder.

    The process that ``writes`` also tests, before anything is read or compiled, whether the folder
    is writable. With ``overwrite``, removing the old files is left to the caller.

    Args:
        arguments: Options with ``output``, ``resume`` and ``overwrite``.
        existing: What the output folder already holds; empty for nothing.
        writes: Whether this process writes there.

    Raises:
        ValueError: there is a run, and neither ``resume`` nor ``overwrite`` was requested; or
            both were.
        NotADirectoryError: ``output`` is a file, or lies below one.
        OSError: no file can be written there.
    """
    output = arguments.output
    check_folder(output)
    if arguments.resume and arguments.overwrite:
        raise ValueError(RESUME_OR_OVERWRITE)
    if existing and not (arguments.resume or arguments.overwrite):
        raise ValueError(
            f"{output} already holds {existing}: continue it with --resume, replace it with "
            "--overwrite, or choose another --output"
        )
    if writes:
        probe_folder(output)
        if arguments.resume and not existing:
            nothing = f"--resume: nothing to resume in {output}, so the run starts anew"
            print(nothing, file=sys.stderr)


def remove_checkpoints(folder: Path) -> None:
    """Delete the checkpoints in ``folder`` and nothing else."""
    for path in numbered_files(folder):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()


# ---------------- checkpoints written in the background


class CheckpointWriter:
    """Writes checkpoints one after the other, in its own thread.

    A checkpoint holds copies, so the state may be donated while it is written. The next checkpoint
    waits for the previous one, so at most one is in main memory. Files are written atomically,
    however the process ends.

    Attributes:
        error: Why a checkpoint could not be written, or ``None``; later ones are then skipped.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def save(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Start to write ``folder/step``, as :func:`save_checkpoint` does."""
        self.wait()
        if self.error is not None:
            return

        def write() -> None:
            try:
                save_checkpoint(folder, checkpoint)
            except Exception as error:  # the training thread raises it
                self.error = error

        # A second Ctrl-C ends the process, which does not wait for a daemon.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk or has failed; a first Ctrl-C waits too."""
        if self._thread is not None:
            with interrupts_deferred("writing the checkpoint"):
                self._thread.join()
            self._thread = None


@contextmanager
def checkpoint_writer() -> Iterator[CheckpointWriter]:
    """A writer that finishes its last checkpoint when the block ends, also by an error.

    Raises:
        OSError: a checkpoint could not be written.
    """
    writer = CheckpointWriter()
    try:
        yield writer
    except BaseException:  # more informative than a failure to write
        writer.wait()
        raise
    writer.wait()
    if writer.error is not None:
        raise writer.error


# ---------------- the state of a run as flat arrays, and back


_SHOWN = 12
OPTIMIZERS = frozenset({"kfac", "adamw", "adafactor"})
DATA_CRC = "data_crc32"  # an entry of a config in addition to the options: the checksum of the data
_CRCS = {
    DATA_CRC: "the data have",
    "train_crc32": "the training texts have",
    "query_crc32": "the queries have",
    "params_crc32": "the model's parameters have",
}


def flatten_state(
    params: ArrayTree, optimizer_state: ArrayTree, *, keep: bool = True
) -> dict[str, np.ndarray]:
    """``{path: array}`` copies of everything that a run carries from one update to the next.

    Processes that share arrays exchange their shards, one array at a time. All of them must call;
    those with ``keep=False`` receive an empty dictionary.
    """
    tree = {"params": params, "optimizer": optimizer_state}
    copies: dict[str, np.ndarray] = {}
    for path, leaf in leaves_by_path(tree).items():
        full_array = whole_here(leaf)
        if keep:
            # On a CPU, asarray is a view, and donating an array with a view copies it; device_get
            # and np.array would leave a view inside the array itself.
            copies[path] = np.array(np.asarray(full_array))
    return copies


def is_whole(*trees: ArrayTree) -> bool:
    """Whether all arrays exist; an interrupted program has deleted those donated to it."""
    return not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(trees))


def restore_state(
    checkpoint: Checkpoint,
    params: ArrayTree,
    optimizer_state: ArrayTree,
    config: dict[str, Any],
) -> tuple[ArrayTree, ArrayTree]:
    """The stored values in the structure of ``params`` and ``optimizer_state``.

    Both may hold ``jax.ShapeDtypeStruct``: only their shapes and dtypes are read.

    Args:
        checkpoint: The checkpoint to restore.
        params: Parameters of the run.
        optimizer_state: Optimizer state of the run.
        config: Options of the run.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model or configuration; the
            message lists every path and option that differs.
    """
    tree = {"params": params, "optimizer": optimizer_state}
    expected = leaves_by_path(tree)
    ignored = OPTIMIZERS - {checkpoint.optimizer}  # options of the optimizers that are not used
    differences = [
        *option_differences(checkpoint.config, config, ignored),
        *sorted(_leaf_differences(checkpoint.leaves, expected), key=_parameters_first),
    ]
    if differences:
        shown = differences[:_SHOWN]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        pairs = [(x, expected[path]) for path, x in checkpoint.leaves.items() if path in expected]
        raise CheckpointMismatchError(
            "the checkpoint was written by another model or configuration:\n  "
            + "\n  ".join(shown)
            + (_OTHER_STORAGE if any(itertools.starmap(_is_triangle_of_other, pairs)) else "")
            + "\nresume with the options it was written with, or choose another --output"
        )
    stored = {path: jnp.asarray(leaf) for path, leaf in checkpoint.leaves.items()}
    empty = {path: jnp.zeros(x.shape, x.dtype) for path, x in expected.items() if not x.size}
    restored = with_leaves(tree, stored | empty)
    return restored["params"], restored["optimizer"]


_OTHER_STORAGE = (
    "\nkfac stores one triangle of each matrix, except on CPUs (jk.kfac(packed=)): a checkpoint of "
    "one storage does not continue in the other, so resume on the kind of device that wrote it"
)


def _is_triangle_of_other(one: Any, other: Any) -> bool:
    """Whether one array holds matrices in full, and the other one triangle of each of them."""
    if min(one.ndim, other.ndim) < 2 or one.shape[:-2] != other.shape[:-2]:
        return False
    full, triangle = sorted((one, other), key=lambda x: x.size, reverse=True)
    n, rows = full.shape[-1], full.shape[-2]
    return n == rows > 1 and triangle.shape[-2:] == packed_shape(n)


def as_config(experiment: Any) -> dict[str, Any]:
    """A dataclass as plain values, exactly as JSON returns them."""
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


def option_differences(
    stored: dict[str, Any],
    requested: dict[str, Any],
    ignored: Collection[str] = (),
    prefix: str = "",
) -> Iterator[str]:
    """Describe the options that differ."""
    for name in sorted(stored.keys() | requested.keys()):
        if not prefix and name in ignored:
            continue
        was, want = stored.get(name), requested.get(name)
        if isinstance(was, dict) and isinstance(want, dict):
            yield from option_differences(was, want, ignored, f"{prefix}{name}.")
        elif was != want and name in _CRCS:
            yield f"{_CRCS[name]} changed: CRC-32 {was} in the checkpoint, {want} now"
        elif was != want:
            yield f"option {prefix}{name}: {was} in the checkpoint, {want} requested"


def _parameters_first(difference: str) -> bool:
    return not difference.startswith("params/")
