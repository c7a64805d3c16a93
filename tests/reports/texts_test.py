"""Texts of other people: which tokens stand around them, and which of them are learned."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxkfac.jobs.cli.finetune._problem import FinetuneProblem
from jaxkfac.jobs.cli.influence._options import InfluenceArguments
from jaxkfac.jobs.cli.influence._texts import RecordReader
from jaxkfac.jobs.data.choices import Question
from jaxkfac.jobs.data.choices._questions import choice_examples
from jaxkfac.jobs.data.pairs import Pair, encode_pair
from jaxkfac.jobs.data.text import (
    Chat,
    Completion,
    Message,
    encode_records,
    encode_with_ending,
    parse_record,
    record_files,
    token_stream,
)
from jaxkfac.jobs.models import Pretrained, Tokenizer, byte_tokenizer, generate
from jaxkfac.jobs.models.decoder import DecoderConfig, _generate
from jaxkfac.jobs.models.evaluation import Requests

RECORD = Path(__file__).with_name("lm_eval_rows.json")
PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
WORDS = ["<s>", "</s>", "<|im_end|>", "<unk>", *"Fe is iron Answer: user assistant Au gold".split()]
_SPACE = "\u2581"
TEMPLATES = {  # single text, pair of texts
    "none": None,
    "BOS": ("<s> $A", "<s> $A <s> $B"),
    "EOS": ("$A </s>", "$A </s> $B </s>"),
    "BOS and EOS": ("<s> $A </s>", "<s> $A </s> <s> $B </s>"),
}
ENDS = "<s>{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
ENDLESS = ENDS.replace("</s>", " ")
OPEN = "{% if add_generation_prompt %}assistant {% endif %}"
PROMPT, ANSWER = "Fe is", "iron"
CHAT = Chat((Message("user", PROMPT), Message("assistant", ANSWER)))


def made(kind="none", template=ENDS + OPEN):
    """A tokenizer of whole words with one of the post-processors."""
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:4])
    if (written := TEMPLATES[kind]) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=written[0], pair=written[1], special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(tokenizer, eos_ids=(1,), chat_template=template, special=special)


def ids_of(text):
    return [WORDS.index(word) for word in text.split()]


def shown(ids, learnt):
    """Words of a row; what is learned is bold."""
    return " ".join(f"**{WORDS[i]}**" if x else WORDS[i] for i, x in zip(ids, learnt, strict=True))


def row_of(record, tokenizer):
    (example,) = encode_with_ending(record, tokenizer).examples
    return shown(*example)


def sent(prompt, tokenizer, monkeypatch):
    """The ids that ``generate`` reads for a text, without running a model."""
    rows = []

    def stop(given):
        rows.extend(given)
        raise StopIteration

    config = DecoderConfig(vocabulary=len(WORDS), width=8, hidden=8, depth=1, num_heads=1,
                           num_kv_heads=1, head_size=8, context=99)  # fmt: skip
    model = Pretrained(config, lambda *_: None, {}, tokenizer)
    with monkeypatch.context() as patched:
        patched.setattr(_generate, "_side_by_side", stop)
        with pytest.raises(StopIteration):
            generate(model, prompt, max_new_tokens=4)
    return rows[0]


def forms(kind, monkeypatch):
    """A row of tokens for each form of a text, by its name on the page."""
    tokenizer, endless = made(kind), made(kind, ENDLESS + OPEN)
    question = Question("1", PROMPT, (ANSWER, "gold"), ("A", "B"), 0)
    options = {"style": "plain", "system": "", "max_length": 99}
    choice = choice_examples([question], tokenizer, **options)[0][0]
    lengths = {"max_source_length": 99, "max_target_length": 99}
    pair = encode_pair(Pair(PROMPT, ANSWER), tokenizer, **lengths)[0]
    prompt = sent(PROMPT, tokenizer, monkeypatch)
    return {
        "`text`": row_of(Completion("", f"{PROMPT} {ANSWER}"), tokenizer),
        "`prompt`, `completion`": row_of(Completion(PROMPT, ANSWER), tokenizer),
        "a prompt in `generate`": shown(prompt, [False] * len(prompt)),
        "a choice, `--style plain`": shown(*choice),
        "a chat": row_of(CHAT, tokenizer),
        "a chat, if the template writes no end": row_of(CHAT, endless),
        "a pair's source": shown(pair.source, [False] * len(pair.source)),
        "a pair's target": shown(pair.target, [True] * len(pair.target)),
    }


def test_the_table_of_token_rows_in_the_docs_is_what_is_built(monkeypatch):
    columns = {kind: forms(kind, monkeypatch) for kind in TEMPLATES}
    lines = [f"| row | {' | '.join(columns)} |", "|---|---|---|---|---|"]
    for name in columns["none"]:
        cells = (column[name].replace("<", r"\<") for column in columns.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    assert "\n".join(lines) in PAGE.read_text()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_model_is_asked_with_the_tokens_that_it_was_taught_with(kind, monkeypatch):
    tokenizer = made(kind)
    start = "<s> " if "BOS" in kind else ""
    expected = ids_of(f"{start}Fe is")
    (taught,) = encode_with_ending(Completion(PROMPT, ANSWER), tokenizer).examples
    assert taught.ids.tolist() == [*expected, *ids_of("iron </s>")]
    assert taught.ids[taught.learnt].tolist() == ids_of("iron </s>")
    assert sent(PROMPT, tokenizer, monkeypatch) == expected
    asked = Requests.__new__(Requests)
    asked.tokenizer, asked.prefix_id = tokenizer, 0
    assert asked._pair(PROMPT, " iron") == (expected, ids_of("iron"))
    (text,) = encode_with_ending(Completion("", "Fe is iron"), tokenizer).examples
    assert text.ids.tolist() == ids_of(f"{start}Fe is iron </s>")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_text_that_was_rendered_before_has_its_start_and_its_end_once(kind, monkeypatch):
    tokenizer = made(kind)
    (text,) = encode_with_ending(Completion("", "<s> Fe is iron </s>"), tokenizer).examples
    assert text.ids.tolist() == ids_of("<s> Fe is iron </s>")
    (parts,) = encode_with_ending(Completion("<s> Fe is", "iron </s>"), tokenizer).examples
    assert parts.ids.tolist() == text.ids.tolist()
    assert sent("<s> Fe is", tokenizer, monkeypatch) == ids_of("<s> Fe is")


@pytest.mark.parametrize(("prompt", "answer"), [("Fe is", " iron"), ("Fe is ", "iron")])
def test_a_tokenizer_that_begins_each_text_with_a_space_puts_none_before_an_answer(prompt, answer):
    """SentencePiece's dummy prefix: an answer by itself would begin with a second space."""
    pieces = [f"{_SPACE}{word}" for word in ("Fe", "is", "iron", "Answer:")]
    letters = dict.fromkeys([*"<s>", _SPACE, *"".join(pieces), *"\n"])
    joined = [p[:n] for p in (*pieces, "iron") for n in range(2, len(p) + 1)]
    ids = {word: i for i, word in enumerate(dict.fromkeys(["<s>", "</s>", *letters, *joined]))}
    merges = list(dict.fromkeys((word[:-1], word[-1]) for word in joined))
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    spaced = Tokenizer(tokenizer, eos_ids=(1,), special={"eos_token": "</s>"})
    (example,) = encode_with_ending(Completion(prompt, answer), spaced).examples
    assert tokenizer.decode(example.ids[:-1].tolist()) == " Fe is iron"
    asked = Requests.__new__(Requests)
    asked.tokenizer, asked.prefix_id = spaced, 0
    context, continuation = asked._pair("Fe is", " iron")
    assert example.ids[-1] == 1 and continuation == [ids[f"{_SPACE}iron"]]
    if prompt == "Fe is":
        assert example.ids[:-1].tolist() == context + continuation
    question = Question("1", "Fe", ("iron", "is"), ("A", "B"), 0)
    options = {"style": "plain", "system": "", "max_length": 99}
    (first, _), = choice_examples([question], spaced, **options)  # fmt: skip
    assert first.ids[first.learnt].tolist() == continuation


