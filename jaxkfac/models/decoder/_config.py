"""Sizes and choices of a decoder, from Hugging Face's ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkfac.models.checkpoint import token_ids
from jaxkfac.models.decoder._rotary import Rotary

MODEL_TYPES = ("phi3", "llama", "mistral")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Phi-3 layout: fused projections, rotary positions, grouped heads.

    Attributes:
        vocabulary: Number of tokens.
        width: Size of the stream.
        hidden: Size of the gated layer.
        depth: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_size: Size of a head.
        context: Positions that the model was made for.
        norm_epsilon: Added to the mean square.
        tied_head: The head is the embedding, transposed.
        sliding_window: Positions that a token sees, its own included; ``None``: all before it.
        attention_bias: Biases in the attention's projections.
        mlp_bias: Biases in the gated layer's.
        rotary: The angles of positions.
        eos_ids: Tokens that end an answer.

    Example:
        >>> config = DecoderConfig.from_hugging_face({
        ...     "model_type": "llama", "vocab_size": 97, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2})
        >>> config.head_size, config.rotary.kind, config.eos_ids
        (8, 'default', (2,))
    """

    vocabulary: int
    width: int
    hidden: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context: int
    norm_epsilon: float = 1e-5
    tied_head: bool = False
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rotary: Rotary = dataclasses.field(default_factory=Rotary)
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "hidden", "depth", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_size", "context", "sliding_window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
            )
        self.rotary.check(self.head_size)

    @property
    def longest(self) -> int:
        """Positions that a text may have: ``dynamic`` angles stretch the context."""
        stretched = self.rotary.kind == "dynamic"
        return int(self.context * self.rotary.factor) if stretched else self.context

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """What the fused kernels are made of: ``{kernel: {part: its outputs}}``, in order.

        Llama and Mistral keep these projections apart; :func:`jaxkfac.lslora.split` and ``fuse``
        take it to and from their adapters.
        """
        heads, kv = (n * self.head_size for n in (self.num_heads, self.num_kv_heads))
        return {
            "qkv_proj": {"q_proj": heads, "k_proj": kv, "v_proj": kv},
            "gate_up_proj": {"gate_proj": self.hidden, "up_proj": self.hidden},
        }

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read a ``config.json``.

        Args:
            config: The file's content. Old files (``rope_theta``, ``rope_scaling``) and new
                ones (``rope_parameters``) are read; keys that do not change what the model
                computes are ignored.

        Raises:
            ValueError: a ``model_type``, activation or rotary scaling that is not covered, or
                a key that is missing; each by name.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {kind!r}")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ValueError(f"hidden_act: expected 'silu', got {activation!r}")
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        required += ("num_attention_heads", "max_position_embeddings")
        if missing := [name for name in required if config.get(name) is None]:
            raise ValueError(f"config.json lacks {missing}")
        heads = config["num_attention_heads"]
        window = 4096 if kind == "mistral" else None  # where the file does not say; null is none
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            hidden=config["intermediate_size"],
            depth=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            context=config["max_position_embeddings"],
            norm_epsilon=config.get("rms_norm_eps", 1e-5 if kind == "phi3" else 1e-6),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            sliding_window=None if kind == "llama" else config.get("sliding_window", window),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            rotary=Rotary.from_hugging_face(config),
            eos_ids=token_ids(config.get("eos_token_id")),
        )
