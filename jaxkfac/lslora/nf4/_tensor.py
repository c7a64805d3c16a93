"""A kernel in NF4."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.interception import EncodedParameter
from jaxkfac.lslora.nf4._levels import LEVELS, NESTED_BLOCK


class Nested(NamedTuple):
    """The second level: ``scale = levels[code] * absmax + offset``.

    Attributes:
        absmax: One for each 256 scales of a slice, ``(stack..., blocks)`` float32.
        levels: What the 256 codes stand for, ``(stack..., 256)`` float32.
        offset: Mean of the slice's scales, ``(stack...,)`` float32.
    """

    absmax: Any
    levels: Any
    offset: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NF4(EncodedParameter):
    """A kernel, or a stack of them, in four bits: a pytree that stands where the array stood.

    It passes through ``jit`` as an argument; ``lax.scan``, ``jax.tree.map(lambda x: x[i], ...)``
    and ``jnp.stack`` act on its stacked axes. Only :func:`dequantize` and the function that
    ``jk.lslora.attach`` returns read it. 4.13 bits an element with nested scales, else 4.5.

    Blocks run along the inputs of one output, as in the flattened ``(out, in)`` weight of
    PyTorch, whatever the kernel's own order of axes.

    Attributes:
        codes: ``(stack..., out, in / 2)`` uint8: two codes in a byte, the first in the upper half.
        absmax: Scale of each block, ``(stack..., out, in / block)``: float32, or the uint8 codes
            of the second level.
        nested: The second level, or ``None``.
        features: Shape of one slice.
        inputs: Which of its axes are contracted.
        dtype: What it decodes to.
        block: Inputs to a scale.
    """

    codes: Any
    absmax: Any
    nested: Nested | None
    features: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.codes.shape[:-2])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, *self.features)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def __repr__(self) -> str:
        double = ", double" if self.nested is not None else ""
        return f"NF4({self.shape}, {self.dtype}, block={self.block}{double})"

    def scales(self) -> Float[Array, "*stack out blocks"]:
        """The scale of each block, float32."""
        if self.nested is None:
            return self.absmax
        flat = self.absmax.reshape(*self.stack, -1)
        levels = jnp.take_along_axis(
            self.nested.levels, flat.astype(jnp.int32), -1, mode="promise_in_bounds"
        )
        absmax = jnp.repeat(self.nested.absmax, NESTED_BLOCK, axis=-1)[..., : flat.shape[-1]]
        product = levels * absmax
        # Rounded before the offset is added, as bitsandbytes does: a compiler that fuses the two
        # keeps the product's last bits, and no barrier of XLA's keeps LLVM from it. A select does.
        product = jnp.where(product == product, product, jnp.nan)
        return (product + self.nested.offset[..., None]).reshape(self.absmax.shape)

    def decode(self) -> Float[Array, "..."]:
        """The kernel, ``dtype`` and ``shape``; computed in float32."""
        levels = jnp.asarray(LEVELS)
        # Two look-ups in 16 entries, where the codes lie: faster on a CPU than one in 256 pairs.
        halves = [_look_up(levels, self.codes >> 4), _look_up(levels, self.codes & 15)]
        blocks = jnp.stack(halves, -1).reshape(*self.absmax.shape, self.block)
        values = (blocks * self.scales()[..., None]).astype(self.dtype)
        order = [d for d in range(len(self.features)) if d not in self.inputs]
        order += self.inputs
        n = len(self.stack)
        own = sorted(range(len(order)), key=order.__getitem__)
        values = values.reshape(*self.stack, *(self.features[d] for d in order))
        return values.transpose(*range(n), *(n + d for d in own))


def _look_up(levels: Array, codes: Array) -> Array:
    return levels.at[codes].get(mode="promise_in_bounds")