def test_an_end_written_in_a_prompt_stays(monkeypatch):
    assert sent("Au </s>", made("EOS"), monkeypatch) == ids_of("Au </s>")
    assert sent("", made("BOS"), monkeypatch) == ids_of("<s>")


@pytest.mark.parametrize(
    ("processor", "flags", "row"),
    [
        ("none", {"add_bos_token": True}, "<s> Fe"),
        ("none", {"add_bos_token": True, "add_eos_token": True}, "<s> Fe </s>"),
        ("BOS", {"add_bos_token": True, "add_eos_token": False}, "<s> Fe"),
        ("EOS", {"add_bos_token": True}, "<s> Fe </s>"),
        ("BOS and EOS", {"add_bos_token": False}, "<s> Fe </s>"),  # as in transformers 5
        ("none", {"add_bos_token": False, "add_eos_token": None}, "Fe"),
    ],
)
def test_a_folder_whose_config_says_what_is_added(processor, flags, row, tmp_path):
    made(processor).save(tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = Tokenizer.from_folder(tmp_path)
    assert read.encode("Fe") == ids_of(row)
    assert read._tokenizer.encode("Fe", "Au").ids[-1] == ids_of(row.replace("Fe", "Au"))[-1]
    read.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode("Fe") == ids_of(row)


def test_a_flag_that_is_no_truth_value_is_refused(tmp_path):
    made().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "yes"}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json: add_bos_token is 'yes': expec"):
        Tokenizer.from_folder(tmp_path)


