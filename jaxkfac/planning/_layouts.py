"""Programs of common model layouts, with one scanned block each; for compilation only.

Shapes in names: B examples, T positions, S positions attended to, D stream, H heads, K head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import nearest
from jaxkfac.factors import Categorical, Objective
from jaxkfac.linalg import statistics_dtype

Shapes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DecoderLayout:
    """A decoder with pre-normalized blocks, rotary attention and a gated MLP.

    depth: Number of blocks.
    width: Width of the stream.
    heads: Number of attention heads.
    hidden: Hidden size of the MLP.
    vocabulary: Number of tokens; the head is a separate matrix.
    fused: Whether q, k, v share one kernel, and gate and up another.
    """

    depth: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    fused: bool


@dataclasses.dataclass(frozen=True)
class EncoderDecoderLayout:
    """An encoder and a decoder with cross attention, as in T5 version 1.1.

    The two tables of relative positions (2048 elements in T5-XL) are left out.

    Attributes:
        depth: Number of blocks of the encoder, and of the decoder.
        width: Width of the stream.
        heads: Number of attention heads.
        hidden: Hidden size of the gated MLP.
        vocabulary: Number of tokens; one embedding, and a separate head.
    """

    depth: int
    width: int
    heads: int
    hidden: int
    vocabulary: int


def decoder_shapes(layout: DecoderLayout, dtype: DTypeLike) -> Shapes:
    """Parameters of :func:`decode`."""
    width, hidden, stack = layout.width, layout.hidden, (layout.depth,)
    kernels = {"o": (width, width), "down": (hidden, width)}
    if layout.fused:
        kernels |= {"qkv": (width, 3 * width), "gate_up": (width, 2 * hidden)}
    else:
        kernels |= dict.fromkeys("qkv", (width, width))
        kernels |= dict.fromkeys(("gate", "up"), (width, hidden))
    block: Shapes = {n: _kernel(*stack, *shape, dtype=dtype) for n, shape in kernels.items()}
    norms = {name: _shape(*stack, width, dtype=dtype) for name in ("norm_mixer", "norm_mlp")}
    return _ends(layout, dtype) | {"blocks": block | norms}


def encoder_decoder_shapes(layout: EncoderDecoderLayout, dtype: DTypeLike) -> Shapes:
    """Parameters of :func:`encode_and_decode`."""
    width, hidden, stack = layout.width, layout.hidden, (layout.depth,)
    mlp = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    attention = dict.fromkeys("qkvo", (width, width))
    cross = {f"cross_{name}": (width, width) for name in "qkvo"}

    def blocks(kernels: Shapes, norms: tuple[str, ...]) -> Shapes:
        dense = {n: _kernel(*stack, *shape, dtype=dtype) for n, shape in kernels.items()}
        return {**dense, **{n: _shape(*stack, width, dtype=dtype) for n in norms}}

    return {
        **_ends(layout, dtype),
        "encoder_norm": _shape(width, dtype=dtype),
        "encoder": blocks({**attention, **mlp}, ("norm_mixer", "norm_mlp")),
        "decoder": blocks({**attention, **cross, **mlp}, ("norm_mixer", "norm_cross", "norm_mlp")),
    }


def decode(params: ArrayTree, ids_BxT: Array, heads: int, remat: bool = False) -> Array:
    """Compute the logits of the next token."""
    x_BxTxD = params["embedding"][ids_BxT]

    def block(x: Array, p: ArrayTree) -> tuple[Array, None]:
        h = _normalised(x, p["norm_mixer"])
        q, k, v = jnp.split(_dense(h, p["qkv"]), 3, -1) if "qkv" in p else _projections(h, p, "qkv")
        q, k, v = (_by_head(projection, heads) for projection in (q, k, v))
        x = x + _dense(_attended(_rotated(q), _rotated(k), v, causal=True), p["o"])
        h = _normalised(x, p["norm_mlp"])
        if "gate_up" in p:
            gate, up = jnp.split(_dense(h, p["gate_up"]), 2, -1)
        else:
            gate, up = _dense(h, p["gate"]), _dense(h, p["up"])
        return x + _dense(jax.nn.silu(gate) * up, p["down"]), None

    x_BxTxD, _ = jax.lax.scan(_again(block, remat), x_BxTxD, params["blocks"])
    return _dense(_normalised(x_BxTxD, params["norm"]), params["head"])


def encode_and_decode(
    params: ArrayTree, inputs: tuple[Array, Array], heads: int, remat: bool = False
) -> Array:
    """Compute the logits of the target's next token, from the source and the target so far."""
    source_BxS, target_BxT = inputs

    def mixed(
        x: Array, p: ArrayTree, norm: str, names: str, memory: Array | None, causal: bool
    ) -> Array:
        prefix = "cross_" if memory is not None else ""
        h = _normalised(x, p[norm])
        attended_to = h if memory is None else memory
        q = _by_head(_dense(h, p[f"{prefix}q"]), heads)
        k, v = (_by_head(_dense(attended_to, p[f"{prefix}{name}"]), heads) for name in names)
        return x + _dense(_attended(q, k, v, causal=causal), p[f"{prefix}o"])

    def mlp(x: Array, p: ArrayTree) -> Array:
        h = _normalised(x, p["norm_mlp"])
        return x + _dense(jax.nn.gelu(_dense(h, p["gate"])) * _dense(h, p["up"]), p["down"])

    def encoder_block(x: Array, p: ArrayTree) -> tuple[Array, None]:
        return mlp(mixed(x, p, "norm_mixer", "kv", None, False), p), None

    memory_BxSxD, _ = jax.lax.scan(
        _again(encoder_block, remat), params["embedding"][source_BxS], params["encoder"]
    )
    memory_BxSxD = _normalised(memory_BxSxD, params["encoder_norm"])

    def decoder_block(x: Array, p: ArrayTree) -> tuple[Array, None]:
        x = mixed(x, p, "norm_mixer", "kv", None, True)
        return mlp(mixed(x, p, "norm_cross", "kv", memory_BxSxD, False), p), None

    x_BxTxD, _ = jax.lax.scan(
        _again(decoder_block, remat), params["embedding"][target_BxT], params["decoder"]
    )
    return _dense(_normalised(x_BxTxD, params["norm"]), params["head"])


