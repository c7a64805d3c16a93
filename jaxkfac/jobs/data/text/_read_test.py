import pytest

from jaxkfac.jobs.data.text import Chat, Completion, Message, read_folder, read_records

CHAT = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}'


def written(tmp_path, *lines, name="train.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def test_the_three_forms_are_read_and_empty_lines_passed_over(tmp_path):
    lines = (CHAT, "", '{"prompt": "a", "completion": "b"}', '{"text": "c\u2028d"}', "  ")
    assert read_records(written(tmp_path, *lines)) == [
        Chat((Message("user", "?"), Message("assistant", "!"))),
        Completion("a", "b"),
        Completion("", "c\u2028d"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON"),
        ('["text"]', "expected an object"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ('{"txt": "a"}', r"got \['txt'\]"),
        ('{"prompt": "a", "completion": ""}', "completion is empty"),
        ('{"prompt": 1, "completion": "b"}', "prompt to be a string, got int"),
        ('{"messages": []}', "not empty"),
        ('{"messages": [{"role": "user", "content": "?"}]}', "no turn of the assistant"),
        ('{"messages": [{"role": "robot", "content": "?"}]}', "turn 0: role 'robot'"),
        ('{"messages": [{"role": "user"}]}', "turn 0: expected"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(line, message, tmp_path):
    path = written(tmp_path, CHAT, "", line)
    with pytest.raises(ValueError, match=f"train.jsonl:3: .*{message}"):
        read_records(path)


def test_a_folder_gives_training_and_validation_records(tmp_path):
    written(tmp_path, CHAT)
    assert read_folder(tmp_path)[1] == []
    written(tmp_path, CHAT, CHAT, name="validation.jsonl")
    train, validation = read_folder(tmp_path)
    assert (len(train), len(validation)) == (1, 2)
    assert read_folder(tmp_path / "train.jsonl") == (train, [])


def test_what_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere, which does not exist"):
        read_folder(tmp_path / "nowhere")
    written(tmp_path, CHAT, name="data.csv")
    with pytest.raises(FileNotFoundError, match=r"nothing to train on in .*, which holds data.csv"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match="holds no line"):
        read_records(written(tmp_path, ""))