def test_the_byte_tokenizer_of_the_docs_teaches_no_end_before_an_answer():
    (example,) = encode_with_ending(Completion("Fe is ", "iron"), byte_tokenizer()).examples
    assert example.ids.tolist().count(1) == 1 and example.ids[-1] == 1
    assert byte_tokenizer().decode(example.ids[example.learnt].tolist()) == "iron"


def test_a_chat_template_that_writes_no_end_has_one_appended_and_says_so(tmp_path):
    endless = made("BOS", ENDLESS + OPEN)
    turns = (*CHAT.messages, Message("user", "Au"), Message("assistant", "gold"))
    encoded = encode_records([CHAT, Chat(turns), Completion("Fe", "iron")], endless, max_length=99)
    assert encoded.appended == 2 and "EOS was appended" in str(encoded)
    for example in encoded.examples:
        assert example.ids[-1] == 1 and example.learnt[-1] and (example.ids == 1).sum() == 1
    plain = encode_records([CHAT], made("BOS"), max_length=99)
    assert plain.appended == 0 and "EOS" not in str(plain)
    (whole,) = encode_records([CHAT], endless, max_length=99, loss_on="all").examples
    assert whole.ids[-1] == 1
    row = json.dumps({"messages": [t.to_plain() for t in CHAT.messages]})
    (tmp_path / "train.jsonl").write_text(f"{row}\n" * 4)
    stream = token_stream(record_files(tmp_path)[0], endless, batch_size=2, max_length=16)
    assert stream.first_tally.appended == 4 and "EOS was appended" in str(stream.first_tally)
    problem = FinetuneProblem(*[None] * 7, train=stream)
    assert problem.described().endswith("4 chats: the tokenizer's EOS was appended and is learned")


