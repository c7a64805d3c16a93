"""GGUF files of other people: their tokenizers split a text as the models' own do."""

import functools
import json

import gguf
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxkfac.jobs.cli.finetune import _load as cli
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.models import Tokenizer, load_decoder
from jaxkfac.jobs.models.decoder._gguf_tokenizer import SPLIT_RULES, gguf_tokenizer

PAGE = [
    "12345 and 1234567, 3.14159e10, ½ ² Ⅷ ١٢٣",
    "don't they're WE'LL I'D it'S O'Brien 'tis",
    " leading", "   three leading", "trailing  ", "a  b   c", "\tTabs\t\tand spaces ",
    "lines\nand\n\nlines\r\n\r\n  indented\n    more\n",
    "emoji 🙂👩‍👩‍👧 flags 🇨🇭🏳️‍🌈", "漢字かな交じり文、句読点。", "한국어 문장입니다",
    "naïve café, ünïcödé",
    "$5+3=8 <a|b> ^~`x` {y}[z] -- … ¿qué?", "CamelCaseWords snake_case HTTPServer",
    "def f(x):\n    return x**2  # square\n",
    "\u00a0\u200b\u3000x", "מִלָּה العربية हिन्दी", "", "x" * 40,
    "a <|end|> b<|end|>", "3 <s> 4",
]  # fmt: skip
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As in the models' tokenizer.json; "default" as in llama.cpp, which alone knows it.
PUBLISHED = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [pre_tokenizers.Split(Regex(GPT4.replace("DIGITS", "1,3")), "isolated")],
    "qwen2": [pre_tokenizers.Split(Regex(GPT4.replace("{DIGITS}", "")), "isolated")],
    "default": [
        pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ],
}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPECIAL = ["<|begin|>", "<|end|>"]


@functools.cache
def vocabulary():
    """A made vocabulary and its merges, which cross words, digits and signs."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL  # splits nothing
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([text for text in PAGE for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def fields(**changes):
    """The fields of a file with that vocabulary; ``None`` leaves one out."""
    ids, merges = vocabulary()
    words = sorted(ids, key=ids.__getitem__)
    plain = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": words,
        "token_type": [3 if word in SPECIAL else 1 for word in words],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in plain.items() if v is not None}


def written(file, plain):
    """A GGUF file with these fields, as transformers and we read it."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in plain.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string,
                list: writer.add_array}[type(value)]  # fmt: skip
        kind(name, value)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def by_transformers(file):
    from tests._transformers import transformers

    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_bpe_splits_as_the_models_own_tokenizer_json(pre, tmp_path):
    ids, merges = vocabulary()
    whole = pre == "llama-bpe"
    published = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=whole))
    published.pre_tokenizer = pre_tokenizers.Sequence([*PUBLISHED[pre], BYTE_LEVEL])
    if pre in ("gpt-2", "smollm"):  # their ByteLevel splits by itself
        published.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    published.decoder = decoders.ByteLevel()
    published.add_special_tokens(SPECIAL)
    published.save(str(tmp_path / "tokenizer.json"))
    folder, file = Tokenizer.from_folder(tmp_path), gguf_tokenizer(fields(pre=pre), ())
    for text in PAGE:
        assert file.encode(text) == folder.encode(text)
        assert file.decode(file.encode(text), skip_special_tokens=False) == text


def test_the_page_tells_all_rules_apart():
    read = (gguf_tokenizer(fields(pre=name), ()) for name in (*PUBLISHED, "tekken"))
    rows = {tuple(tuple(each.encode(text)) for text in PAGE) for each in read}
    assert len(rows) == len(PUBLISHED) + 1


@pytest.mark.slow  # imports PyTorch
@pytest.mark.sampled(3)
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"])
def test_byte_level_bpe_splits_as_transformers_reads_the_file(pre, tmp_path):
    theirs = by_transformers(written(tmp_path / "x.gguf", fields(pre=pre)))
    ours = gguf_tokenizer(fields(pre=pre), ())
    for text in PAGE:
        assert ours.encode(text) == theirs.encode(text)


