"""An encoder-decoder of the T5 layout: the library's own model against the restatement."""

import numpy as np
from flax import nnx

from jaxkfac.models import EncoderDecoder, EncoderDecoderConfig, Pairs
from parity_tests.layout import Twin
from parity_tests.problem import EXPAND, Data, FromNnx, Problem
from torch_ref import models as ref

WORDS, WIDTH, HIDDEN, HEADS, SIZE, DEPTH = 7, 4, 6, 2, 3, 2
BUCKETS, FARTHEST, EXAMPLES, LENGTH = 4, 4, 6, 6
INNER = HEADS * SIZE
UNREAD = -100  # the target of a token without loss, as collators write it


def _ours(*, gated: bool) -> nnx.Module:
    config = EncoderDecoderConfig(
        vocabulary=WORDS, width=WIDTH, hidden=HIDDEN, encoder_depth=DEPTH, decoder_depth=DEPTH,
        num_heads=HEADS, head_size=SIZE, num_buckets=BUCKETS, max_distance=FARTHEST, gated=gated,
        activation="gelu_new" if gated else "relu", tied_head=not gated, scaled_head=not gated,
    )  # fmt: skip
    return EncoderDecoder(config, rngs=nnx.Rngs(0))


def _reference(*, gated: bool) -> ref.EncoderDecoder:
    return ref.EncoderDecoder(
        ref.EncoderDecoderSizes(
            vocabulary=WORDS, width=WIDTH, hidden=HIDDEN, depth=DEPTH, num_heads=HEADS,
            head_size=SIZE, num_buckets=BUCKETS, max_distance=FARTHEST, gated=gated,
            tied=not gated,
        )
    )  # fmt: skip


def _modules(stack: str, path: str) -> tuple[str, ...]:
    return tuple(f"{stack}.block.{i}.{path.replace('/', '.')}" for i in range(DEPTH))


def _stacked(stack: str, path: str, n_in: int, n_out: int) -> Twin:
    kernel = f"{stack}/block/{path}/kernel"
    return Twin(kernel, _modules(stack, path), "dense", (n_out, n_in), kernel)


def _sublayers(stack: str) -> tuple[str, ...]:
    cross = ("EncDecAttention",) if stack == "decoder" else ()
    return ("SelfAttention", *cross, "DenseReluDense")


def _twins(*, gated: bool) -> tuple[Twin, ...]:
    table = ("shared/embedding", ("shared",), "embedding", (WORDS, WIDTH), "shared/embedding")
    found = [Twin(*table)]
    for stack in ("encoder", "decoder"):
        for number, name in enumerate(_sublayers(stack)):
            at = f"layer/{number}/{name}"
            if name == "DenseReluDense":
                inputs = ("wi_0", "wi_1") if gated else ("wi",)
                found += [_stacked(stack, f"{at}/{wi}", WIDTH, HIDDEN) for wi in inputs]
                found.append(_stacked(stack, f"{at}/wo", HIDDEN, WIDTH))
            else:
                found += [_stacked(stack, f"{at}/{q}", WIDTH, INNER) for q in "qkv"]
                found.append(_stacked(stack, f"{at}/o", INNER, WIDTH))
    head = ("lm_head/kernel", ("lm_head",), "dense", (WORDS, WIDTH), "lm_head/kernel")
    if not gated:
        head = ("shared/embedding", ("lm_head",), "tied head", (WORDS, WIDTH), "shared/embedding")
    return (*found, Twin(*head))


def _beside() -> dict[str, tuple[str, ...]]:
    """Scales of norms, and the tables of positions."""
    found: dict[str, tuple[str, ...]] = {}
    for stack in ("encoder", "decoder"):
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{stack}/relative_attention_bias/embedding"] = (table,)
        found[f"{stack}/final_layer_norm/scale"] = (f"{stack}.final_layer_norm.weight",)
        for number, _ in enumerate(_sublayers(stack)):
            at = f"layer/{number}/layer_norm"
            names = tuple(f"{module}.weight" for module in _modules(stack, at))
            found[f"{stack}/block/{at}/scale"] = names
    return found


def _padded(seed: int) -> Data:
    """Sources and targets of one length each, since the reference has one mask for all layers."""
    rng = np.random.default_rng([41, seed])
    source, target, labels = rng.integers(0, WORDS, size=(3, EXAMPLES, LENGTH))
    exists = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, size=(EXAMPLES, 1))
    inputs = {"source": source, "source_mask": exists, "decoder_inputs": target}
    labels = np.where(exists, labels, UNREAD)
    return Data(inputs, Pairs(source, exists, target), labels, exists, exists)


def _problem(*, gated: bool) -> Problem:
    return Problem(
        lambda: _reference(gated=gated),
        FromNnx(lambda: _ours(gated=gated)),
        _twins(gated=gated),
        _padded,
        options=EXPAND[:1],
        beside=_beside(),
    )


RELU, GATED = _problem(gated=False), _problem(gated=True)
