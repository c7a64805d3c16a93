"""The library's own encoder-decoder, against brute force over blocks written out."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models.encoder_decoder._blocks import buckets
from jaxkfac.models import EncoderDecoder, EncoderDecoderConfig, Pairs
from tests._oracle import oracle
from tests._programs import labels
from tests._taps import Tap
from tests.zoo import Case, program

FAMILY = "Encoder and decoder"
RELU = EncoderDecoderConfig(
    vocabulary=11, width=6, hidden=5, encoder_depth=2, decoder_depth=2, num_heads=2,
    head_size=4, num_buckets=4, max_distance=4,
)  # fmt: skip
LENGTHS = jnp.asarray([[5], [3]])


def written_out(config: EncoderDecoderConfig):
    """The model with taps. Rows of the source are those of ``positions``."""
    heads, gated = (config.num_heads, config.head_size), config.gated

    def norm(p, path, x, tap, at=(), positioned=False):
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_epsilon)
        scale = p["layer_norm"]["scale"][at] if at else p["scale"]
        shape = (config.width,)
        return tap.scale(f"{path}/scale", x, x * scale, shape=shape, at=at, positioned=positioned)

    def dense(p, path, x, tap, i, positioned):
        y = x @ p[path.rsplit("/", 1)[1]]["kernel"][i]
        return tap.dense(f"{path}/kernel", x, y, at=(i,), positioned=positioned)

    def position_bias(p, path, length, tap, rows, both_sides):
        """A row of the table for every score; only its own bucket's counts."""
        ahead = np.arange(length) - np.arange(length)[:, None]
        num = config.num_buckets // 2 if both_sides else config.num_buckets
        distance = np.abs(ahead) if both_sides else np.maximum(-ahead, 0)
        bucket = buckets(num, config.max_distance)[np.minimum(distance, config.max_distance)]
        bucket = bucket + num * (both_sides & (ahead > 0))
        one_hot = jnp.asarray(np.eye(config.num_buckets)[bucket])[..., None]
        table = p["relative_attention_bias"]["embedding"]
        y = jnp.broadcast_to(table, (rows, length, length, *table.shape))
        y = tap.lone_bias(
            f"{path}/relative_attention_bias/embedding", y, shape=table.shape, positioned=False
        )
        return jnp.einsum("ntsbh,tsbx->nhts", y, one_hot)

    def attention(p, path, x, other, seen, tap, i, bias=0.0, sides=(False, False)):
        """``sides``: whether queries, and keys, stand where the source does."""
        q, k, v = (
            dense(p, f"{path}/{name}", rows, tap, i, side).reshape(*rows.shape[:2], *heads)
            for name, rows, side in zip("qkv", (x, other, other), (sides[0], sides[1], sides[1]))
        )
        scores = jnp.einsum("nthk,nshk->nhts", q, k) + bias
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        mixed = jnp.einsum("nhts,nshk->nthk", weights, v)
        return dense(p, f"{path}/o", mixed.reshape(*x.shape[:2], -1), tap, i, sides[0])

    def feed_forward(p, path, x, tap, i, side):
        if gated:
            gate, up = (dense(p, f"{path}/wi_{n}", x, tap, i, side) for n in (0, 1))
            hidden = jax.nn.gelu(gate) * up
        else:
            hidden = jax.nn.relu(dense(p, f"{path}/wi", x, tap, i, side))
        return dense(p, f"{path}/wo", hidden, tap, i, side)

    def stack(p, name, x, seen, tap, memory=None, memory_seen=None):
        side, depth = memory is None, config.encoder_depth
        for i in range(depth):
            # the table is read again by every block
            bias = position_bias(p, name, x.shape[1], tap, x.shape[0], side)
            layer = p["block"]["layer"]
            path = f"{name}/block/layer"
            normed = norm(layer["0"], f"{path}/0/layer_norm", x, tap, (i,), side)
            inner = layer["0"]["SelfAttention"]
            at = f"{path}/0/SelfAttention"
            x = x + attention(inner, at, normed, normed, seen, tap, i, bias, (side, side))
            if memory is not None:
                normed = norm(layer["1"], f"{path}/1/layer_norm", x, tap, (i,))
                inner, at = layer["1"]["EncDecAttention"], f"{path}/1/EncDecAttention"
                x = x + attention(
                    inner, at, normed, memory, memory_seen, tap, i, sides=(False, True)
                )
            last = str(len(layer) - 1)
            normed = norm(layer[last], f"{path}/{last}/layer_norm", x, tap, (i,), side)
            inner, at = layer[last]["DenseReluDense"], f"{path}/{last}/DenseReluDense"
            x = x + feed_forward(inner, at, normed, tap, i, side)
        return norm(p["final_layer_norm"], f"{name}/final_layer_norm", x, tap, positioned=side)

    def model(p, pairs: Pairs, tap: Tap):
        table = p["shared"]["embedding"]
        tied = "shared/embedding@embedding" if config.tied_head else "shared/embedding"
        read = lambda ids, side: tap.embedding(
            tied, ids, table[ids], size=config.vocabulary, positioned=side
        )
        seen = pairs.source_mask[:, None, None, :]
        memory = stack(p["encoder"], "encoder", read(pairs.source, True), seen, tap)
        length = pairs.decoder_inputs.shape[1]
        causal = jnp.tri(length, dtype=bool)
        x = read(pairs.decoder_inputs, False)
        x = stack(p["decoder"], "decoder", x, causal, tap, memory, seen)
        if config.tied_head:
            x = x / config.width**0.5
            return tap.dense("shared/embedding", x, x @ table.T, positioned=False)
        return tap.dense("lm_head/kernel", x, x @ p["lm_head"]["kernel"], positioned=False)

    return model


def case(config: EncoderDecoderConfig) -> Case:
    apply_fn, params = jk.from_nnx(EncoderDecoder(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * draw.normal(size=x.shape)), params)
    source, target = (labels(seed, 2, n, classes=11) for seed, n in ((1, 5), (2, 4)))
    mask = jnp.arange(5) < LENGTHS
    batch = (Pairs(source, mask, target), labels(3, 2, 4, classes=11))
    factors = oracle(written_out(config), params, batch, positions=mask)
    return Case(jk.Objective(apply_fn, jk.Categorical()), params, batch, factors=factors)


@program(
    "T5 1.0: ReLU, tied head, padded sources",
    family=FAMILY,
    checked="brute force, written out; no mask is given",
)
def _relu():
    return case(RELU)


@program(
    "T5 1.1 and FLAN: gated GELU, a head of its own, padded sources",
    family=FAMILY,
    checked="brute force, written out; no mask is given",
)
def _gated():
    options = {"gated": True, "activation": "gelu_new", "tied_head": False, "scaled_head": False}
    return case(EncoderDecoderConfig(**{**vars(RELU), **options}))
