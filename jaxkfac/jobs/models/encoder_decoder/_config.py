"""Sizes and options of an encoder-decoder, from Hugging Face's ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac.jobs.models.checkpoint import token_ids

# ---------------- dropout with a key that is passed to each call; without a key it does nothing


class Dropout(NamedTuple):
    r"""Inverted dropout: an element is kept with probability $1 - p$ and then divided by it.

    The expectation of the output is the input. Without a key, or at rate 0, the output is the
    input.

    Attributes:
        rate: The probability $p$, in [0, 1).
        key: Key for this place; ``None`` drops nothing.

    References:
        N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov: Dropout: a simple
        way to prevent neural networks from overfitting. JMLR 15, 2014.
    """

    rate: float | int = 0.0
    key: Key[Array, "*places"] | None = None

    @property
    def is_off(self) -> bool:
        """Whether nothing is dropped."""
        return self.key is None or self.rate == 0

    def at(self, place: int) -> "Dropout":
        """For one of several places, each with its own random numbers."""
        if self.is_off:
            return Dropout()
        assert self.key is not None
        return self._replace(key=jax.random.fold_in(self.key, place))

    def split(self, count: int) -> tuple[Key[Array, " count"], ...]:
        """Keys of ``count`` places as a stacked input of a scan; empty if nothing is dropped.

        They overlap with those of :meth:`at`: use only one of the two on an object.
        """
        if self.is_off:
            return ()
        assert self.key is not None
        return (jax.random.split(self.key, count),)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.is_off:
            return x
        assert self.key is not None
        keep = 1 - self.rate
        is_kept = jax.random.bernoulli(self.key, keep, x.shape)
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32  # 0.9 is 0.898 in bfloat16
        scaled = (x.astype(wide) / jnp.asarray(keep, wide)).astype(x.dtype)
        return jnp.where(is_kept, scaled, jnp.zeros((), x.dtype))


NO_DROPOUT = Dropout()


def check_rate(rate: float | int) -> float | int:
    """Return the rate.

    Raises:
        ValueError: it is not a probability in [0, 1).
    """
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < 1:
        raise ValueError(f"dropout={rate!r}: expected a probability in [0, 1)")
    return rate


# ---------------- the configuration


_DROPOUT = 0.1  # the default if the file has no rate
Activation = Literal["relu", "gelu_new", "silu"]

# In these files gelu means its tanh form.
_FEED_FORWARD: dict[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_new", True),
    "gated-silu": ("silu", True),
}


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes and options of an encoder-decoder in the T5 layout: relative positions, no biases.

    Attributes:
        vocabulary: Number of tokens.
        width: Size of the residual stream.
        hidden: Hidden size of the feed-forward layer.
        encoder_depth: Number of blocks of the encoder.
        decoder_depth: Number of blocks of the decoder.
        num_heads: Number of heads of every attention.
        head_size: Size of a head; ``num_heads * head_size`` may differ from the width.
        num_buckets: Rows of each table of relative positions; in the encoder half of them for
            each direction.
        max_distance: All positions from this distance on share a bucket.
        activation: ``"gelu_new"`` is the tanh form.
        gated: Whether the activation multiplies a second projection (version 1.1 and FLAN).
        norm_epsilon: Added to the mean square.
        tied_head: Whether the head is the transposed embedding.
        scaled_head: Whether inputs of the head are divided by the root of the width (version 1.0).
        start_id: First token of the decoder's inputs.
        pad_id: Token for padding.
        eos_ids: Tokens that end an answer.
        dropout: Rate used in its training; the rate of a model is chosen when it is built.

    Example:
        >>> config = EncoderDecoderConfig.from_hugging_face({
        ...     "model_type": "t5", "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48,
        ...     "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu",
        ...     "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0})
        >>> config.gated, config.tied_head, config.decoder_depth, config.eos_ids
        (True, False, 2, (1,))
    """

    vocabulary: int
    width: int
    hidden: int
    encoder_depth: int
    decoder_depth: int
    num_heads: int
    head_size: int
    num_buckets: int = 32
    max_distance: int = 128
    activation: Activation = "relu"
    gated: bool = False
    norm_epsilon: float = 1e-6
    tied_head: bool = True
    scaled_head: bool = True
    start_id: int = 0
    pad_id: int = 0
    eos_ids: tuple[int, ...] = ()
    dropout: float | int = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "hidden", "encoder_depth", "decoder_depth", "num_heads")
        for name in (*sizes, "head_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(f"num_buckets must be even and at least 4, not {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance {self.max_distance} must be beyond the {self.num_buckets // 2} "
                "distances that have a bucket of their own"
            )
        if self.activation not in get_args(Activation):
            raise ValueError(f"activation must be one of {get_args(Activation)}")
        check_rate(self.dropout)

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """The parts of fused kernels: none."""
        return {}

    def to_hugging_face(self) -> dict[str, Any]:
        """The contents of ``config.json``; the inverse of :meth:`from_hugging_face`."""
        ends = list(self.eos_ids)
        feed_forward = {value: name for name, value in _FEED_FORWARD.items()}
        if (self.activation, self.gated) not in feed_forward:
            raise ValueError(
                f"activation={self.activation!r} with gated={self.gated}: config.json has no word "
                f"for it, only for {', '.join(_FEED_FORWARD)}"
            )
        return {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "is_encoder_decoder": True,
            "vocab_size": self.vocabulary,
            "d_model": self.width,
            "d_ff": self.hidden,
            "d_kv": self.head_size,
            "num_layers": self.encoder_depth,
            "num_decoder_layers": self.decoder_depth,
            "num_heads": self.num_heads,
            "relative_attention_num_buckets": self.num_buckets,
            "relative_attention_max_distance": self.max_distance,
            "feed_forward_proj": feed_forward[self.activation, self.gated],
            "layer_norm_epsilon": self.norm_epsilon,
            "dropout_rate": self.dropout,
            "tie_word_embeddings": self.tied_head,
            "scale_decoder_outputs": self.scaled_head,
            "decoder_start_token_id": self.start_id,
            "pad_token_id": self.pad_id,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        }

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "EncoderDecoderConfig":
        """Read a ``config.json``.

        Args:
            config: Contents of the file. ``tied_head`` is taken from it; whether a checkpoint
                ties its head follows from its tensors.

        Raises:
            ValueError: a ``model_type`` or ``feed_forward_proj`` is not supported, or a key is
                missing; names it.
        """
        if (kind := config.get("model_type")) != "t5":
            raise ValueError(f"model_type: expected 't5', got {kind!r}")
        required = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
        if missing := [name for name in required if config.get(name) is None]:
            raise ValueError(f"config.json lacks {missing}")
        feed_forward = config.get("feed_forward_proj", "relu")
        if feed_forward not in _FEED_FORWARD:
            raise ValueError(
                f"feed_forward_proj: expected one of {', '.join(_FEED_FORWARD)}, got "
                f"{feed_forward!r}"
            )
        activation, gated = _FEED_FORWARD[feed_forward]
        tied = config.get("tie_word_embeddings") is not False
        pad = config.get("pad_token_id") or 0
        start = config.get("decoder_start_token_id")
        return cls(
            vocabulary=config["vocab_size"],
            width=config["d_model"],
            hidden=config["d_ff"],
            encoder_depth=config["num_layers"],
            decoder_depth=config.get("num_decoder_layers") or config["num_layers"],
            num_heads=config["num_heads"],
            head_size=config["d_kv"],
            num_buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            activation=activation,
            gated=gated,
            norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
            tied_head=tied,
            # transformers 5 writes this key, and always writes that the head is tied
            scaled_head=bool(config.get("scale_decoder_outputs", tied)),
            start_id=pad if start is None else start,
            pad_id=pad,
            eos_ids=token_ids(config.get("eos_token_id")),
            dropout=_DROPOUT if config.get("dropout_rate") is None else config["dropout_rate"],
        )
