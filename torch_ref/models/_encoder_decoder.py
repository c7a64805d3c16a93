"""The T5 layout, line by line from the paper: modules have Hugging Face's names.

References:
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020; Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class EncoderDecoderSizes:
    """Of an encoder-decoder.

    Attributes:
        vocabulary: Number of tokens.
        width: Size of the stream.
        hidden: Size of the feed-forward layer.
        depth: Blocks of the encoder, and of the decoder.
        num_heads: Heads of every attention.
        head_size: Size of a head.
        num_buckets: Rows of each table of relative positions.
        max_distance: From this distance on all positions share a bucket.
        gated: Whether a tanh GELU multiplies a second projection; else ReLU.
        tied: Whether the head is the embedding, its inputs divided by the root of the width.
    """

    vocabulary: int
    width: int
    hidden: int
    depth: int
    num_heads: int
    head_size: int
    num_buckets: int = 32
    max_distance: int = 128
    gated: bool = False
    tied: bool = True


class _Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class _Positions(nn.Module):
    """One number for each head and bucket of relative positions."""

    def __init__(self, sizes: EncoderDecoderSizes, *, both_sides: bool):
        super().__init__()
        self.sizes, self.both_sides = sizes, both_sides
        self.weight = nn.Parameter(torch.randn(sizes.num_buckets, sizes.num_heads))

    def bucket(self, ahead: int) -> int:
        """Of a key ``ahead`` places after the query."""
        num, offset, distance = self.sizes.num_buckets, 0, max(-ahead, 0)
        if self.both_sides:
            num, distance = num // 2, abs(ahead)
            offset = num if ahead > 0 else 0
        single = num // 2
        if distance < single:
            return offset + distance
        ratio = math.log(distance / single) / math.log(self.sizes.max_distance / single)
        # a hair above, since a bound may fall on a distance
        return offset + min(single + int(ratio * (num - single) + 1e-6), num - 1)

    def forward(self, length: int):
        rows = [[self.bucket(s - t) for s in range(length)] for t in range(length)]
        return self.weight[torch.tensor(rows)].permute(2, 0, 1)


class _Attention(nn.Module):
    def __init__(self, sizes: EncoderDecoderSizes):
        super().__init__()
        inner = sizes.num_heads * sizes.head_size
        self.heads = (sizes.num_heads, sizes.head_size)
        self.q, self.k, self.v = (nn.Linear(sizes.width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, x, other, seen, bias=0.0):
        q, k, v = (
            layer(rows).unflatten(-1, self.heads)
            for layer, rows in ((self.q, x), (self.k, other), (self.v, other))
        )
        scores = torch.einsum("nthk,nshk->nhts", q, k) + bias  # not divided by sqrt(head_size)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        mixed = torch.einsum("nhts,nshk->nthk", scores.softmax(-1), v)
        return self.o(mixed.flatten(-2))


class _FeedForward(nn.Module):
    def __init__(self, sizes: EncoderDecoderSizes):
        super().__init__()
        for name in ("wi_0", "wi_1") if sizes.gated else ("wi",):
            setattr(self, name, nn.Linear(sizes.width, sizes.hidden, bias=False))
        self.wo = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.gated = sizes.gated

    def forward(self, x):
        if self.gated:
            return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))
        return self.wo(F.relu(self.wi(x)))


class _Sublayer(nn.Module):
    def __init__(self, sizes: EncoderDecoderSizes, name: str, inner: nn.Module):
        super().__init__()
        setattr(self, name, inner)
        self.layer_norm = _Norm(sizes.width)


class _Block(nn.Module):
    def __init__(self, sizes: EncoderDecoderSizes, *, cross: bool):
        super().__init__()
        sublayers = [_Sublayer(sizes, "SelfAttention", _Attention(sizes))]
        if cross:
            sublayers.append(_Sublayer(sizes, "EncDecAttention", _Attention(sizes)))
        sublayers.append(_Sublayer(sizes, "DenseReluDense", _FeedForward(sizes)))
        self.layer = nn.ModuleList(sublayers)

    def forward(self, x, seen, bias, memory=None, memory_seen=None):
        normed = self.layer[0].layer_norm(x)
        x = x + self.layer[0].SelfAttention(normed, normed, seen, bias)
        if memory is not None:
            normed = self.layer[1].layer_norm(x)
            x = x + self.layer[1].EncDecAttention(normed, memory, memory_seen)
        return x + self.layer[-1].DenseReluDense(self.layer[-1].layer_norm(x))


class _Stack(nn.Module):
    def __init__(self, sizes: EncoderDecoderSizes, *, cross: bool):
        super().__init__()
        self.block = nn.ModuleList([_Block(sizes, cross=cross) for _ in range(sizes.depth)])
        # the first block's, read by all
        attention = self.block[0].layer[0].SelfAttention
        attention.relative_attention_bias = _Positions(sizes, both_sides=not cross)
        self.final_layer_norm = _Norm(sizes.width)

    def forward(self, x, seen, *memory):
        bias = self.block[0].layer[0].SelfAttention.relative_attention_bias(x.shape[1])
        for block in self.block:
            x = block(x, seen, bias, *memory)
        return self.final_layer_norm(x)


class EncoderDecoder(nn.Module):
    """``model(source, source_mask, decoder_inputs) -> logits (N, T, V)``, without dropout.

    Args:
        sizes: Of the model. ``state_dict`` has the names of Hugging Face's
            ``T5ForConditionalGeneration``.

    Example:
        >>> import torch
        >>> sizes = EncoderDecoderSizes(
        ...     vocabulary=7, width=4, hidden=6, depth=1, num_heads=2, head_size=3)
        >>> ids = torch.tensor([[3, 4, 5]])
        >>> EncoderDecoder(sizes)(ids, torch.ones_like(ids), ids[:, :2]).shape
        torch.Size([1, 2, 7])
    """

    def __init__(self, sizes: EncoderDecoderSizes):
        super().__init__()
        self.sizes = sizes
        self.shared = nn.Embedding(sizes.vocabulary, sizes.width)
        self.encoder = _Stack(sizes, cross=False)
        self.decoder = _Stack(sizes, cross=True)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.lm_head.weight = self.shared.weight

    def forward(self, source, source_mask, decoder_inputs):
        seen = source_mask.bool()[:, None, None, :]
        memory = self.encoder(self.shared(source), seen)
        length = decoder_inputs.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=source.device).tril()
        x = self.decoder(self.shared(decoder_inputs), causal, memory, seen)
        return self.lm_head(x / self.sizes.width**0.5 if self.sizes.tied else x)
