"""Which stored tensors make up each parameter of an encoder-decoder."""

from jaxkfac.models.checkpoint import Leaf, TensorSpec, alone
from jaxkfac.models.encoder_decoder._config import EncoderDecoderConfig


def layout(config: EncoderDecoderConfig) -> dict[str, Leaf]:
    """Every parameter by its path."""
    leaves = {"shared/embedding": alone("shared.weight", (config.vocabulary, config.width))}
    for stack, depth in (("encoder", config.encoder_depth), ("decoder", config.decoder_depth)):
        for path, shape in _block(config, cross=stack == "decoder").items():
            name, kind = path.replace("/", "."), "scale" if len(shape) == 1 else "kernel"
            leaves[f"{stack}/block/{path}/{kind}"] = Leaf(
                tuple(
                    (TensorSpec(f"{stack}.block.{i}.{name}.weight", shape),) for i in range(depth)
                ),
                stacked=True,
                transposed=kind == "kernel",
            )
        # stored with the first block, read by all
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.num_buckets, config.num_heads)
        leaves[f"{stack}/relative_attention_bias/embedding"] = alone(table, shape)
        norm = f"{stack}.final_layer_norm.weight"
        leaves[f"{stack}/final_layer_norm/scale"] = alone(norm, (config.width,))
    if not config.tied_head:
        shape = (config.vocabulary, config.width)
        leaves["lm_head/kernel"] = alone("lm_head.weight", shape, transposed=True)
    return leaves


def repeats(name: str, config: EncoderDecoderConfig) -> bool:
    """Whether a stored tensor says nothing new: the embedding again, or what nothing reads."""
    again = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return name in (*again, unread) or (name == "lm_head.weight" and config.tied_head)


def _block(config: EncoderDecoderConfig, *, cross: bool) -> dict[str, tuple[int, ...]]:
    """Stored shapes of a block's tensors by path: (out, in), or (width,) of a norm."""
    width, hidden = config.width, config.hidden
    inner = config.num_heads * config.head_size
    attention = dict.fromkeys("qkv", (inner, width)) | {"o": (width, inner)}
    inputs = ("wi_0", "wi_1") if config.gated else ("wi",)
    modules = {"SelfAttention": attention} | ({"EncDecAttention": attention} if cross else {})
    modules["DenseReluDense"] = dict.fromkeys(inputs, (hidden, width)) | {"wo": (width, hidden)}
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (module, kernels) in enumerate(modules.items()):
        shapes[f"layer/{number}/layer_norm"] = (width,)
        shapes |= {f"layer/{number}/{module}/{name}": shape for name, shape in kernels.items()}
    return shapes
