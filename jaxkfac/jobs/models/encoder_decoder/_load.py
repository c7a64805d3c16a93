"""An encoder-decoder from a folder in Hugging Face's layout."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxkfac.flax import NnxApply, from_nnx
from jaxkfac.jobs.models.checkpoint import (
    HeadTensors,
    Leaf,
    Pretrained,
    TensorSpec,
    TiedApply,
    alone,
    fill,
    fill_shapes,
    open_weights,
    read_config,
    save_folder,
    stored_head,
)
from jaxkfac.jobs.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.jobs.models.encoder_decoder._encoder_decoder import EncoderDecoder
from jaxkfac.memory import LeafSharding, checked_dtype

# ---------------- which stored tensors form each parameter of an encoder-decoder


_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
HEAD = HeadTensors("shared.weight", copies=_COPIES)


def layout(config: EncoderDecoderConfig, *, embedding: str = HEAD.embedding) -> dict[str, Leaf]:
    """All parameters by path; ``embedding`` is the tensor that holds the table of the tokens."""
    leaves = {"shared/embedding": alone(embedding, (config.vocabulary, config.width))}
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
        # stored with the first block, used by all
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.num_buckets, config.num_heads)
        leaves[f"{stack}/relative_attention_bias/embedding"] = alone(table, shape)
        norm = f"{stack}.final_layer_norm.weight"
        leaves[f"{stack}/final_layer_norm/scale"] = alone(norm, (config.width,))
    if not config.tied_head:
        shape = (config.vocabulary, config.width)
        leaves["lm_head/kernel"] = alone(HEAD.head, shape, transposed=True)
    return leaves


def repeats(name: str, config: EncoderDecoderConfig) -> bool:
    """Whether a stored tensor is redundant: the embedding again, or never used."""
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return name in (*HEAD.copies, unread) or (name == HEAD.head and config.tied_head)


def _block(config: EncoderDecoderConfig, *, cross: bool) -> dict[str, tuple[int, ...]]:
    """Stored shapes of a block's tensors by path: (out, in), or (width,) for norms."""
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


# ---------------- loading


def load_encoder_decoder(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    dropout: float | int | None = 0.0,
    remat: bool = True,
    quantize: str | None = None,
    sharding: LeafSharding | None = None,
) -> Pretrained:
    """Load an encoder-decoder of type t5: version 1.0, 1.1 or FLAN.

    Parameters are not initialised first: shapes come from the config, names and shapes of the
    checkpoint are compared with them before any parameter is filled, and stacked parameters are
    read block by block. The head is tied if the checkpoint has none, or a copy of the
    embedding, whatever its config says; a warning says so where the config says otherwise.

    Args:
        path: A folder with ``config.json``, ``model.safetensors`` (or an index and shards) and
            optionally ``tokenizer.json`` and ``tokenizer_config.json``.
        dtype: Dtype of the parameters and of the computation; not float16, which the activations of
            T5 exceed.
        dropout: Rate in calls with a ``key``; ``None`` uses that of the file. For training only:
            a key for sampled labels also drops elements.
        remat: Recompute each block's activations in the backward pass.
        quantize: Full-match pattern over paths of stacked kernels
            (``r"(encoder|decoder)/block/.*/kernel"``): these are quantised to NF4 when they are
            read. Only ``jk.lslora.attach(apply_fn, config)`` can use such parameters.
        sharding: A sharding or device for all parameters, or a function of path and shape.
            Quantised kernels stay on the default device.

    Returns:
        A :class:`Pretrained`; ``apply_fn(params, Pairs(...)) -> logits``.

    Raises:
        FileNotFoundError: the folder, ``config.json`` or the weights do not exist.
        ValueError: a file is damaged, the model is not supported, tensors are missing, unknown or
            of the wrong shape (lists all of them) or not finite, or ``dtype`` is float16.
        MemoryBudgetError: the parameters would not fit; raised before one is filled.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        The parameters, and in main memory one stored tensor and, on an accelerator, the largest
        stacked parameter (a kernel of all blocks). If both are stored, embedding and head are also
        read once, to the first difference.

    Example:
        >>> load_encoder_decoder("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: no model at nowhere, which does not exist
    """
    path = Path(path)
    config = EncoderDecoderConfig.from_hugging_face(read_config(path))
    source, tokenizer = open_weights(path, vocabulary=config.vocabulary, eos_ids=config.eos_ids)
    stored = stored_head(source, HEAD, configured=config.tied_head, where=str(path))
    config = dataclasses.replace(config, tied_head=stored.is_tied)
    leaves = layout(config, embedding=stored.embedding)
    params = fill(
        source,
        leaves,
        str(path),
        model="encoder-decoder",
        repeats=lambda name: repeats(name, config),
        hint=stored.hint,
        dtype=_checked(dtype),
        sharding=sharding,
        quantize=quantize,
    )
    apply_fn = encoder_decoder_function(config, remat, dropout)
    return Pretrained(config, apply_fn, params, tokenizer, str(path))