def test_digits_of_llama_3_are_not_one_token():
    """The splitting of GPT-2 was assumed where a file did not say its own."""
    digits = [*"0123456789"]
    pairs = [("1", "2"), ("12", "3"), ("123", "4"), ("4", "5"), ("1234", "5")]
    ids = {word: i for i, word in enumerate([*digits, *("".join(pair) for pair in pairs)])}
    plain = {"tokens": list(ids), "token_type": None, "merges": [" ".join(x) for x in pairs],
             "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    for pre, count in (("llama-bpe", 2), ("default", 2), ("gpt-2", 1), ("smollm", 5)):
        assert len(gguf_tokenizer(fields(**plain, pre=pre), ()).encode("12345")) == count


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("pre", [None, "nobody-knows"])
def test_a_file_that_does_not_say_how_it_splits_is_refused_by_name(pre, size, tmp_path):
    changes = {} if size == "large" else {"tokens": ["a", "b"], "token_type": [1, 1], "merges": []}
    changes |= {} if size == "large" else {"bos_token_id": None, "eos_token_id": None}
    file = written(tmp_path / "x.gguf", fields(pre=pre, **changes))
    message = r"x.gguf: its tokenizer .*tokenizer\.ggml\.pre is .*gguf_pre= \(--gguf-pre\), one of"
    with pytest.raises(ValueError, match=message):
        load_decoder(file)
    with pytest.raises(ValueError, match=message):
        cli.model_shapes(Finetuning(model=str(file)))


def test_the_option_chooses_the_rule_in_python_and_on_the_command_line(tmp_path):
    from jaxkfac.jobs.models import decoder_shapes

    file = written(tmp_path / "x.gguf", fields(pre=None))
    expected = gguf_tokenizer(fields(pre="qwen2"), ())
    for read in (
        decoder_shapes(file, gguf_pre="qwen2").tokenizer,
        cli.model_shapes(Finetuning(model=str(file), gguf_pre="qwen2")).tokenizer,
        gguf_tokenizer(fields(pre="smollm"), (), pre="qwen2"),
    ):
        assert [read.encode(text) for text in PAGE] == [expected.encode(text) for text in PAGE]
    with pytest.raises(ValueError, match=r"gguf_pre is 'qwen', .* one of default, gpt-2, smollm"):
        decoder_shapes(file, gguf_pre="qwen")
    with pytest.raises(ValueError, match=r"gguf_pre='qwen2' is for a \.gguf file, and .* is none"):
        load_decoder(tmp_path, gguf_pre="qwen2")
    with pytest.raises(ValueError, match="--gguf-pre is for a .gguf file, and --model is smollm2"):
        cli.load_model(Finetuning(gguf_pre="qwen2"))


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_the_files_own_words_on_start_and_end_tokens_are_followed(pre, bos, eos):
    plain = fields(pre=pre, add_bos_token=bos, add_eos_token=eos)
    ids = gguf_tokenizer(plain, ()).encode("a")
    default = pre == "llama-bpe"  # as llama.cpp takes it where the file is silent
    assert (ids[0] == 0, ids[-1] == 1) == (default if bos is None else bos, bool(eos))


@pytest.mark.slow  # imports PyTorch
@pytest.mark.sampled(2)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False, None])
def test_start_and_end_tokens_are_those_that_transformers_adds(bos, eos, tmp_path):
    plain = fields(add_bos_token=bos, add_eos_token=eos)
    theirs = by_transformers(written(tmp_path / "x.gguf", plain))
    assert gguf_tokenizer(plain, ()).encode("a") == theirs.encode("a")


def test_a_flag_without_its_token_is_refused():
    with pytest.raises(ValueError, match=r"add_bos_token is true, and .*bos_token_id is missing"):
        gguf_tokenizer(fields(bos_token_id=None, add_bos_token=True), ())
    with pytest.raises(ValueError, match=r"eos_token_id is 5000, and there are \d+ tokens"):
        gguf_tokenizer(fields(eos_token_id=5000), ())


# ---------------- SentencePiece


WORDS = "the model of iron and gold is 12 345 a an in on lead silver don't naïve über".split()


