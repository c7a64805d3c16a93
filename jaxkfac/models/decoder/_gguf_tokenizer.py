"""Byte-level BPE from the fields of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkfac.models.checkpoint import Tokenizer, tokenizers_package

_CONTROL, _USER_DEFINED = 3, 4  # token types that no merge makes
_PRE = ("smollm", "gpt-2")


def gguf_tokenizer(fields: Mapping[str, Any], eos_ids: Sequence[int]) -> Tokenizer | None:
    """Vocabulary and merges as a tokenizer; ``None`` where the file has none.

    Raises:
        ValueError: another kind of tokenizer than byte-level BPE, or another way to cut a text
            into words than SmolLM's (each digit alone) or GPT-2's.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return None
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} with pre {pre!r}: expected 'gpt2' with one of "
            f"{', '.join(_PRE)}; load the Hugging Face folder"
        )
    package = tokenizers_package()
    words = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(words))
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    model = package.models.BPE({word: i for i, word in enumerate(words)}, merges)
    tokenizer = package.Tokenizer(model)
    cuts = [package.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        cuts.insert(0, package.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = package.decoders.ByteLevel()
    for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [word for word, t in zip(words, types, strict=True) if t == number]
        tokens = [package.AddedToken(word, special=special, normalized=False) for word in added]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
    found = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return Tokenizer(
        tokenizer,
        eos_ids=eos_ids,
        pad_id=fields.get("tokenizer.ggml.padding_token_id"),
        chat_template=fields.get("tokenizer.chat_template"),
        special={name: words[i] for name, i in found.items() if i is not None},
    )