def encoder_decoder_shapes(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    dropout: float | int | None = 0.0,
    remat: bool = True,
    quantize: str | None = None,
) -> Pretrained:
    """Like :func:`load_encoder_decoder`, with ``jax.ShapeDtypeStruct`` in place of arrays.

    For planning: ``config.json`` is enough. If weights are present, they decide whether the head
    is tied; if a tokenizer is present, it is read.

    Raises:
        FileNotFoundError: the folder or its ``config.json`` does not exist.
        ValueError: the model is not supported.
    """
    path = Path(path)
    config, tokenizer = EncoderDecoderConfig.from_hugging_face(read_config(path)), None
    if any(path.glob("*.safetensors")):
        sizes = {"vocabulary": config.vocabulary, "eos_ids": config.eos_ids}
        source, tokenizer = open_weights(path, **sizes)
        stored = stored_head(source, HEAD, configured=config.tied_head, where=str(path))
        config = dataclasses.replace(config, tied_head=stored.is_tied)
    return shaped_encoder_decoder(config, dtype, dropout, remat, quantize)._replace(
        tokenizer=tokenizer, path=str(path)
    )


def shaped_encoder_decoder(
    config: EncoderDecoderConfig,
    dtype: DTypeLike,
    dropout: float | int | None,
    remat: bool,
    quantize: str | None,
) -> Pretrained:
    """An encoder-decoder with shapes for parameters and no tokenizer."""
    shapes = fill_shapes(layout(config), dtype=_checked(dtype), quantize=quantize)
    return Pretrained(config, encoder_decoder_function(config, remat, dropout), shapes, None)


def _checked(dtype: DTypeLike) -> np.dtype:
    """The dtype, unless activations of T5 exceed it.

    transformers clamps them in float16 and keeps a kernel of every block in float32.
    """
    checked = checked_dtype(dtype)
    if checked == np.float16:
        raise ValueError(
            "dtype=float16: activations of T5 exceed 65,504; take dtype=bfloat16 or float32"
        )
    return checked


def save_encoder_decoder(folder: str | Path, pretrained: Pretrained) -> None:
    """Write a folder that :func:`load_encoder_decoder` and transformers can read.

    Args:
        folder: Created if it is missing.
        pretrained: A model with parameters that are not quantised; their dtype is kept.

    Raises:
        ValueError: the parameters do not match the config.
        OSError: a file could not be written; an existing one is unchanged.

    Memory:
        One stored tensor in main memory.
    """
    config, params = pretrained.config, dict(pretrained.params)
    if "lm_head" in params:  # which a merged adapter may have separated
        config = dataclasses.replace(config, tied_head=False)
    for stack in ("encoder", "decoder"):
        params[stack] = dict(params[stack])
        separate = params[stack].pop("embed_tokens", None)
        if separate and not np.array_equal(separate["embedding"], params["shared"]["embedding"]):
            raise ValueError(
                f"params: {stack}/embed_tokens/embedding differs from shared/embedding, and a "
                "folder of load_encoder_decoder holds one embedding; save the adapter instead of "
                "merging it"
            )
    entries = config.to_hugging_face()
    if pretrained.path is not None:  # entries other than the sizes are kept
        entries = read_config(Path(pretrained.path)) | entries
    save_folder(folder, params, layout(config), entries, pretrained.tokenizer)


def encoder_decoder_function(
    config: EncoderDecoderConfig, remat: bool, dropout: float | int | None = 0.0
) -> TiedApply:
    """``apply_fn`` of an encoder-decoder; parameters are passed to each call."""
    rate = config.dropout if dropout is None else dropout

    def function(*, separate: bool) -> NnxApply:
        chosen = dataclasses.replace(config, tied_head=config.tied_head and not separate)

        def model() -> EncoderDecoder:
            options = {"dropout": rate, "remat": remat, "separate_embeddings": separate}
            return EncoderDecoder(chosen, rngs=nnx.Rngs(0), **options)

        return from_nnx(nnx.eval_shape(model))[0]

    names = ["encoder/embed_tokens/embedding", "decoder/embed_tokens/embedding"]
    names += ["lm_head/kernel"] * config.tied_head
    ties = dict.fromkeys(names, "shared/embedding")
    return TiedApply(function(separate=False), lambda: function(separate=True), ties)
