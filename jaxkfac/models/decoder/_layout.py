"""Which stored tensors make up each parameter of a decoder."""

from collections.abc import Mapping

from jaxkfac.models.checkpoint import Leaf, Shape, TensorSpec, alone
from jaxkfac.models.decoder._config import DecoderConfig


def layout(config: DecoderConfig, *, fused: bool) -> dict[str, Leaf]:
    """Every parameter by its path.

    Args:
        config: Of the decoder.
        fused: Whether qkv and gate/up are stored as one tensor each (Phi-3) or apart (Llama).
    """
    width, hidden, heads = config.width, config.hidden, config.num_heads * config.head_size
    parts = config.parts
    if fused:
        parts = {name: {name: sum(each.values())} for name, each in parts.items()}
    attention, mlp = config.attention_bias, config.mlp_bias
    qkv = attention or config.qkv_bias
    linear = (  # path, outputs of each stored part, inputs, biases
        ("self_attn/qkv_proj", parts["qkv_proj"], width, qkv),
        ("self_attn/o_proj", {"o_proj": width}, heads, attention),
        ("mlp/gate_up_proj", parts["gate_up_proj"], width, mlp),
        ("mlp/down_proj", {"down_proj": width}, hidden, mlp),
    )
    leaves = {
        "model/embed_tokens/embedding": alone(
            "model.embed_tokens.weight", (config.vocabulary, width)
        )
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), width)
    if config.post_norms:
        norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), width)
    if config.head_norms:
        norms |= dict.fromkeys(("self_attn/q_norm", "self_attn/k_norm"), config.head_size)
    for norm, size in norms.items():
        module = norm.replace("/", ".")
        leaves[f"model/layers/{norm}/scale"] = _stacked(config, module, "weight", {"": (size,)})
    for path, outputs, inputs, bias in linear:
        module = path.partition("/")[0]
        weights = {part: (out, inputs) for part, out in outputs.items()}
        leaves[f"model/layers/{path}/kernel"] = _stacked(config, module, "weight", weights)
        if bias:
            biases = {part: (out,) for part, out in outputs.items()}
            leaves[f"model/layers/{path}/bias"] = _stacked(config, module, "bias", biases)
    leaves["model/norm/scale"] = alone("model.norm.weight", (width,))
    if not config.tied_head:
        shape = (config.vocabulary, width)
        leaves["lm_head/kernel"] = alone("lm_head.weight", shape, transposed=True)
    return leaves


def repeats(name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a tensor repeats something else: a tied head, frequencies in old files."""
    tied = name == "lm_head.weight" and "lm_head/kernel" not in leaves
    return tied or name.endswith("rotary_emb.inv_freq")


def _stacked(config: DecoderConfig, module: str, kind: str, parts: Mapping[str, Shape]) -> Leaf:
    slices = tuple(
        tuple(
            TensorSpec(".".join(filter(None, ("model.layers", str(i), module, name, kind))), shape)
            for name, shape in parts.items()
        )
        for i in range(config.depth)
    )
    return Leaf(slices, stacked=True, transposed=len(slices[0][0].shape) == 2)
