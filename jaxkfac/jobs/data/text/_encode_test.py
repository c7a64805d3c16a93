"""Which tokens are learnt, by a tokenizer of letters."""

import numpy as np
import pytest

from jaxkfac.jobs.data.text import Chat, Completion, Message, Tokenizer, encode_records

START, END, BREAK = 1, 2, ord("\n")


class Letters:
    r"""A letter is a token; turns are written as ``<role\nwords>\n`` with markers 1 and 2."""

    eos_ids, pad_id = (END,), 0

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i > 2)

    def chat(self, messages, *, add_generation_prompt=True):
        ids = []
        for turn in messages:
            ids += [START, *self.encode(turn["role"][0]), BREAK]
            ids += [*self.encode(turn["content"]), END, BREAK]
        return ids + [START, ord("a"), BREAK] * add_generation_prompt


class Forgetful(Letters):
    """Writes only the last turn of the assistant in full, as templates that cut thoughts do."""

    def chat(self, messages, *, add_generation_prompt=True):
        last = len(messages) - 1
        kept = [
            {**m, "content": m["content"] if i == last else m["content"][:1]}
            for i, m in enumerate(messages)
        ]
        return super().chat(kept, add_generation_prompt=add_generation_prompt)


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Chat(tuple(Message(roles[turn[0]], turn[1:]) for turn in turns))


def learnt(example, tokenizer=None):
    return (tokenizer or Letters()).decode(example.ids[example.learnt])


def encode(*records, max_length=100, **options):
    return encode_records(list(records), Letters(), max_length=max_length, **options)


def test_the_toy_is_a_tokenizer():
    assert isinstance(Letters(), Tokenizer)


def test_only_the_assistants_words_and_their_end_are_learnt():
    (example,) = encode(chat("sbe brief", "uhow?", "aso", "uwhy?", "athus")).examples
    assert learnt(example) == "sothus"
    ends = np.flatnonzero(example.learnt & (example.ids == END))
    assert len(ends) == 2
    assert not example.learnt[ends + 1].any()  # the line break behind a turn
    assert list(example.ids) == Letters().chat(
        [{"role": r, "content": c} for r, c in (("system", "be brief"), ("user", "how?"),
         ("assistant", "so"), ("user", "why?"), ("assistant", "thus"))],
        add_generation_prompt=False,
    )  # fmt: skip


def test_a_completion_is_learnt_with_the_end_of_the_text():
    (example,) = encode(Completion("Fe ", "iron")).examples
    assert list(example.ids) == [*b"Fe iron", END]
    assert list(example.ids[example.learnt]) == [*b"iron", END]


def test_of_plain_text_all_but_the_first_token_is_learnt():
    (example,) = encode(Completion("", "iron")).examples
    assert list(example.learnt) == [False, True, True, True, True]


def test_prompts_are_learnt_where_asked():
    (example,) = encode(chat("uhow?", "aso"), loss_on="all").examples
    assert example.learnt[1:].all() and not example.learnt[0]


def test_what_is_cut_and_what_is_left_out_is_counted():
    found = encode(
        Completion("", "abcdef"), Completion("abcdef", "g"), Completion("", "ab"), max_length=4
    )
    assert (len(found.examples), found.truncated, found.dropped) == (2, 2, 1)
    assert [len(e.ids) for e in found.examples] == [4, 3]
    assert "2 cut, 1 left out" in str(found)


def test_nothing_left_to_learn_is_an_error_with_the_lengths():
    with pytest.raises(ValueError, match=r"first 4 tokens \(the longest has 8\): raise max_length"):
        encode(Completion("abcdef", "g"), max_length=4)
    with pytest.raises(ValueError, match="max_length=1"):
        encode(Completion("", "a"), max_length=1)


class Thinks(Letters):
    """Asks for an answer without a thought, and cuts those of answers that others follow."""

    def chat(self, messages, *, add_generation_prompt=True):
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        kept = [
            {**m, "content": m["content"].rpartition("/")[2] if i < last else m["content"]}
            for i, m in enumerate(messages)
        ]
        ids = super().chat(kept, add_generation_prompt=add_generation_prompt)
        return ids + self.encode("/") * add_generation_prompt


def test_where_a_template_rewrites_earlier_answers_each_is_an_example():
    record = chat("uhow?", "a/so", "uwhy?", "ahm/thus")
    first, second = encode_records([record], Thinks(), max_length=100).examples
    assert Letters().decode(first.ids) == "u\nhow?\na\n/so\n" and learnt(first) == "so"
    assert Letters().decode(second.ids) == "u\nhow?\na\nso\nu\nwhy?\na\nhm/thus\n"
    assert learnt(second) == "hm/thus"  # it begins otherwise than asked for
    (whole,) = encode_records([record], Thinks(), max_length=100, loss_on="all").examples
    assert whole.learnt[1:].all()


def test_a_template_that_rewrites_questions_is_refused():
    record = chat("uhow?", "aso", "uwhy?", "athus")
    with pytest.raises(ValueError, match=r"before turn 1 differently.*loss_on=\"all\""):
        encode_records([record], Forgetful(), max_length=100)


class Marks(Letters):
    """Its template says that vowels of the assistant are generated; knows tools."""

    def chat(self, messages, *, add_generation_prompt=True, tools=()):
        own = [{"role": "system", "content": str(tool)} for tool in tools]
        return super().chat([*own, *messages], add_generation_prompt=add_generation_prompt)

    def marked_chat(self, messages, *, tools=()):
        ids = self.chat(messages, add_generation_prompt=False, tools=tools)
        return ids, [chr(i) in "aeiou" for i in ids]


def test_a_template_that_marks_answers_decides_and_reads_tools():
    record = Chat((Message("user", "how?"), Message("assistant", "soo")), tools=("abc",))
    (example,) = encode_records([record], Marks(), max_length=100).examples
    assert learnt(example) == "auoaoo" and "abc" in Letters().decode(example.ids)


@pytest.mark.parametrize("tokenizer", [Letters(), Marks(), Thinks()])
def test_an_answer_of_weight_zero_is_read_and_not_learnt(tokenizer):
    wrong = Message("assistant", "lead", learnt=False)
    right = Message("assistant", "iron")
    record = Chat((Message("user", "Fe?"), wrong, Message("user", "no"), right))
    (example,) = encode_records([record], tokenizer, max_length=100).examples
    assert learnt(example).strip() == "iron"
    assert "lead" in Letters().decode(example.ids)


class Begins(Letters):
    """Puts a marker before every text, as Llama's tokenizer does."""

    def encode(self, text, *, add_special_tokens=True):
        return [START] * add_special_tokens + super().encode(text)


@pytest.mark.parametrize("prompt", ["", "Fe "])
def test_the_marker_that_begins_a_text_is_written_once_and_not_learnt(prompt):
    (example,) = encode_records([Completion(prompt, "iron")], Begins(), max_length=99).examples
    assert list(example.ids) == [START, *f"{prompt}iron".encode(), END]
    assert learnt(example) == "iron"