@functools.cache
def sentencepiece():
    """``(words, scores, types)`` as SentencePiece's BPE writes them: bytes, then pieces."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    texts = [*PAGE, *(f" {word}" for word in WORDS for _ in range(9))]
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=90)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [word for word in model["vocab"] if word not in set(merged)]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged))] + [-1e5] * len(letters)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) - 259)
    return words, scores, types, [tuple(pair) for pair in model["merges"]]


def spm_fields(**changes):
    words, scores, types, _ = sentencepiece()
    spm = {"model": "llama", "pre": "default", "tokens": words, "token_type": types,
           "scores": scores, "merges": None, "bos_token_id": 1, "eos_token_id": 2,
           "unknown_token_id": 0, "add_bos_token": None}  # fmt: skip
    return fields(**spm | changes)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_the_tokenizer_json_of_the_same_vocabulary(prefix, tmp_path):
    words, _, _, merges = sentencepiece()
    published = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    steps = [normalizers.Prepend("\u2581")] * prefix + [normalizers.Replace(" ", "\u2581")]
    published.normalizer = normalizers.Sequence(steps)
    published.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    published.add_special_tokens(["<unk>", "<s>", "</s>"])
    published.save(str(tmp_path / "tokenizer.json"))
    folder = Tokenizer.from_folder(tmp_path)
    file = gguf_tokenizer(spm_fields(add_space_prefix=prefix), ())
    for text in PAGE:
        assert file.encode(text) == folder.encode(text)
        if "<s>" not in text:  # a space is put behind a special token too
            assert file.decode(file.encode(text)) == text


@pytest.mark.slow  # imports PyTorch
def test_sentencepiece_reads_as_transformers_reads_the_file(tmp_path):
    theirs, ours = by_transformers(written(tmp_path / "x.gguf", spm_fields())), gguf_tokenizer(
        spm_fields(), ()
    )  # fmt: skip
    for text in PAGE:
        # There a text that begins with a space gets no other before it, and none follows a special
        # token; SentencePiece, llama.cpp and Llama 2's own tokenizer.json put one.
        if not text.startswith(" ") and "<s>" not in text:
            assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("  a")[1:] != theirs.encode("  a")[1:]


def test_sentencepiece_without_ids_or_flags_has_those_of_llama():
    silent = spm_fields(bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    read = gguf_tokenizer(silent, ())
    assert (read.bos_id, read.eos_id, read.eos_ids) == (1, 2, (2,))
    assert read.encode("a")[0] == 1 and read.encode("a")[-1] != 2
    assert gguf_tokenizer(spm_fields(add_bos_token=False), ()).encode("a")[0] != 1


def test_sentencepiece_files_that_lack_their_order_are_refused():
    count = len(sentencepiece()[0])
    for scores, message in (
        (None, rf"tokenizer.ggml.scores has 0 entries for {count} tokens"),
        ([-1000.0] * count, "scores are all the same, so they do not say which"),
    ):
        with pytest.raises(ValueError, match=message):
            gguf_tokenizer(spm_fields(scores=scores), ())
    with pytest.raises(ValueError, match=r"gguf_pre='qwen2' is for byte-level BPE, and"):
        gguf_tokenizer(spm_fields(), (), pre="qwen2")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model is 'bert': expected 'gpt2'"):
        gguf_tokenizer(fields(model="bert"), ())
    with pytest.raises(ValueError, match=r"tokenizer.ggml.tokens has 'a' twice"):
        gguf_tokenizer(fields(tokens=["a", "b", "a"]), ())


def test_empty_tokens_are_not_the_same_token():
    plain = {"tokens": ["a", "", ""], "token_type": None, "merges": [], "bos_token_id": None}
    read = gguf_tokenizer(fields(**plain, eos_token_id=None), ())
    assert read.size == 3 and read.encode("a") == [0]


def test_every_name_of_a_rule_builds_a_tokenizer():
    for name in SPLIT_RULES:
        read = gguf_tokenizer(fields(pre=name), ())
        assert read.decode(read.encode(PAGE[0])) == PAGE[0]
