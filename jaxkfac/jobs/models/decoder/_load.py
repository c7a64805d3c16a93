"""A decoder from a folder in Hugging Face's layout, or from a GGUF file."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxkfac.interception import NnxApply, from_nnx
from jaxkfac.jobs.models.checkpoint import (
    Leaf,
    Pretrained,
    Shape,
    Source,
    TensorSpec,
    Tokenizer,
    alone,
    check_tensors,
    fill,
    fill_shapes,
    open_weights,
    read_config,
)
from jaxkfac.jobs.models.decoder._attention import AttentionBy
from jaxkfac.jobs.models.decoder._config import DecoderConfig
from jaxkfac.jobs.models.decoder._decoder import Decoder
from jaxkfac.memory import LeafSharding, checked_dtype

# ---------------- which stored tensors make up each parameter of a decoder


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


# ----------------


def load_decoder(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: bool = True,
    quantize: str | None = None,
    sharding: LeafSharding | None = None,
    attention: AttentionBy = "xla",
) -> Pretrained:
    """Load a decoder of the types phi3, llama, mistral, qwen2, qwen3, gemma2 or gemma3_text.

    Nothing is initialised first: shapes come from the config, every name and shape of the
    checkpoint is compared with them before a tensor is read, and stacked parameters are filled
    block by block.

    Args:
        path: A folder with ``config.json``, ``model.safetensors`` (or an index and shards) and,
            if there is a tokenizer, ``tokenizer.json`` and ``tokenizer_config.json``; or a
            ``.gguf`` file of a Llama, which is dequantised.
        dtype: Of the parameters, and so of the computation.
        remat: Recompute each block's activations in the backward pass.
        quantize: Full-match pattern over paths of stacked kernels
            (``r"model/layers/.*/kernel"``): these are quantised to NF4 as they are read. Such
            parameters are read by ``jk.lslora.attach(apply_fn, config)`` alone; its adapters
            may be ``{}``.
        sharding: A sharding or device for all parameters, or a function of path and shape.
            Quantised kernels stay on the default device.
        attention: ``"cudnn"``: flash attention, on NVIDIA GPUs, for bfloat16 or float16.

    Returns:
        A :class:`Pretrained`.

    Raises:
        FileNotFoundError: the folder, ``config.json`` or the weights are not there.
        ValueError: a damaged file; a model that is not covered; tensors that are missing, not
            known or of another shape, every one by name.
        MemoryBudgetError: before anything is read, if it would not fit.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        The parameters; and in main memory one stored tensor and, on an accelerator, the largest
        stacked parameter (a kernel of all blocks).

    Example:
        >>> load_decoder("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: no model at nowhere, which does not exist
    """
    path = Path(path)
    config, source, tokenizer = open_checkpoint(path)
    fused = "model.layers.0.self_attn.qkv_proj.weight" in source.shapes
    leaves = layout(config, fused=fused)
    check_tensors(
        source.shapes,
        leaves,
        str(path),
        what="decoder",
        repeats=lambda name: repeats(name, leaves),
    )
    params = fill(
        source,
        leaves,
        dtype=checked_dtype(dtype),
        sharding=sharding,
        quantize=quantize,
        what=f"loading {path}",
    )
    apply_fn = decoder_function(config, remat, attention)
    folder = str(path) if path.is_dir() else None
    return Pretrained(config, apply_fn, params, tokenizer, folder)


def decoder_shapes(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: bool = True,
    quantize: str | None = None,
    attention: AttentionBy = "xla",
) -> Pretrained:
    """What :func:`load_decoder` gives, with ``jax.ShapeDtypeStruct`` in place of arrays.

    For planning: config and tokenizer are read, and no weights.
    """
    config, _, tokenizer = open_checkpoint(Path(path))
    apply_fn = decoder_function(config, remat, attention)
    leaves = layout(config, fused=True)
    params = fill_shapes(leaves, dtype=checked_dtype(dtype), quantize=quantize)
    return Pretrained(config, apply_fn, params, tokenizer)


def decoder_function(config: DecoderConfig, remat: bool, attention: AttentionBy) -> NnxApply:
    """``apply_fn`` of a decoder whose parameters are given with each call."""
    shapes = nnx.eval_shape(
        lambda: Decoder(config, remat=remat, attention=attention, rngs=nnx.Rngs(0))
    )
    return from_nnx(shapes)[0]


def open_checkpoint(path: Path) -> tuple[DecoderConfig, Source, Tokenizer | None]:
    """Config, weights and tokenizer of a folder or a GGUF file."""
    if path.suffix == ".gguf" and path.is_file():
        from jaxkfac.jobs.models.decoder._gguf import open_gguf

        return open_gguf(path)
    return open_folder(path)


def open_folder(folder: Path) -> tuple[DecoderConfig, Source, Tokenizer | None]:
    """Config, weights and tokenizer of a Hugging Face folder."""
    config = DecoderConfig.from_hugging_face(read_config(folder))
    sizes = {"vocabulary": config.vocabulary, "eos_ids": config.eos_ids}
    return config, *open_weights(folder, **sizes)
