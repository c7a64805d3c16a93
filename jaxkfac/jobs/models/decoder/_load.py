"""A decoder from a folder in Hugging Face's layout, or from a GGUF file."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxkfac._errors import installed_by
from jaxkfac.flax import NnxApply, from_nnx
from jaxkfac.jobs.models.checkpoint import (
    HeadTensors,
    Leaf,
    Pretrained,
    Shape,
    Source,
    StoredHead,
    TensorSpec,
    TiedApply,
    Tokenizer,
    alone,
    fill,
    fill_shapes,
    open_weights,
    read_config,
    stored_head,
)
from jaxkfac.jobs.models.decoder._attention import AttentionBy
from jaxkfac.jobs.models.decoder._config import DecoderConfig
from jaxkfac.jobs.models.decoder._decoder import Decoder
from jaxkfac.jobs.models.decoder._gguf_tokenizer import gguf_tokenizer
from jaxkfac.jobs.models.decoder._rotary import Rotary
from jaxkfac.memory import LeafSharding, checked_dtype

# ---------------- tensors of a GGUF file


_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class GgufSource:
    """A ``Source`` for a GGUF file.

    The file is mapped, so pages that were read count as memory of the process until evicted.
    """

    def __init__(self, tensors: Any, config: DecoderConfig) -> None:
        self._tensors = {_name(tensor.name): tensor for tensor in tensors}
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self.shapes = {
            name: tuple(int(n) for n in tensor.shape[::-1])
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """One tensor in float32, or some of its rows; of queries and keys whole heads."""
        from gguf import quants

        tensor = self._tensors[name]
        x = quants.dequantize(tensor.data[rows], tensor.tensor_type)
        x = x.reshape(-1, *self.shapes[name][1:])
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return x
        # Stored for rotation of adjacent rows: pair i of a head is rows 2i and 2i + 1. Here, as in
        # Hugging Face's files, it is rows i and i + half.
        return x.reshape(heads, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def open_gguf(
    file: Path, *, pre: str | None = None
) -> tuple[DecoderConfig, GgufSource, Tokenizer | None]:
    """Config, weights and tokenizer of a GGUF file.

    Args:
        file: The file.
        pre: ``gguf_pre`` of :func:`load_decoder`.

    Raises:
        ValueError: the file is damaged, or holds an unsupported model.
    """
    with installed_by("pretrained"):
        from gguf import GGUFReader
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader does not check the file: any lookup may fail
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is no whole GGUF file: {error}; "
            "download it again"
        ) from error
    names = [tensor.name for tensor in reader.tensors]
    try:
        config = _config(fields, tied="output.weight" not in names)
    except KeyError as error:
        raise ValueError(f"{file} lacks the field {error}; download it again") from error
    try:
        tokenizer = gguf_tokenizer(fields, config.eos_ids, pre=pre)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # fields contradict each other, or the package refuses them
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: its tokenizer cannot be read: {reason}") from error
    return config, GgufSource(reader.tensors, config), tokenizer


def _config(fields: dict[str, Any], *, tied: bool) -> DecoderConfig:
    if (kind := fields["general.architecture"]) != "llama":
        raise ValueError(
            f"general.architecture: expected 'llama', got {kind!r}; load the Hugging Face folder"
        )
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(
            f"llama.rope.scaling.type: expected 'none' or 'linear', got {scaling!r}; load the "
            "Hugging Face folder"
        )
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    linear = scaling == "linear"
    head_size = fields.get("llama.attention.key_length", width // heads)
    if (rotated := fields.get("llama.rope.dimension_count", head_size)) != head_size:
        raise ValueError(
            f"llama.rope.dimension_count: expected the head's size {head_size}, got {rotated}; "
            "load the Hugging Face folder"
        )
    end = fields.get("tokenizer.ggml.eos_token_id")
    return DecoderConfig(
        vocabulary=fields.get("llama.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        width=width,
        hidden=fields["llama.feed_forward_length"],
        depth=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_size=head_size,
        context=fields["llama.context_length"],
        norm_epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
        tied_head=tied,
        rotary=Rotary(
            kind="linear" if linear else "default",
            theta=fields.get("llama.rope.freq_base", 10000.0),
            factor=fields["llama.rope.scaling.factor"] if linear else 1.0,
        ),
        eos_ids=() if end is None else (end,),
    )


def _name(name: str) -> str:
    """Hugging Face's name of a tensor; a tensor without one keeps its name and is unknown."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        number, part, kind = match.groups()
        return f"model.layers.{number}.{_BLOCK[part]}.{kind}" if part in _BLOCK else name
    part, _, kind = name.rpartition(".")
    return f"{_ENDS[part]}.{kind}" if part in _ENDS else name