def test_the_command_that_scores_texts_says_that_an_end_was_appended(tmp_path):
    rows = [{"messages": [t.to_plain() for t in CHAT.messages]}, {"text": "Fe is iron"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DecoderConfig(vocabulary=len(WORDS), width=8, hidden=8, depth=1, num_heads=1,
                           num_kv_heads=1, head_size=8, context=99)  # fmt: skip
    arguments = InfluenceArguments(tmp_path / "x.jsonl", tmp_path / "x.jsonl", max_length=99)
    for template, message in ((ENDLESS, "answer of 1 chats: the tokenizer's EOS"), (ENDS, "texts")):
        model = Pretrained(config, None, {}, made(template=template + OPEN))
        texts = RecordReader(arguments, model).read(tmp_path / "x.jsonl", "text")
        assert message in str(texts) and len(texts.texts) == 2
    refusing = Pretrained(config, None, {}, made(template="{{ raise_exception('no') }}"))
    with pytest.raises(ValueError, match=r"x.jsonl: text 1: the chat template refuses .*: no"):
        RecordReader(arguments, refusing).read(tmp_path / "x.jsonl", "text")


def test_generation_marks_that_leave_out_the_end_are_said():
    marks = "{% generation %}{{ m.content }}{% endgeneration %}"
    marked = made(template=ENDS.replace("{{ m.content }}", marks))
    encoded = encode_records([CHAT], marked, max_length=99)
    (example,) = encoded.examples
    assert example.ids[example.learnt].tolist() == ids_of("Fe is iron")
    assert encoded.unlearned == 1 and "it is not learned" in str(encoded)
    endless = made(template=ENDLESS.replace("{{ m.content }}", marks))
    (example,) = encode_records([CHAT], endless, max_length=99).examples
    assert example.ids[example.learnt].tolist() == ids_of("Fe is iron </s>")


def test_an_end_token_of_another_name_in_the_template_is_followed_by_eos():
    """ChatML on a base model whose end token is another: generation would not stop."""
    chatml = made(template=ENDS.replace("</s>", " <|im_end|>") + OPEN)
    (example,) = encode_with_ending(CHAT, chatml).examples
    assert example.ids[example.learnt].tolist() == ids_of("iron <|im_end|> </s>")


def test_a_template_that_raises_is_named_with_its_record(tmp_path):
    refuses = made(template="{{ raise_exception('no system turns') }}")
    with pytest.raises(ValueError, match=r"record 2: .*refuses these messages: no system turns"):
        encode_records([Completion("", "Fe"), CHAT], refuses, max_length=9)
    divides = made(template="{{ 1 / 0 }}")
    with pytest.raises(ValueError, match=r"record 1: .*division by zero"):
        encode_records([CHAT], divides, max_length=9)
    row = json.dumps({"messages": [t.to_plain() for t in CHAT.messages]})
    (tmp_path / "train.jsonl").write_text(f'{{"text": "Fe is"}}\n{row}\n')
    rows = record_files(tmp_path)[0]
    tally = token_stream(rows, divides, batch_size=1, max_length=9, window=1).first_tally
    assert tally.bad == 1 and "train.jsonl:2: the chat template refuses" in tally.bad_rows[0]


def test_answers_without_loss_are_not_given_a_learned_end():
    wrong = parse_record(
        {
            "messages": [
                {"role": "user", "content": "Fe"},
                {"role": "assistant", "content": "iron"},
                {"role": "user", "content": "Au"},
                {"role": "assistant", "content": "iron", "weight": 0},
            ]
        }
    )
    encoded = encode_records([wrong], made(template=ENDLESS + OPEN), max_length=99)
    (example,) = encoded.examples
    assert example.ids[example.learnt].tolist() == ids_of("iron </s>")
    assert np.flatnonzero(example.learnt)[-1] == len(example.ids) - 1


# ---------------- what lm-eval sends, from a record, because it is rarely installed

ASKED = [["Fe is", " iron"], ["Fe is ", "iron"], ["Au", " gold Fe"], ["<s> Fe", " iron"]]


def by_lm_eval(kind):
    """Rows of context and continuation by lm-eval's model for Hugging Face, without a model."""
    from tests._transformers import transformers

    lm_eval = pytest.importorskip("lm_eval.models.huggingface", reason="pip install jaxkfac[eval]")

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made(kind)._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    model = lm_eval.HFLM.__new__(lm_eval.HFLM)
    model.tokenizer, model.backend = tokenizer, "causal"
    model.add_bos_token = model.custom_prefix_token_id = None
    return [[list(ids) for ids in model._encode_pair(*pair)] for pair in ASKED]


def test_lm_eval_is_answered_on_the_rows_of_its_record():
    record = json.loads(RECORD.read_text())
    for kind in TEMPLATES:
        asked = Requests.__new__(Requests)
        asked.tokenizer, asked.prefix_id = made(kind), 0
        rows = [[list(ids) for ids in asked._pair(*pair)] for pair in ASKED]
        # With an EOS behind each text, lm-eval scores that EOS and not the continuation. Here it is
        # scored as if the tokenizer appended none, which is what the model was taught.
        without_end = {"EOS": "none", "BOS and EOS": "BOS"}.get(kind, kind)
        assert rows == record["rows"][without_end]
        assert (without_end == kind) == (record["rows"][kind] == rows)


def test_the_record_is_what_lm_eval_sends():
    assert json.loads(RECORD.read_text())["rows"] == {kind: by_lm_eval(kind) for kind in TEMPLATES}
