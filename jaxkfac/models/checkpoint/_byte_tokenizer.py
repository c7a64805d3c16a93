"""Bytes as tokens: nothing has to be learnt from a text first."""

from jaxkfac.models.checkpoint._tokenizer import Tokenizer, tokenizers_package

_PAD, _END = "<pad>", "</s>"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 258 ids: padding (0), the end of a text (1), and the bytes of UTF-8.

    Raises:
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.size, tokenizer.decode(tokenizer.encode("naïve"))
        (258, 'naïve')
    """
    package = tokenizers_package()
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([_PAD, _END, *alphabet])}
    made = package.Tokenizer(package.models.BPE(words, []))
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    made.add_special_tokens([_PAD, _END])
    made.post_processor = package.processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, words[_END])]
    )
    special = {"pad_token": _PAD, "eos_token": _END}
    return Tokenizer(made, eos_ids=(words[_END],), pad_id=words[_PAD], special=special)
