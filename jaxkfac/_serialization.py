"""Pytrees of ours as ``flax.serialization`` writes them: their arrays, and nothing static."""

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from flax import serialization

T = TypeVar("T")


def serializable(cls: type[T]) -> type[T]:
    """Register a dataclass whose static fields come from the target when it is restored."""
    fields = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]  # pyright: ignore[reportArgumentType]

    def written(x: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(x, name)) for name in fields}

    def read(target: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(fields):
            raise ValueError(
                f"{cls.__name__}: the bytes hold {sorted(state)}, expected {sorted(fields)}"
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in fields
        }
        out = dataclasses.replace(target, **restored)
        shapes, wanted = ([np.shape(leaf) for leaf in jax.tree.leaves(x)] for x in (out, target))
        if shapes != wanted:
            other = [pair for pair in zip(shapes, wanted, strict=True) if pair[0] != pair[1]]
            raise ValueError(
                f"{cls.__name__}: the bytes are of another model: an array of shape {other[0][0]} "
                f"came where {other[0][1]} was expected"
            )
        return out

    serialization.register_serialization_state(cls, written, read)
    return cls
