"""A model with its weights, however it was loaded."""

from typing import Any, NamedTuple

from jaxtyping import PyTree

from jaxkfac.interception import NnxApply
from jaxkfac.models.checkpoint._tokenizer import Tokenizer


class Pretrained(NamedTuple):
    """A model with its weights.

    Attributes:
        config: Sizes: a :class:`DecoderConfig` or an :class:`EncoderDecoderConfig`.
        apply_fn: ``apply_fn(params, inputs) -> logits``; see :class:`Decoder` and
            :class:`EncoderDecoder`.
        params: Nested dictionary; paths are Hugging Face's names, with blocks stacked.
        tokenizer: ``None`` where the checkpoint has none.
        path: The folder it is from, which PyTorch can read as well; ``None`` for a GGUF file.
    """

    config: Any
    apply_fn: NnxApply
    params: PyTree
    tokenizer: Tokenizer | None
    path: str | None = None
