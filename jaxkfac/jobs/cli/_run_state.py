"""The state of a run as flat arrays, and back, for no other run than that it belongs to."""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.interception import leaves_by_path, with_leaves
from jaxkfac.jobs.cli._checkpoint import Checkpoint
from jaxkfac.memory import whole_here

PyTree = Any
_SHOWN = 12
OPTIMIZERS = frozenset({"kfac", "adamw", "adafactor"})
DATA_CRC = "data_crc32"  # beside a config's options: what they cannot say of the data


def flatten_state(
    params: PyTree, optimizer_state: PyTree, *, keep: bool = True
) -> dict[str, np.ndarray]:
    """``{path: array}`` of everything that a run carries from one update to the next, copied.

    Of arrays on several processes these exchange their parts, one array at a time: all of them
    call, and those that ``keep`` nothing have an empty dictionary.
    """
    tree = {"params": params, "optimizer": optimizer_state}
    copies: dict[str, np.ndarray] = {}
    for path, leaf in leaves_by_path(tree).items():
        whole = whole_here(leaf)
        if keep:
            # On a CPU asarray is a view, and an array that has one is copied when it is donated;
            # device_get and np.array would leave a view in the array itself.
            copies[path] = np.array(np.asarray(whole))
    return copies


def is_whole(*trees: PyTree) -> bool:
    """Whether all arrays are there: those donated to a program that was broken off are not."""
    return not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(trees))


def restore_state(
    checkpoint: Checkpoint,
    params: PyTree,
    optimizer_state: PyTree,
    config: dict[str, Any],
    *,
    lacking: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[PyTree, PyTree]:
    """The stored values in the structure of ``params`` and ``optimizer_state``.

    Both may be of ``jax.ShapeDtypeStruct``: nothing is read of them but shapes and dtypes.

    Args:
        checkpoint: That is restored.
        params: Of the run.
        optimizer_state: Of the run.
        config: Of the run.
        lacking: What options are where an older version wrote the checkpoint without them.

    Raises:
        CheckpointMismatchError: the checkpoint is of another model or configuration; every
            path and option that differs is listed.
    """
    tree = {"params": params, "optimizer": optimizer_state}
    expected = leaves_by_path(tree)
    ignored = OPTIMIZERS - {checkpoint.optimizer}  # their options are there, and count for nothing
    differences = [
        *option_differences(_filled(checkpoint.config, lacking), config, ignored),
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


def _filled(stored: dict[str, Any], lacking: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _filled(stored.get(name, {}), value)
        for name, value in lacking.items()
        if isinstance(value, Mapping)
    }
    return {**lacking, **stored, **inner}


def option_differences(
    stored: dict[str, Any], wanted: dict[str, Any], ignored: Collection[str] = (), prefix: str = ""
) -> Iterator[str]:
    """Which options differ, in words."""
    for name in sorted(stored.keys() | wanted.keys()):
        if not prefix and name in ignored:
            continue
        was, want = stored.get(name), wanted.get(name)
        if isinstance(was, dict) and isinstance(want, dict):
            yield from option_differences(was, want, ignored, f"{prefix}{name}.")
        elif was != want and name == DATA_CRC:
            yield f"the data have changed: CRC-32 {was} in the checkpoint, {want} now"
        elif was != want:
            yield f"option {prefix}{name}: {was} in the checkpoint, {want} requested"


def _parameters_first(difference: str) -> bool:
    return not difference.startswith("params/")
