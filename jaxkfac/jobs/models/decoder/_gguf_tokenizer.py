"""Tokenizers from the fields of a GGUF file: byte-level BPE, and SentencePiece's BPE.

Such a file has vocabulary and merges (or scores), and only the name of the rule that splits a text
into words. The rules are those of the program that defines the format, llama.cpp, and the regular
expressions those of the models' own ``tokenizer.json``. As there, no Unicode normalization is
applied.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkfac.jobs.models.checkpoint import Tokenizer, tokenizers_package

# ---------------- rules that split a text into words, by their names in tokenizer.ggml.pre


class SplitRule(NamedTuple):
    """How a text is split before merges are applied, and what such a tokenizer does besides.

    Attributes:
        patterns: Regular expressions, applied one after the other to the pieces so far; both what
            matches and what lies between matches is a piece.
        whole_words: Whether a word of the vocabulary is taken at once, without merges.
        bos: Whether a text begins with BOS if the file has no ``add_bos_token``.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False


_SUFFIXES = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_ENDS_OF_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _any_case(digits: str) -> str:
    """GPT-4's expression, with ``digits`` of a number in a word."""
    words = rf"(?i:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    return rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS_OF_LINES}"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS_OF_LINES}"
)
_RULES = {
    ("default",): SplitRule(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    (
        "gpt-2", "phi-2", "roberta-bpe", "gigachat", "jina-es", "jina-de", "jina-v1-en",
        "jina-v2-es", "jina-v2-de", "jina-v2-code", "mpt", "olmo", "jais",
    ): SplitRule((_GPT2,)),
    (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
    ): SplitRule((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"): SplitRule(
        (_any_case("{1,3}"),), whole_words=True, bos=True
    ),
    ("smaug-bpe", "dbrx"): SplitRule((_any_case("{1,3}"),)),
    ("qwen2", "stablelm2", "megrez", "deepseek-r1-qwen"): SplitRule((_any_case(""),)),
    ("tekken",): SplitRule((_CASED,), whole_words=True, bos=True),
}  # fmt: skip
SPLIT_RULES = {name: rule for names, rule in _RULES.items() for name in names}
"""Rules by name; the first of several names for a rule is the usual one."""


def split_rule(stored: Any, chosen: str | None) -> SplitRule:
    """The rule of a byte-level BPE tokenizer.

    Args:
        stored: ``tokenizer.ggml.pre`` of the file, or ``None``.
        chosen: The name that the user gives, which is used instead; or ``None``.

    Raises:
        ValueError: the name is missing or unknown; says which option chooses one.
    """
    name = stored if chosen is None else chosen
    if name in SPLIT_RULES:
        return SPLIT_RULES[name]
    what = "tokenizer.ggml.pre" if chosen is None else "gguf_pre"
    problem = "is missing" if name is None else f"is {name!r}, a rule that is not known"
    usual = ", ".join(names[0] for names in _RULES)
    raise ValueError(
        f"{what} {problem}, so it is not said how a text is split into words: give the rule of "
        f"this model as gguf_pre= (--gguf-pre), one of {usual}, or load the Hugging Face folder"
    )


# ---------------- tokenizers


# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPECIAL_KEYS = {
    name: f"tokenizer.ggml.{key}_token_id"
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
                      ("pad_token", "padding"), ("eot_token", "eot"))
}  # fmt: skip
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # if the file names none
_SPACE = "\u2581"


