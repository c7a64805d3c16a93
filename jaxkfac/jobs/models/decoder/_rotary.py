"""Rotary positions, and rules that extend them beyond the context of pretraining."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkfac.linalg import statistics_dtype

Kind = Literal["default", "linear", "dynamic", "llama3", "longrope"]
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclasses.dataclass(frozen=True)
class Rotary:
    r"""Angles $p \, \theta^{-2i/d}$ of position p and pair i, by one of five rules.

    ``linear`` divides frequencies by ``factor``; ``llama3`` only low ones, with a transition
    between; ``dynamic`` raises $\theta$ with the length of a sequence beyond the context;
    ``longrope`` divides by one of two lists, for sequences within the original context and
    for longer ones, and scales cosine and sine.

    Attributes:
        kind: The rule.
        theta: The base.
        partial: Fraction of each head, from its first element, that is rotated.
        factor: Ratio of the extended to the original context.
        original_context: Number of positions in pretraining; for ``dynamic`` those of the model.
        low_freq_factor: Wavelengths above ``original_context / low_freq_factor`` are divided.
        high_freq_factor: Wavelengths below ``original_context / high_freq_factor`` are unchanged.
        short_factor: Divisors of the frequencies, one for each.
        long_factor: The same for long sequences.
        attention_factor: Factor of cosine and sine.

    References:
        J. Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        Y. Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
    """

    kind: Kind = "default"
    theta: float | int = 10000.0
    partial: float | int = 1.0
    factor: float | int = 1.0
    original_context: int = 0
    low_freq_factor: float | int = 1.0
    high_freq_factor: float | int = 4.0
    short_factor: tuple[float | int, ...] = ()
    long_factor: tuple[float | int, ...] = ()
    attention_factor: float | int = 1.0

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "Rotary":
        """Read ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``, of a config.json."""
        parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = "longrope" if kind == "su" else kind
        if kind not in get_args(Kind):
            raise ValueError(
                f"rope_type: expected one of {', '.join(get_args(Kind))} (or su), got {kind!r}"
            )
        if missing := [name for name in _NEEDS[kind] if parameters.get(name) is None]:
            raise ValueError(f"rope_type {kind!r} needs {missing} beside it in config.json")
        context = config["max_position_embeddings"]
        # In Phi-3 this number is outside of the scaling, in Llama inside.
        inside = parameters.get("original_max_position_embeddings")
        original = config.get("original_max_position_embeddings") or inside or context
        factor = parameters.get("factor") or (context / original if kind == "longrope" else 1.0)
        attention = parameters.get("attention_factor")
        if attention is None:
            longer = kind == "longrope" and factor > 1
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if longer else 1.0
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        return cls(
            kind=kind,
            theta=parameters.get("rope_theta") or config.get("rope_theta") or 10000.0,
            partial=1.0 if partial is None else partial,
            factor=factor,
            original_context=context if kind == "dynamic" else original,
            low_freq_factor=parameters.get("low_freq_factor", 1.0),
            high_freq_factor=parameters.get("high_freq_factor", 4.0),
            short_factor=tuple(parameters.get("short_factor") or ()),
            long_factor=tuple(parameters.get("long_factor") or ()),
            attention_factor=attention,
        )

    def size(self, head_size: int) -> int:
        """Number of rotated elements of a head."""
        return int(head_size * self.partial)

    def check(self, head_size: int) -> None:
        """Check that the options fit heads of this size.

        Raises:
            ValueError: the number of rotated elements is odd, or a list has the wrong length.
        """
        size = self.size(head_size)
        if size % 2 or size < 2:
            raise ValueError(f"rotary positions need pairs: {size} of {head_size} elements")
        if self.kind == "dynamic" and size < 4:
            raise ValueError(f"rotary kind 'dynamic' needs two pairs, got {size} elements")
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if (length := len(getattr(self, name))) != size // 2:
                    raise ValueError(
                        f"{name}: expected {size // 2} numbers, one per pair, got {length}"
                    )

    def angles(
        self, positions: Int[Array, "B T"], lengths: Int[Array, "B T"], head_size: int
    ) -> Float[Array, "B T half"]:
        """Angles in float32, as in the training of the models.

        Args:
            positions: Positions of the tokens in their sequences.
            lengths: Length of the sequence of each token; used only by rules that depend on
                it.
            head_size: Size of a head.
        """
        size = self.size(head_size)
        # In float32 from the start, as in the reference implementations: at position 8000 the last
        # bit of a frequency changes the angle visibly.
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        powers = np.power(np.float32(self.theta), exponents)
        where = positions.astype(jnp.float32)[..., None]
        match self.kind:
            case "dynamic":
                longest = jnp.maximum(lengths, self.original_context).astype(jnp.float32)
                ratio = self.factor * longest / self.original_context - (self.factor - 1)
                base = self.theta * ratio ** (size / (size - 2))
                return where / base[..., None] ** exponents
            case "longrope":
                lists = (self.short_factor, self.long_factor)
                short_factors, long_factors = (np.asarray(x, np.float32) for x in lists)
                is_long = (lengths > self.original_context)[..., None]
                return where * jnp.where(
                    is_long, 1 / (long_factors * powers), 1 / (short_factors * powers)
                )
            case "linear":
                return where * (1 / powers / np.float32(self.factor))
            case "llama3":
                return where * self._llama3(1 / powers)
        return where * (1 / powers)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_context * frequencies / np.float32(2 * np.pi)
        kept_fraction = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - kept_fraction) / self.factor + kept_fraction).astype(np.float32) * frequencies


def rotate(
    x_BxTxHxK: Float[Array, "B T H K"], angles_BxTxR: Float[Array, "B T R"], scale: Float[Array, ""]
) -> Float[Array, "B T H K"]:
    """Rotate element i of a head's first ``2 R`` with element ``i + R``; keep the rest."""
    half = angles_BxTxR.shape[-1]
    # At least float32: in bfloat16 cosine and sine are wrong in the third digit.
    wide = statistics_dtype(x_BxTxHxK.dtype)
    rotated, unrotated = x_BxTxHxK[..., : 2 * half].astype(wide), x_BxTxHxK[..., 2 * half :]
    scale, angles = scale.astype(wide), angles_BxTxR.astype(wide)
    cos, sin = (scale * f(angles)[:, :, None] for f in (jnp.cos, jnp.sin))
    first_half, second_half = rotated[..., :half], rotated[..., half:]
    rotated = jnp.concatenate(
        [first_half * cos - second_half * sin, second_half * cos + first_half * sin], -1
    )
    return jnp.concatenate([rotated.astype(x_BxTxHxK.dtype), unrotated], -1)
