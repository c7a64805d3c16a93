"""Pairs are read by the keys that data sets have, and what is wrong is named with its line."""

import json

import pytest

from jaxkfac.jobs.data.pairs import Pair, read_pairs
from jaxkfac.jobs.data.pairs._pairs import PAIR_KEYS, parse_pair

PAIR = Pair("It rains.", "Rain.")


@pytest.mark.parametrize("keys", PAIR_KEYS, ids="-".join)
def test_each_known_pair_of_keys_is_read(keys):
    assert parse_pair(dict(zip(keys, PAIR, strict=True)) | {"id": 3}) == PAIR


def test_keys_that_are_named_win_and_either_may_be_named_alone():
    plain = {"source": "a", "target": "b", "en": "c", "de": "d", "summary": "e"}
    assert parse_pair(plain) == ("a", "b")
    assert parse_pair(plain, source="en", target="de") == ("c", "d")
    assert parse_pair(plain, target="de") == ("a", "d")
    assert parse_pair(plain, source="en") == ("c", "b")


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ([], "expected an object with keys, got list"),
        ({"source": "a"}, r"expected the keys 'source' and 'target', .*; got \['source'\]"),
        ({"source": "a", "target": 3}, "expected 'target' to be a string, got int"),
        ({"source": " \n", "target": "b"}, r"the source \('source'\) is empty"),
        ({"document": "a", "summary": ""}, r"the target \('summary'\) is empty"),
    ],
)
def test_what_is_no_pair_is_said(plain, message):
    with pytest.raises(ValueError, match=message):
        parse_pair(plain)


def test_keys_that_were_named_are_what_is_missed():
    with pytest.raises(ValueError, match=r"expected the keys 'en' and 'de'; got \['en'\]"):
        parse_pair({"en": "a"}, source="en", target="de")


def test_a_folder_has_training_and_validation_and_a_bad_line_its_number(tmp_path):
    line = json.dumps(PAIR._asdict())
    (tmp_path / "train.jsonl").write_text(f"{line}\n\n{line}\n")
    assert read_pairs(tmp_path) == ([PAIR, PAIR], [])
    held_out = tmp_path / "validation.jsonl"
    held_out.write_text(line)
    assert read_pairs(tmp_path) == ([PAIR, PAIR], [PAIR])
    assert read_pairs(held_out) == ([PAIR], [])
    for bad, message in (
        ("{", r"validation.jsonl:3: not JSON"),
        ('{"source": "", "target": "x"}', r"validation.jsonl:3: the source \('source'\) is empty"),
    ):
        held_out.write_text(f"{line}\n{line}\n{bad}")
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path)


def test_what_is_asked_is_part_of_the_source():
    row = {"instruction": "Translate to French", "input": "cat", "output": "chat"}
    assert parse_pair(row) == ("Translate to French\ncat", "chat")
    assert parse_pair(row | {"input": ""}) == ("Translate to French", "chat")
    assert parse_pair(row, source="input") == ("cat", "chat")
    row = {"question": "Which?", "context": "Two cats.", "answer": "Cats"}
    assert parse_pair(row).source == "question: Which? context: Two cats."