def _again(block: Callable[..., Any], remat: bool) -> Any:
    """The body of a scan, recomputed in the backward pass with ``remat``."""
    return jax.checkpoint(block, prevent_cse=False) if remat else block


def _shape(*sizes: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _kernel(*sizes: int, dtype: DTypeLike) -> Shapes:
    return {"kernel": _shape(*sizes, dtype=dtype)}


def _ends(layout: DecoderLayout | EncoderDecoderLayout, dtype: DTypeLike) -> Shapes:
    return {
        "embedding": _shape(layout.vocabulary, layout.width, dtype=dtype),
        "norm": _shape(layout.width, dtype=dtype),
        "head": _kernel(layout.width, layout.vocabulary, dtype=dtype),
    }


def _dense(x: Array, p: ArrayTree) -> Array:
    return x @ p["kernel"]


def _projections(h: Array, p: ArrayTree, names: str) -> list[Array]:
    return [_dense(h, p[name]) for name in names]


def _normalised(x: Array, scale: Array) -> Array:
    """Root mean square norm, in float32 or wider."""
    wide = x.astype(statistics_dtype(x.dtype))
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def _by_head(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _rotated(x_BxTxHxK: Array) -> Array:
    """Rotary positions, with the two halves of a head separate."""
    length, size = x_BxTxHxK.shape[1], x_BxTxHxK.shape[-1]
    rates = 10000.0 ** (-jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * rates
    cos, sin = (f(angles).astype(x_BxTxHxK.dtype) for f in (jnp.cos, jnp.sin))
    first_half, second_half = jnp.split(x_BxTxHxK, 2, -1)
    return jnp.concatenate(
        [first_half * cos - second_half * sin, second_half * cos + first_half * sin], -1
    )


def _attended(q_BxTxHxK: Array, k_BxSxHxK: Array, v_BxSxHxK: Array, *, causal: bool) -> Array:
    """Attention with explicit weights, as without a fused kernel."""
    scores_BxHxTxS = jnp.einsum("bthk,bshk->bhts", q_BxTxHxK, k_BxSxHxK)
    wide = scores_BxHxTxS.astype(statistics_dtype(scores_BxHxTxS.dtype))
    if causal:
        visible = jnp.tri(wide.shape[-2], wide.shape[-1], dtype=bool)
        wide = jnp.where(visible, wide, jnp.finfo(wide.dtype).min)
    weights = jax.nn.softmax(wide / q_BxTxHxK.shape[-1] ** 0.5, -1).astype(q_BxTxHxK.dtype)
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v_BxSxHxK)
    return mixed.reshape(*mixed.shape[:-2], -1)


# ---------------- presets


Layout = DecoderLayout | EncoderDecoderLayout

PRESETS: dict[str, Layout] = {
    # TinyLlama's sizes, with as many heads of keys as of queries.
    "llama-1b": DecoderLayout(22, 2048, 32, 5632, 32000, fused=False),
    "llama-7b": DecoderLayout(32, 4096, 32, 11008, 32000, fused=False),
    "phi-3-mini": DecoderLayout(32, 3072, 32, 8192, 32064, fused=True),
    "t5-xl": EncoderDecoderLayout(24, 2048, 32, 5120, 32128),
    "flan-t5-xl": EncoderDecoderLayout(24, 2048, 32, 5120, 32128),
}


class SourceAndTarget(NamedTuple):
    """Token ids of an encoder-decoder: one argument with two arrays."""

    source: Any
    target: Any


class Preset(NamedTuple):
    """A training described by shapes.

    Attributes:
        objective: Mean cross entropy of the next token.
        params: ``jax.ShapeDtypeStruct`` for every parameter.
        batch: ``jax.ShapeDtypeStruct`` for ``(inputs, targets)``.
    """

    objective: Objective
    params: Any
    batch: Any


def preset(
    name: str, *, examples: int, tokens: int, dtype: DTypeLike = jnp.float32, remat: bool = False
) -> Preset:
    """The training of a preset layout.

    Args:
        name: One of ``PRESETS``.
        examples: Number of examples in the batch.
        tokens: Tokens per example; for an encoder-decoder, per input and per target.
        dtype: Dtype of the parameters.
        remat: Recompute each block's activations in the backward pass.

    Raises:
        ValueError: the name is unknown; lists the nearest.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not known; the nearest are {nearest(name, PRESETS)}")
    sizes = {"examples": examples, "tokens": tokens}
    return shaped(PRESETS[name], **sizes, dtype=dtype, remat=remat)


def shaped(
    layout: Layout,
    *,
    examples: int,
    tokens: int,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> Preset:
    """The training of a given layout; see :func:`preset`."""
    ids = jax.ShapeDtypeStruct((examples, tokens), jnp.int32)
    if isinstance(layout, EncoderDecoderLayout):
        params = encoder_decoder_shapes(layout, dtype)
        objective = Objective(_with(encode_and_decode, layout.heads, remat), Categorical())
        return Preset(objective, params, (SourceAndTarget(ids, ids), ids))
    params = decoder_shapes(layout, dtype)
    return Preset(Objective(_with(decode, layout.heads, remat), Categorical()), params, (ids, ids))


def _with(apply: Callable[..., Array], heads: int, remat: bool) -> Any:
    def apply_fn(params: ArrayTree, inputs: ArrayTree) -> Any:
        return apply(params, inputs, heads, remat)

    return apply_fn
