"""Rows of other people's data sets: read, or refused in one sentence."""

import io
import json
import math

import pytest

from jaxkfac.jobs.data.pairs import Pair
from jaxkfac.jobs.data.pairs._pairs import parse_pair
from jaxkfac.jobs.data.readers import FileRows, _formats
from jaxkfac.jobs.data.text import (
    Chat,
    Completion,
    Message,
    parse_record,
    read_records,
    record_files,
    record_format,
)
from jaxkfac.jobs.data.text import _formats as text_formats

# ---------------- numbers that JSON does not have

ROWS = [
    {"text": 'NaN, -Infinity and 1e999 " in a string', "score": math.nan},
    {"text": "a", "scores": [math.inf, -math.inf, {"x": [math.nan, 1.5, -2e-7, 3]}], "NaN": None},
    {"text": "b\\", "score": 1e300, "Infinity": "Infinity"},
]


def equal(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_with_nan_and_infinity_is_read_as_the_same_rows_in_lines(tmp_path, indent):
    array, lines = tmp_path / "x.json", tmp_path / "x.jsonl"
    text = json.dumps(ROWS, indent=indent).replace("1e+300", "-1e999")
    array.write_text(text)
    lines.write_text("\n".join(map(json.dumps, json.loads(text))))
    read = [[row for _, row in FileRows((path,), lambda row: row).read()]
            for path in (array, lines)]  # fmt: skip
    assert equal(*read) and read[0][2]["score"] == -math.inf
    assert read_records(array) == read_records(lines)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, -1])
def test_wherever_a_chunk_ends(size):
    text = json.dumps([[*ROWS, '\\"NaN'], math.nan, -math.inf, 123456, True]).encode()
    shallow = _formats._Shallow(io.BufferedReader(io.BytesIO(text)))
    marked = b"".join(iter(lambda: shallow.read(size), b""))
    assert equal(_formats._unmarked(json.loads(marked)), json.loads(text))
    assert shallow.has_marks and shallow._depth == 0


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_nan_in_a_key_that_is_read_is_named_with_its_row(tmp_path, name):
    rows = [{"text": "a"}, {"text": math.nan}]
    text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}:2: expected text to be a string, got float nan"):
        read_records(tmp_path / name)
    with pytest.raises(ValueError, match="expected 'target' to be a string, got float nan"):
        parse_pair({"source": "a", "target": math.nan})


@pytest.mark.parametrize("broken", ["[1, -NaN]", "[NaNa]", "[nan]", "[Infinit]", "[1e999e9]"])
def test_what_only_looks_like_such_a_number_is_damaged_as_before(tmp_path, broken):
    (tmp_path / "x.json").write_text(broken)
    with pytest.raises(ValueError, match=r"x.json is damaged or cut short behind element [01]"):
        list(FileRows((tmp_path / "x.json",), lambda row: row).read())


# ---------------- forms that people have

FE = (Message("user", "Fe?"), Message("assistant", "iron"))
TURNS = [{"role": "user", "content": "Fe?"}, {"role": "assistant", "content": "iron"}]
SHARED = [{"from": "human", "value": "Fe?"}, {"from": "gpt", "value": "iron"}]
BRIEF = Message("system", "Be brief")


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"question": "Fe?", "answer": "iron", "id": 7}, Chat(FE)),
        ({"question": "Fe?", "answer": "iron", "system": "Be brief"}, Chat((BRIEF, *FE))),
        (
            {"question": "Fe?", "context": "Symbols", "answer": "iron"},
            Chat((Message("user", "Fe?\n\nSymbols"), FE[1])),
        ),
        ({"prompt": "Fe is ", "response": "iron"}, Completion("Fe is ", "iron")),
        ({"prompt": TURNS[:1], "response": TURNS[1:]}, Chat(FE)),
        ({"instruction": "Fe?", "context": "", "response": "iron", "category": "qa"}, Chat(FE)),
        ({"instruction": "Fe?", "context": None, "response": "iron"}, Chat(FE)),
        (
            {"instruction": "Fe?", "context": "Symbols", "response": "iron"},
            Chat((Message("user", "Fe?\n\nSymbols"), FE[1])),
        ),
        ({"messages": json.dumps(TURNS)}, Chat(FE)),
        ({"messages": json.dumps(TURNS), "tools": "[]"}, Chat(FE)),
        ({"conversations": SHARED}, Chat(FE)),
        ({"conversations": [{"from": "system", "value": "Be brief"}, *SHARED]},
         Chat((BRIEF, *FE))),
        ({"conversations": json.dumps(SHARED)}, Chat(FE)),
        ({"conversations": TURNS, "system": "Be brief"}, Chat((BRIEF, *FE))),
    ],
)  # fmt: skip
def test_a_row_that_people_have_is_read(row, record):
    assert parse_record(row) == record


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"question": "a", "answer": "b", "text": "c"}, Completion("", "c")),
        ({"prompt": "a", "completion": "b", "response": "c"}, Completion("a", "b")),
        ({"instruction": "Fe?", "output": "iron", "response": "c"}, Chat(FE)),
        ({"messages": TURNS, "prompt": "a", "response": "b"}, Chat(FE)),
    ],
)
def test_rows_of_the_earlier_forms_keep_their_meaning(row, record):
    assert parse_record(row) == record


def test_a_form_that_was_registered_comes_before(monkeypatch):
    monkeypatch.setattr(text_formats, "_FORMATS", list(text_formats._FORMATS))
    record_format("question", "answer")(lambda row: Completion(row["question"], row["answer"]))
    assert parse_record({"question": "a", "answer": "b"}) == Completion("a", "b")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "answer": "b", "prompt": "c", "response": "d"}, "leave one of them"),
        ({"instruction": "a", "prompt": "b", "response": "c"}, "leave one of them"),
        ({"question": "a", "answer": ""}, "the answer is empty"),
        ({"question": "a", "answer": 3}, "expected answer to be a string, got int 3"),
        ({"instruction": "a", "response": ""}, "the response is empty"),
        ({"prompt": "a", "response": ""}, "is empty: there is nothing to learn"),
        ({"prompt": [1], "response": "b"}, "expected prompt to be a string, got list"),
        ({"messages": "hello"}, r'"messages" is a string that is no JSON \(Expecting value\)'),
        ({"messages": "{}"}, 'expected "messages" to be a list of turns that is not empty'),
        ({"conversations": "[" * 9999}, '"conversations" is a string that is no JSON'),
        ({"question": "a"}, r'expected the keys .*"question" and "answer"; .*; got'),
    ],
)
def test_a_row_that_is_none_or_could_be_several_is_refused_in_one_sentence(row, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_record(row)
    assert "\n" not in str(raised.value)


def test_the_same_rows_are_pairs_for_an_encoder_decoder():
    assert parse_pair({"prompt": "Fe?", "response": "iron"}) == Pair("Fe?", "iron")
    row = {"instruction": "Name it", "context": "Fe", "response": "iron"}
    assert parse_pair(row) == Pair("Name it\nFe", "iron")
    assert parse_pair(row | {"context": ""}) == Pair("Name it", "iron")


def test_turns_in_a_string_are_read_from_a_file(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": json.dumps(TURNS)}) + "\n{}")
    rows = [row for _, row in record_files(tmp_path)[0].read()]
    assert rows[0] == Chat(FE) and str(rows[1]).startswith(f"{tmp_path / 'train.jsonl'}:2: ")
