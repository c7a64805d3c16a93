"""From the modules of a file to stacked layers: slices of other ranks, and slices without any."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora._adapter import Adapter
from jaxkfac.lslora._folder import PREFIX, tensor_keys
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._record import OWN, nonlinearity_of
from jaxkfac.lslora._settings import is_target, pattern_value


class Stack(NamedTuple):
    """A layer of the model, and what a file calls its slices.

    Attributes:
        lead: The stack; ``()`` for a layer of its own.
        inputs: Of a slice.
        outputs: Of a slice.
        modules: One for each slice, in order.
    """

    lead: tuple[int, ...]
    inputs: int
    outputs: int
    modules: list[str]


class ModuleSettings(NamedTuple):
    """One module: what the settings say of it."""

    rank: int
    alpha: Any
    scaling: float


Shapes = dict[str, tuple[int, ...]]


def expected_tensors(
    record: Mapping[str, Any], stacks: Mapping[str, Stack], stored: Mapping[str, np.ndarray]
) -> Shapes:
    """Shapes of the tensors that a file must have, by key.

    A module of which the file has nothing is left out where its settings do not name it.
    """
    phi = nonlinearity_of(record)
    keys, found = tensor_keys(phi), {}
    for stack in stacks.values():
        for module in stack.modules:
            rank = _slice(record, module).rank
            own: Shapes = {"a": (rank, stack.inputs), "b": (stack.outputs, rank), "sigma": ()}
            own["coefficients"] = () if phi is None else (len(phi.initial),)
            names = {part: f"{PREFIX}{module}.{key}" for part, key in keys.items()}
            there = any(name in stored for name in names.values())
            if there or OWN in record or is_target(record, module):
                found |= {name: own[part] for part, name in names.items()}
    return found


def untargeted(
    record: Mapping[str, Any], stacks: Mapping[str, Stack], stored: Mapping[str, np.ndarray]
) -> list[str]:
    """Modules that a file has and its settings do not name: PEFT would leave them out."""
    key = tensor_keys(None)["a"]
    modules = [m for stack in stacks.values() for m in stack.modules]
    return [m for m in modules if f"{PREFIX}{m}.{key}" in stored and not is_target(record, m)]


def stacked(
    record: Mapping[str, Any], layer: str, stack: Stack, tensors: Mapping[str, np.ndarray]
) -> tuple[Adapter, int, Any]:
    r"""A layer's adapter, its rank and its alpha.

    All slices get the largest rank; what is beyond a slice's own is zero, in A and in B, and adds
    nothing. So does a slice without an adapter: A and B are zero, and both gradients with them.
    The scaling is that of a slice of the largest rank; what another one's differs by is a factor
    of its B, which is then float32 at the least.

    Raises:
        CheckpointMismatchError: no slice has an adapter.
    """
    phi = nonlinearity_of(record)
    keys = tensor_keys(phi)
    each: list[dict[str, np.ndarray]] = []
    for module in stack.modules:
        names = {part: f"{PREFIX}{module}.{key}" for part, key in keys.items()}
        each.append({part: tensors[name] for part, name in names.items() if name in tensors})
    slices = [_slice(record, m) for m in stack.modules]
    present = [s for s, held in zip(slices, each) if "a" in held]
    if not present:
        raise CheckpointMismatchError(f"the file has no adapter of layer {layer!r}")
    widest = max(present, key=lambda s: s.rank)
    dtype = next(held["a"].dtype for held in each if "a" in held)
    leaves: dict[str, list[np.ndarray]] = {part: [] for part in keys}
    for own, held in zip(slices, each):
        if "a" not in held:
            held |= _nothing(stack, widest.rank, dtype, phi)
        extra = widest.rank - held["a"].shape[0]
        held["a"] = np.pad(held["a"], [(0, extra), (0, 0)])
        held["b"] = np.pad(held["b"], [(0, 0), (0, extra)])
        if own.scaling != widest.scaling:
            wide = np.promote_types(held["b"].dtype, np.float32)
            held["b"] = held["b"].astype(wide) * wide.type(own.scaling / widest.scaling)
        for part, x in held.items():
            leaves[part].append(x.T if part in ("a", "b") else x)
    arrays: dict[str, Any] = {"coefficients": None, "sigma": None}
    for part, parts in leaves.items():
        x = np.stack(parts)
        arrays[part] = jnp.asarray(x.reshape((*stack.lead, *x.shape[1:])))
    return Adapter(**arrays), widest.rank, widest.alpha


def _slice(record: Mapping[str, Any], module: str) -> ModuleSettings:
    rank = pattern_value(record, "rank_pattern", module, record["r"])
    alpha = pattern_value(record, "alpha_pattern", module, record["lora_alpha"])
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank {rank!r} of {module}: expected at least 1, a whole number")
    return ModuleSettings(
        rank, alpha, alpha / (math.sqrt(rank) if record.get("use_rslora") else rank)
    )


def _nothing(stack: Stack, rank: int, dtype: Any, phi: Nonlinearity | None) -> dict[str, Any]:
    """The tensors of a slice that changes nothing."""
    zeros = {
        "a": np.zeros((rank, stack.inputs), dtype),
        "b": np.zeros((stack.outputs, rank), dtype),
    }
    if phi is None:
        return zeros
    return zeros | {"coefficients": phi.first(np.float32), "sigma": np.float32(1)}
