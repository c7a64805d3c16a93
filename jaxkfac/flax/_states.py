"""Training states: pytrees of ours as ``flax.serialization`` writes them, and Linen's own.

A class is registered with Flax where it is defined. Flax is imported for this if it was not before,
so it makes no difference which of Flax and jaxkfac a program imports first.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from flax import serialization, struct
from flax.training.train_state import TrainState as LinenTrainState

__all__ = ["LinenTrainState", "serializable", "state_field"]

T = TypeVar("T")
state_field = struct.field  # of a class derived from LinenTrainState


def serializable(cls: type[T]) -> type[T]:
    """Register a dataclass whose static fields come from the target when it is restored."""
    known = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    fields = [f.name for f in known if not f.metadata.get("static")]
    optional = [f.name for f in known if f.name in fields and f.default is None]

    def held(x: Any) -> list[str]:
        # Without what is optional and absent: bytes from before there was such a field fit.
        return [name for name in fields if name not in optional or getattr(x, name) is not None]

    def written(x: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(x, name)) for name in held(x)}

    def read(target: Any, state: dict[str, Any]) -> Any:
        state = {k: v for k, v in state.items() if k not in optional or v is not None}
        expected = held(target)
        for name in optional:
            if name in state and name not in expected:
                raise ValueError(
                    f"{cls.__name__}: the bytes hold {name}, and the target has {name}=None: "
                    f"give a target that has them, like the object that was written"
                )
            if name in expected and name not in state:
                raise ValueError(
                    f"{cls.__name__}: the bytes hold no {name}, and the target has them: give "
                    f"dataclasses.replace(target, {name}=None)"
                )
        if set(state) != set(expected):
            raise ValueError(
                f"{cls.__name__}: the bytes hold {sorted(state)}, expected {sorted(expected)}"
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in expected
        }
        out = dataclasses.replace(target, **restored)
        shapes, wanted = ([np.shape(leaf) for leaf in jax.tree.leaves(x)] for x in (out, target))
        if shapes != wanted:
            other = [pair for pair in zip(shapes, wanted, strict=True) if pair[0] != pair[1]]
            raise ValueError(
                f"{cls.__name__}: the bytes belong to another model, or to a state with another "
                f"packed=: an array of shape {other[0][0]} came where {other[0][1]} was expected; "
                "read them into tx.init(params) of the optimizer that wrote them"
            )
        return out

    serialization.register_serialization_state(cls, written, read)
    return cls