# ---------------- which stored tensors form each parameter of a decoder


HEAD = HeadTensors("model.embed_tokens.weight")


def layout(
    config: DecoderConfig, *, fused: bool, embedding: str = HEAD.embedding
) -> dict[str, Leaf]:
    """All parameters by path.

    Args:
        config: Sizes of the decoder.
        fused: Whether qkv and gate/up are stored as one tensor each (Phi-3) or apart (Llama).
        embedding: Name of the tensor that holds the embedding.
    """
    width, hidden, heads = config.width, config.hidden, config.num_heads * config.head_size
    parts = config.parts
    if fused:
        parts = {name: {name: sum(sizes.values())} for name, sizes in parts.items()}
    attention, mlp = config.attention_bias, config.mlp_bias
    qkv = attention or config.qkv_bias
    linear = (  # path, outputs of each stored part, inputs, biases
        ("self_attn/qkv_proj", parts["qkv_proj"], width, qkv),
        ("self_attn/o_proj", {"o_proj": width}, heads, attention),
        ("mlp/gate_up_proj", parts["gate_up_proj"], width, mlp),
        ("mlp/down_proj", {"down_proj": width}, hidden, mlp),
    )
    leaves = {
        "model/embed_tokens/embedding": alone(embedding, (config.vocabulary, width)),
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
        leaves["lm_head/kernel"] = alone(HEAD.head, shape, transposed=True)
    return leaves


def repeats(name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether a tensor is redundant: a tied head, or frequencies in old files."""
    tied = name == HEAD.head and "lm_head/kernel" not in leaves
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


# ---------------- loading


def load_decoder(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: bool = True,
    quantize: str | None = None,
    sharding: LeafSharding | None = None,
    attention: AttentionBy = "xla",
    gguf_pre: str | None = None,
) -> Pretrained:
    """Load a decoder of the types phi3, llama, mistral, qwen2, qwen3, gemma2 or gemma3_text.

    Parameters are not initialised first: shapes come from the config, names and shapes of the
    checkpoint are compared with them before any tensor is read, and stacked parameters are read
    block by block.

    Args:
        path: A folder with ``config.json``, ``model.safetensors`` (or an index and shards) and
            optionally ``tokenizer.json`` and ``tokenizer_config.json``; or a ``.gguf`` file of a
            Llama, which is dequantised, with a byte-level BPE or SentencePiece tokenizer.
        dtype: Dtype of the parameters and of the computation.
        remat: Recompute each block's activations in the backward pass.
        quantize: Full-match pattern over paths of stacked kernels
            (``r"model/layers/.*/kernel"``): these are quantised to NF4 when they are read. Only
            ``jk.lslora.attach(apply_fn, config)`` can use such parameters; its adapters may be
            ``{}``.
        sharding: A sharding or device for all parameters, or a function of path and shape.
            Quantised kernels stay on the default device.
        attention: ``"cudnn"`` means flash attention, on NVIDIA GPUs, in bfloat16 or float16.
        gguf_pre: For a ``.gguf`` file with byte-level BPE: the rule that splits a text into words,
            by its name in ``tokenizer.ggml.pre`` (``"llama-bpe"``, ``"qwen2"``, ``"smollm"``,
            ``"gpt-2"``, ``"tekken"``, ``"default"``), where the file names none or another.

    Returns:
        A :class:`Pretrained`.

    Raises:
        FileNotFoundError: the folder, ``config.json`` or the weights do not exist.
        ValueError: a file is damaged, the model is not supported, or tensors are missing, unknown
            or of the wrong shape; lists all of them.
        MemoryBudgetError: the parameters would not fit; raised before anything is read.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        The parameters, and in main memory one stored tensor and, on an accelerator, the largest
        stacked parameter (a kernel of all blocks).

    Example:
        >>> load_decoder("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: no model at nowhere, which does not exist
    """
    path = Path(path)
    config, source, tokenizer, stored = open_checkpoint(path, gguf_pre=gguf_pre)
    fused = "model.layers.0.self_attn.qkv_proj.weight" in source.shapes
    leaves = layout(config, fused=fused, embedding=stored.embedding)
    params = fill(
        source,
        leaves,
        str(path),
        model="decoder",
        repeats=lambda name: repeats(name, leaves),
        hint=stored.hint,
        dtype=checked_dtype(dtype),
        sharding=sharding,
        quantize=quantize,
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
    gguf_pre: str | None = None,
) -> Pretrained:
    """Like :func:`load_decoder`, with ``jax.ShapeDtypeStruct`` in place of arrays.

    For planning: ``config.json`` is enough. If weights are present, the tokenizer is read too.
    """
    path, tokenizer = Path(path), None
    if path.is_dir() and not any(path.glob("*.safetensors")):
        config = DecoderConfig.from_hugging_face(read_config(path))
    else:
        config, _, tokenizer, _ = open_checkpoint(path, gguf_pre=gguf_pre)
    shaped = shaped_decoder(config, dtype, remat, quantize, attention)
    return shaped._replace(tokenizer=tokenizer)


def shaped_decoder(
    config: DecoderConfig,
    dtype: DTypeLike,
    remat: bool,
    quantize: str | None,
    attention: AttentionBy = "xla",
) -> Pretrained:
    """A decoder with shapes for parameters and no tokenizer."""
    leaves = layout(config, fused=True)
    params = fill_shapes(leaves, dtype=checked_dtype(dtype), quantize=quantize)
    return Pretrained(config, decoder_function(config, remat, attention), params, None)


def decoder_function(
    config: DecoderConfig, remat: bool, attention: AttentionBy
) -> NnxApply | TiedApply:
    """``apply_fn`` of a decoder; parameters are passed to each call."""

    def function(*, tied: bool) -> NnxApply:
        chosen = dataclasses.replace(config, tied_head=tied)
        options = {"remat": remat, "attention": attention}
        return from_nnx(nnx.eval_shape(lambda: Decoder(chosen, rngs=nnx.Rngs(0), **options)))[0]

    if not config.tied_head:
        return function(tied=False)
    ties = {"lm_head/kernel": "model/embed_tokens/embedding"}
    return TiedApply(function(tied=True), lambda: function(tied=False), ties)


class OpenedDecoder(NamedTuple):
    """A checkpoint before its weights are read; ``config`` ties the head as the tensors do."""

    config: DecoderConfig
    source: Source
    tokenizer: Tokenizer | None
    head: StoredHead


def open_checkpoint(path: Path, *, gguf_pre: str | None = None) -> OpenedDecoder:
    """Open a folder or a GGUF file.

    Raises:
        ValueError: ``gguf_pre`` is given for a folder.
    """
    if path.suffix == ".gguf" and path.is_file():
        config, source, tokenizer = open_gguf(path, pre=gguf_pre)
    elif gguf_pre is not None:
        raise ValueError(
            f"gguf_pre={gguf_pre!r} is for a .gguf file, and {path} is none: leave it out"
        )
    else:
        config, source, tokenizer = open_folder(path)
    head = stored_head(source, HEAD, configured=config.tied_head, where=str(path))
    config = dataclasses.replace(config, tied_head=head.is_tied)
    if tokenizer is not None:
        tokenizer = tokenizer.limited(config.vocabulary)
    return OpenedDecoder(config, source, tokenizer, head)


def open_folder(folder: Path) -> tuple[DecoderConfig, Source, Tokenizer | None]:
    """Config, weights and tokenizer of a Hugging Face folder."""
    config = DecoderConfig.from_hugging_face(read_config(folder))
    sizes = {"vocabulary": config.vocabulary, "eos_ids": config.eos_ids}
    return config, *open_weights(folder, **sizes)
