"""Sizes and options of a decoder from Hugging Face's ``config.json``, for each model type."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxkfac.jobs.models.checkpoint import token_ids
from jaxkfac.jobs.models.decoder._rotary import Rotary

# ---------------- which blocks use the sliding window


_KINDS = ("sliding_attention", "full_attention")


def windows(
    config: Mapping[str, Any], window: int | None, otherwise: Callable[[int], bool]
) -> dict[str, Any]:
    """``sliding_window`` and ``windowed`` of a decoder.

    Args:
        config: Contents of ``config.json``; newer files have a list ``layer_types``.
        window: Size of the window in the file.
        otherwise: Whether a block uses the window, by its number; used without such a list.

    Raises:
        ValueError: a layer has an unknown type, or their number is wrong.
    """
    kinds, depth = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        kinds = [_KINDS[not otherwise(block)] for block in range(depth)]
    if len(kinds) != depth:
        raise ValueError(f"layer_types: expected {depth}, one per block, got {len(kinds)}")
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise ValueError(f"layer_types: expected {' or '.join(_KINDS)}, got {', '.join(unknown)}")
    windowed = tuple(kind == _KINDS[0] for kind in kinds)
    if window is None or not any(windowed):
        return {"sliding_window": None}
    return {"sliding_window": window, "windowed": None if all(windowed) else windowed}


# ---------------- Gemma 2
#
# Gemma 2: norms before and after each layer, soft-capped scores and logits, a window in every
# second block.


_ACTIVATION = "gelu_pytorch_tanh"


def gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``gemma2``."""
    return {
        **gemma(config),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
        **windows(config, config.get("sliding_window", 4096), lambda block: block % 2 == 0),
    }


def gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that Gemma 2 and 3 share.

    Raises:
        ValueError: bidirectional attention, or another activation.
    """
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: expected false, a decoder reads leftwards")
    activation = config.get("hidden_activation") or _ACTIVATION
    if activation != _ACTIVATION:
        raise ValueError(f"hidden_activation: expected {_ACTIVATION!r}, got {activation!r}")
    return {
        "activation": activation,
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "head_size": config.get("head_dim") or 256,
        "mlp_bias": False,
        "post_norms": True,
        "unit_offset": True,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
    }


# ---------------- Gemma 3
#
# Gemma 3, the text model: norms of heads, and other rotary angles in blocks with a window.


def gemma3_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``gemma3_text``.

    Raises:
        ValueError: soft-capped attention, which Gemma 3 does not use.
    """
    if config.get("attn_logit_softcapping"):
        raise ValueError("attn_logit_softcapping: expected null in a gemma3_text")
    window, period = config.get("sliding_window", 4096), config.get("sliding_window_pattern", 6)
    return {
        **gemma(config),
        "head_norms": True,
        "logit_softcap": config.get("final_logit_softcapping"),
        "rotary": _rotary(config, "full_attention", "rope_theta", 1e6),
        "local_rotary": _rotary(config, "sliding_attention", "rope_local_base_freq", 1e4),
        **windows(config, window, lambda block: (block + 1) % period > 0),
    }


def _rotary(config: Mapping[str, Any], kind: str, theta: str, default: float) -> Rotary:
    """Angles of one kind of block; in older files ``rope_scaling`` is for the full ones."""
    parameters = {"rope_theta": config.get(theta, default)}
    if kind == "full_attention":
        parameters |= config.get("rope_scaling") or {}
    parameters |= (config.get("rope_parameters") or {}).get(kind) or {}
    return Rotary.from_hugging_face({**config, "rope_scaling": None, "rope_parameters": parameters})


# ---------------- Llama: no window, even if the file has one


def llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``llama``."""
    return {}


# ---------------- Mistral: a window in all blocks, by default 4096; null means none


def mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``mistral``."""
    return {"sliding_window": config.get("sliding_window", 4096)}


# ---------------- Phi-3: a window in all blocks, if the file has one


def phi3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``phi3``."""
    return {
        "norm_epsilon": config.get("rms_norm_eps", 1e-5),
        "sliding_window": config.get("sliding_window"),
    }


# ---------------- Qwen 2
#
# Qwen 2 and 2.5: biases of queries, keys and values; a window, if any, in the upper blocks.


def qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``qwen2``."""
    return {"attention_bias": False, "qkv_bias": True, "mlp_bias": False, **upper_windows(config)}


def upper_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The window of blocks from ``max_window_layers`` on; none unless ``use_sliding_window``."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    below = config.get("max_window_layers", 28)
    return windows(config, window, lambda block: block >= below)


# ---------------- Qwen 3: norms of every head's queries and keys; windows as in Qwen 2


def qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``qwen3``."""
    return {
        "head_size": config.get("head_dim") or 128,
        "head_norms": True,
        "mlp_bias": False,
        **upper_windows(config),
    }


# ---------------- the supported model types


# From a ``config.json`` to the options of ``DecoderConfig`` that depend on the model type. All
# other options are read in the same way for all types.
Reader = Callable[[Mapping[str, Any]], dict[str, Any]]

FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (phi3, llama, mistral, qwen2, qwen3, gemma2, gemma3_text)
    }
)


def model_types() -> str:
    """Names of the supported types, for error messages."""
    return ", ".join(FAMILIES)


# ---------------- sizes and options of a decoder, from Hugging Face's ``config.json``


Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder in the Phi-3 layout: fused projections, rotary positions, grouped heads.

    Attributes:
        vocabulary: Number of tokens.
        width: Size of the residual stream.
        hidden: Hidden size of the gated layer.
        depth: Number of blocks.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides ``num_heads``.
        head_size: Size of a head.
        context: Number of positions the model was made for.
        norm_epsilon: Added to the mean square.
        tied_head: Whether the head is the transposed embedding.
        sliding_window: Number of positions a token attends to, including its own; ``None`` means
            all earlier ones.
        attention_bias: Whether all projections of attention have biases.
        mlp_bias: Whether the gated layer has biases.
        rotary: Rotary angles.
        eos_ids: Tokens that end an answer.
        windowed: For each block, whether it uses the window; ``None`` means all do.
        local_rotary: Rotary angles of blocks with the window; ``None`` means the same angles.
        qkv_bias: Whether queries, keys and values have biases.
        head_norms: Whether queries and keys are normalised, head by head, before the rotation.
        post_norms: Whether outputs of attention and of the gated layer are also normalised.
        unit_offset: Whether norms multiply by 1 + scale.
        activation: Activation of the gate.
        embedding_scale: Factor of embeddings, in the dtype of the parameters.
        attention_scale: Factor of scores; ``None`` means one over the root of ``head_size``.
        attention_softcap: ``c`` in ``c tanh(score / c)``; ``None`` means no cap.
        logit_softcap: The same for logits.

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
    windowed: tuple[bool, ...] | None = None
    local_rotary: Rotary | None = None
    qkv_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    unit_offset: bool = False
    activation: Activation = "silu"
    embedding_scale: float | int = 1.0
    attention_scale: float | int | None = None
    attention_softcap: float | int | None = None
    logit_softcap: float | int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "hidden", "depth", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_size", "context", "sliding_window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
            )
        if self.windowed is not None and len(self.windowed) != self.depth:
            raise ValueError(
                f"windowed: expected {self.depth} values, one per block, got {len(self.windowed)}"
            )
        if self.windowed is not None and self.sliding_window is None:
            raise ValueError("windowed: there is no sliding_window")
        if self.activation not in get_args(Activation):
            raise ValueError(f"activation must be one of {get_args(Activation)}")
        for name in ("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        for rotary in filter(None, (self.rotary, self.local_rotary)):
            rotary.check(self.head_size)

    @property
    def longest(self) -> int:
        """Largest number of positions of a text, beyond the context with ``dynamic`` angles."""
        stretched = self.rotary.kind == "dynamic"
        return int(self.context * self.rotary.factor) if stretched else self.context

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """The parts of fused kernels in order, ``{kernel: {part: number of outputs}}``.

        Llama and Mistral store these projections separately; :func:`jaxkfac.lslora.split` and
        ``fuse`` convert adapters between the two forms.
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
            config: Contents of the file. Both old keys (``rope_theta``, ``rope_scaling``) and
                new ones (``rope_parameters``) are read; keys that do not change what the model
                computes are ignored.

        Raises:
            ValueError: a ``model_type``, activation, rotary scaling or layer type is not supported,
                or a key is missing; names it.
        """
        kind = config.get("model_type")
        if kind not in FAMILIES:
            explanation = "" if kind else f"; config.json has {sorted(config)}"
            if inner := config.get("text_config"):
                explanation = (
                    f", around a {inner.get('model_type')!r} which is not loaded by itself"
                )
            raise ValueError(
                f"model_type: expected one of {model_types()}, got {kind!r}{explanation}"
            )
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        required += ("num_attention_heads", "max_position_embeddings")
        if missing := [name for name in required if config.get(name) is None]:
            raise ValueError(f"config.json lacks {missing}")
        heads = config["num_attention_heads"]
        options = {
            "vocabulary": config["vocab_size"],
            "width": config["hidden_size"],
            "hidden": config["intermediate_size"],
            "depth": config["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_size": config.get("head_dim") or config["hidden_size"] // heads,
            "context": config["max_position_embeddings"],
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "tied_head": bool(config.get("tie_word_embeddings", False)),
            "attention_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "eos_ids": token_ids(config.get("eos_token_id")),
        }
        options |= FAMILIES[str(kind)](config)
        activation = config.get("hidden_act", "silu")
        if "activation" not in options and activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act: expected 'silu', got {activation!r}")
        if "rotary" not in options:
            options["rotary"] = Rotary.from_hugging_face(config)
        return cls(**options)