def gguf_tokenizer(
    fields: Mapping[str, Any], eos_ids: Sequence[int], *, pre: str | None = None
) -> Tokenizer | None:
    """A tokenizer from the fields of a file; ``None`` if the file has none.

    Args:
        fields: Fields by name.
        eos_ids: End tokens from the config; the tokenizer's own are added.
        pre: Name of the rule that splits a text into words, instead of the file's; see
            ``SPLIT_RULES``.

    Raises:
        ValueError: the tokenizer is of another kind than byte-level BPE and SentencePiece's BPE,
            a field is missing or contradicts another, or the rule is missing or unknown.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return None
    stored = fields["tokenizer.ggml.tokens"]
    words = [word or f"[EMPTY_{number}]" for number, word in enumerate(stored)]  # as in llama.cpp
    ids = {word: number for number, word in enumerate(words)}
    if len(ids) < len(words):
        twice = next(word for number, word in enumerate(words) if ids[word] != number)
        raise ValueError(f"tokenizer.ggml.tokens has {twice!r} twice: download the file again")
    types = list(fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(words)))
    if len(types) != len(words):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(words)} tokens: "
            "download the file again"
        )
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = split_rule(fields.get("tokenizer.ggml.pre"), pre)
        numbers = _special_ids(fields, types, {})
        tokenizer, has_bos, special_types = _byte_level(fields, ids, rule), rule.bos, (_CONTROL,)
    elif kind == "llama":
        if pre is not None:
            raise ValueError(
                f"gguf_pre={pre!r} is for byte-level BPE, and this tokenizer is SentencePiece's "
                "(tokenizer.ggml.model 'llama'), which does not split a text into words: leave "
                "it out"
            )
        numbers = _special_ids(fields, types, _SENTENCEPIECE_IDS)
        tokenizer = _sentencepiece(fields, ids, types, numbers["unk_token"])
        has_bos, special_types = True, (_UNKNOWN, _CONTROL)
    else:
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}: expected 'gpt2' (byte-level BPE) or 'llama' "
            "(SentencePiece); load the Hugging Face folder"
        )
    package = tokenizers_package()
    for add, is_special, numbers_added in (
        (tokenizer.add_special_tokens, True, special_types),
        (tokenizer.add_tokens, False, (_USER_DEFINED,)),
    ):
        added = [word for word, n in zip(words, types, strict=True) if n in numbers_added]
        add([package.AddedToken(word, special=is_special, normalized=False) for word in added])
    ends = (*eos_ids, *(numbers[name] for name in ("eos_token", "eot_token")))
    read = Tokenizer(
        tokenizer,
        eos_ids=tuple(dict.fromkeys(number for number in ends if number is not None)),
        pad_id=numbers["pad_token"],
        chat_template=fields.get("tokenizer.chat_template"),
        special={
            name: words[number]
            for name, number in numbers.items()
            if number is not None and name != "eot_token"
        },
    )
    read.add_around(
        bos=bool(fields.get("tokenizer.ggml.add_bos_token", has_bos)),
        eos=bool(fields.get("tokenizer.ggml.add_eos_token", False)),
    )
    return read


def _special_ids(
    fields: Mapping[str, Any], types: Sequence[int], default_ids: Mapping[str, int]
) -> dict[str, int | None]:
    """Ids of the special tokens by name.

    Raises:
        ValueError: an id lies outside the vocabulary, or ``add_bos_token`` or ``add_eos_token`` is
            true and the file does not say which token that is.
    """
    numbers: dict[str, int | None] = {}
    for name, key in _SPECIAL_KEYS.items():
        default = default_ids.get(name)
        if default is not None and (
            default >= len(types) or types[default] not in (_UNKNOWN, _CONTROL)
        ):
            default = None
        number = fields.get(key, default)
        if number is not None and not 0 <= number < len(types):
            raise ValueError(
                f"{key} is {number}, and there are {len(types)} tokens: download the file again"
            )
        if number is None and fields.get(f"tokenizer.ggml.add_{name}"):
            raise ValueError(
                f"tokenizer.ggml.add_{name} is true, and {key} is missing: add it to the file, or "
                "load the Hugging Face folder"
            )
        numbers[name] = number
    return numbers


def _byte_level(fields: Mapping[str, Any], ids: dict[str, int], rule: SplitRule) -> Any:
    package = tokenizers_package()
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    model = package.models.BPE(ids, merges, ignore_merges=rule.whole_words)
    tokenizer, parts = package.Tokenizer(model), package.pre_tokenizers
    tokenizer.pre_tokenizer = parts.Sequence(
        [parts.Split(package.Regex(pattern), "isolated") for pattern in rule.patterns]
        + [parts.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = package.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    fields: Mapping[str, Any], ids: dict[str, int], types: Sequence[int], unknown: int | None
) -> Any:
    """BPE over characters, with spaces as U+2581; the merge with the best score comes first."""
    package = tokenizers_package()
    words = list(ids)
    model = package.models.BPE(
        ids,
        _merges(fields, words, types),
        unk_token=None if unknown is None else words[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer, parts = package.Tokenizer(model), package.decoders
    has_space = fields.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = package.normalizers.Sequence(
        [package.normalizers.Prepend(_SPACE)] * has_space
        + [package.normalizers.Replace(" ", _SPACE)]
    )
    steps = [parts.Replace(_SPACE, " "), parts.ByteFallback(), parts.Fuse()]
    tokenizer.decoder = parts.Sequence(steps + [parts.Strip(" ", 1, 0)] * has_space)
    return tokenizer


def _merges(
    fields: Mapping[str, Any], words: Sequence[str], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges in the order of their application.

    Raises:
        ValueError: the file has neither merges nor scores that order them.
    """
    if "tokenizer.ggml.merges" in fields:
        return [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    scores = list(fields.get("tokenizer.ggml.scores", ()))
    if len(scores) != len(words):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(words)} tokens: "
            "download the file again, or load the Hugging Face folder"
        )
    pieces = {
        word: score
        for word, score, number in zip(words, scores, types, strict=True)
        if number == _NORMAL
    }
    merges = [
        (score, len(word[:cut]), word[:cut], word[cut:])
        for word, score in pieces.items()
        for cut in range(1, len(word))
        if word[:cut] in pieces and word[cut:] in pieces
    ]
    if len(merges) > 1 and len({score for score, *_ in merges}) == 1:
        raise ValueError(
            "tokenizer.ggml.scores are all the same, so they do not say which tokens are merged "
            "first: load the Hugging Face folder"
        )
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in merges]
