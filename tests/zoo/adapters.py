"""Decoders of pretrained families that the library loads, against blocks written out."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac.models import Decoder, DecoderConfig
from tests._oracle import oracle
from tests._programs import labels
from tests._taps import Tap
from tests.zoo import Case, program

FAMILY = "Pretrained decoders"
CHECKED = "brute force, to 1e-5: angles and softmax are of float32"
TOKENS, DEPTH = 5, 3
SIZES = {
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
WINDOW = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.3}


def turned(x, theta):
    """Rotary positions: pairs of x (n, t, h, k) as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return jnp.concatenate([z.real, z.imag], -1)


def written_out(config: DecoderConfig):
    """The model with taps, block by block."""
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_size
    seen = np.tri(TOKENS, dtype=bool)
    near = seen & ~np.tri(TOKENS, k=-(config.sliding_window or TOKENS), dtype=bool)
    windowed = config.windowed or (config.sliding_window is not None,) * DEPTH

    def cap(x, most):
        return x if most is None else most * jnp.tanh(x / most)

    def norm(leaf, path, x, tap, at):
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_epsilon)
        scale = leaf["scale"][at] if at else leaf["scale"]
        y = x * (1 + scale) if config.unit_offset else x * scale
        return tap.scale(f"{path}/scale", x, y, shape=scale.shape, at=at, row_axes=2)  # no heads

    def dense(leaf, path, x, tap, i):
        y = x @ leaf["kernel"][i]
        if bias := "bias" in leaf:
            y = y + leaf["bias"][i]
        return tap.dense(f"{path}/kernel", x, y, at=(i,), bias=bias)

    def attention(p, path, x, tap, i):
        qkv = dense(p["qkv_proj"], f"{path}/qkv_proj", x, tap, i).reshape(*x.shape[:2], -1, size)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv], qkv[:, :, heads + kv :]
        if config.head_norms:
            q = norm(p["q_norm"], f"{path}/q_norm", q, tap, (i,))
            k = norm(p["k_norm"], f"{path}/k_norm", k, tap, (i,))
        local = windowed[i] and config.local_rotary is not None
        theta = (config.local_rotary if local else config.rotary).theta
        q, k = turned(q, theta), turned(k, theta)
        k, v = (jnp.repeat(part, heads // kv, 2) for part in (k, v))
        scale = config.attention_scale or size**-0.5
        scores = cap(jnp.einsum("nthk,nshk->nhts", q, k) * scale, config.attention_softcap)
        weights = jax.nn.softmax(jnp.where(near if windowed[i] else seen, scores, -jnp.inf), -1)
        mixed = jnp.einsum("nhts,nshk->nthk", weights, v).reshape(*x.shape[:2], -1)
        return dense(p["o_proj"], f"{path}/o_proj", mixed, tap, i)

    def gated(p, path, x, tap, i):
        both = dense(p["gate_up_proj"], f"{path}/gate_up_proj", x, tap, i)
        gate, up = jnp.split(both, 2, -1)
        act = jax.nn.silu if config.activation == "silu" else jax.nn.gelu
        return dense(p["down_proj"], f"{path}/down_proj", act(gate) * up, tap, i)

    def model(p, ids, tap: Tap):
        inner, table = p["model"], p["model"]["embed_tokens"]["embedding"]
        tied = "@embedding" if config.tied_head else ""
        name = "model/embed_tokens/embedding"
        x = tap.embedding(f"{name}{tied}", ids, table[ids], size=config.vocabulary)
        x = config.embedding_scale * x
        blocks, at = inner["layers"], "model/layers"
        for i in range(DEPTH):
            normed = lambda key, x, i=i: norm(blocks[key], f"{at}/{key}", x, tap, (i,))
            y = attention(
                blocks["self_attn"], f"{at}/self_attn", normed("input_layernorm", x), tap, i
            )
            before = "post_attention_layernorm"
            if config.post_norms:
                y, before = normed(before, y), "pre_feedforward_layernorm"
            x = x + y
            y = gated(blocks["mlp"], f"{at}/mlp", normed(before, x), tap, i)
            x = x + (normed("post_feedforward_layernorm", y) if config.post_norms else y)
        x = norm(inner["norm"], "model/norm", x, tap, ())
        if config.tied_head:
            logits = tap.dense(name, x, x @ table.T)
        else:
            logits = tap.dense("lm_head/kernel", x, x @ p["lm_head"]["kernel"])
        return cap(logits, config.logit_softcap)

    return model


def case(kind: str, **options) -> Case:
    config = DecoderConfig.from_hugging_face({"model_type": kind, **SIZES, **options})
    apply_fn, params = jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * draw.normal(size=x.shape)), params)
    batch = labels(1, 2, TOKENS, classes=11), labels(2, 2, TOKENS, classes=11)
    factors = oracle(written_out(config), params, batch)
    return Case(
        jk.Objective(apply_fn, jk.Categorical()), params, batch, factors=factors, tolerance=1e-5
    )


@program("Qwen 2: biases of q, k, v, windows above", family=FAMILY, checked=CHECKED)
def _qwen2():
    return case("qwen2", **WINDOW)


@program("Qwen 3: norms of queries and keys, tied head", family=FAMILY, checked=CHECKED)
def _qwen3():
    return case("qwen3", tie_word_embeddings=True)


@program("Gemma 2: soft caps, norms on both sides", family=FAMILY, checked=CHECKED)
def _gemma2():
    return case("gemma2", sliding_window=3, query_pre_attn_scalar=9, **CAPS)


@program("Gemma 3: two sorts of blocks, two rotary bases", family=FAMILY, checked=CHECKED)
def _gemma3():
    window = {"sliding_window": 3, "sliding_window_pattern": 2, "rope_local_base_freq": 50.0}
    return case("gemma3_text", query_pre_attn_scalar=9, **window)
