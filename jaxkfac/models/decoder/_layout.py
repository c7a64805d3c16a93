"""Which stored tensors make up each parameter, and whether a checkpoint has them all."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxkfac.models.decoder._config import DecoderConfig

Shape = tuple[int, ...]


class TensorSpec(NamedTuple):
    """A stored tensor, (out, in) if it is a matrix."""

    name: str
    shape: Shape


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
        slices: For each slice of the stack, the parts that lie side by side along its outputs;
            one slice where there is no stack.
        stacked: Whether the parameter has an axis for its slices.
        transposed: Whether it is (in, out).
    """

    slices: tuple[tuple[TensorSpec, ...], ...]
    stacked: bool
    transposed: bool

    @property
    def slice_shape(self) -> Shape:
        """Shape of a slice, as a parameter."""
        parts = self.slices[0]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return (len(self.slices), *self.slice_shape) if self.stacked else self.slice_shape


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
    linear = (  # path, outputs of each stored part, inputs, biases
        ("self_attn/qkv_proj", parts["qkv_proj"], width, attention),
        ("self_attn/o_proj", {"o_proj": width}, heads, attention),
        ("mlp/gate_up_proj", parts["gate_up_proj"], width, mlp),
        ("mlp/down_proj", {"down_proj": width}, hidden, mlp),
    )
    leaves = {
        "model/embed_tokens/embedding": _alone(
            "model.embed_tokens.weight", (config.vocabulary, width)
        )
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        leaves[f"model/layers/{norm}/scale"] = _stacked(config, norm, "weight", {"": (width,)})
    for path, outputs, inputs, bias in linear:
        room = path.partition("/")[0]
        weights = {part: (out, inputs) for part, out in outputs.items()}
        leaves[f"model/layers/{path}/kernel"] = _stacked(config, room, "weight", weights)
        if bias:
            biases = {part: (out,) for part, out in outputs.items()}
            leaves[f"model/layers/{path}/bias"] = _stacked(config, room, "bias", biases)
    leaves["model/norm/scale"] = _alone("model.norm.weight", (width,))
    if not config.tied_head:
        head = _alone("lm_head.weight", (config.vocabulary, width))
        leaves["lm_head/kernel"] = head._replace(transposed=True)
    return leaves


def check_tensors(stored: Mapping[str, Shape], leaves: Mapping[str, Leaf], where: str) -> None:
    """Compare a checkpoint's tensors with those of the layout.

    Raises:
        ValueError: tensors that are missing, not known or of another shape; every one by name.
    """
    wanted = dict(part for leaf in leaves.values() for parts in leaf.slices for part in parts)
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and not _derived(name, leaves)]
    shapes = [
        f"{name} is {stored[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"{where} does not hold the decoder that its config describes: missing tensors "
            f"{missing}; unknown tensors {extra}; other shapes: {'; '.join(shapes) or 'none'}"
        )


def _derived(name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a tensor repeats something else: a tied head, frequencies in old files."""
    tied = name == "lm_head.weight" and "lm_head/kernel" not in leaves
    return tied or name.endswith("rotary_emb.inv_freq")


def _alone(name: str, shape: Shape) -> Leaf:
    return Leaf(((TensorSpec(name, shape),),), stacked=False, transposed=False)


def _stacked(config: DecoderConfig, room: str, kind: str, parts: Mapping[str, Shape]) -> Leaf:
    slices = tuple(
        tuple(
            TensorSpec(".".join(filter(None, ("model.layers", str(i), room, name, kind))), shape)
            for name, shape in parts.items()
        )
        for i in range(config.depth)
    )
    return Leaf(slices, stacked=True, transposed=len(slices[0][0].shape) == 2)
