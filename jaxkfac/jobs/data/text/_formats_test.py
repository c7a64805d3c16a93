"""Rows of other people's data sets, and what is said of rows of none."""

import pytest

from jaxkfac.jobs.data.text import Chat, Completion, Message, parse_record

WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USER, ANSWER = Message("user", "Fe?"), Message("assistant", "iron")


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"prompt": "Fe is ", "completion": "iron"}, Completion("Fe is ", "iron")),
        ({"prompt": None, "text": "Fe is iron"}, Completion("", "Fe is iron")),
        (
            {
                "prompt": [{"role": "user", "content": "Fe?"}],
                "completion": [{"role": "assistant", "content": "iron"}],
            },
            Chat((USER, ANSWER)),
        ),
        ({"instruction": "Fe?", "input": "", "output": "iron"}, Chat((USER, ANSWER))),
        (
            {"instruction": "Fe?", "input": "", "output": "iron", "text": "### Fe? ### iron"},
            Chat((USER, ANSWER)),
        ),
        (
            {"instruction": "Name it", "input": "Fe", "output": "iron", "system": "Be brief"},
            Chat((Message("system", "Be brief"), Message("user", "Name it\n\nFe"), ANSWER)),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Fe?"},
                    {"from": "gpt", "value": "iron"},
                ]
            },
            Chat((USER, ANSWER)),
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be brief", "tool_calls": None},
                    {"role": "user", "content": [{"type": "text", "text": "Fe?"}]},
                    {"role": "assistant", "content": "iron"},
                ],
                "text": None,
            },
            Chat((Message("system", "Be brief"), USER, ANSWER)),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Fe?"},
                    {"role": "assistant", "content": "lead", "weight": 0},
                    {"role": "assistant", "content": "iron", "weight": 1},
                ]
            },
            Chat((USER, Message("assistant", "lead", learnt=False), ANSWER)),
        ),
    ],
    ids="completion text turns alpaca alpaca-text alpaca-input sharegpt messages weights".split(),
)
def test_rows_of_each_format_are_records(row, record):
    assert parse_record(row) == record


@pytest.mark.parametrize("tools", [[TOOL], '[{"type": "function", "function": '
                                   '{"name": "weather", "parameters": {}}}]'])  # fmt: skip
def test_calls_of_tools_are_kept_in_either_form(tools):
    said = (
        Message("user", "Warm in Rome?"),
        Message("assistant", "", {"tool_calls": [WEATHER]}),
        Message("tool", "30"),
        Message("assistant", "Yes"),
    )
    messages = [
        {"role": "user", "content": "Warm in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [WEATHER]},
        {"role": "tool", "content": "30"},
        {"role": "assistant", "content": "Yes"},
    ]
    assert parse_record({"messages": messages, "tools": tools}) == Chat(said, (TOOL,))
    turns = [
        {"from": "human", "value": "Warm in Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "30"},
        {"from": "gpt", "value": "Yes"},
    ]
    assert parse_record({"conversations": turns, "tools": tools}) == Chat(said, (TOOL,))
    assert said[1].to_plain() == {"role": "assistant", "content": "", "tool_calls": [WEATHER]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"instruction": "a"},
            r"expected the keys .*\"instruction\" and \"output\"; .*got",
        ),
        ({"instruction": "a", "output": ""}, "output is empty"),
        ({"instruction": 1, "output": "b"}, "instruction to be a string, got int"),
        ({"conversations": []}, "not empty"),
        ({"conversations": [{"from": "gpt"}]}, "turn 0: expected"),
        ({"conversations": [{"from": "cat", "value": "b"}]}, "turn 0: from 'cat'"),
        ({"conversations": [{"from": "human", "value": "b"}]}, "no turn of the assistant"),
        ({"conversations": [{"from": "function_call", "value": "b"}]}, "turn 0: expected a call"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "{"}, "no JSON"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": 3}, "list, got int"),
        ({"messages": [{"role": "assistant", "content": None}]}, "turn 0: expected"),
        ({"messages": ["words"]}, "turn 0: expected"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "turn 0: .* answer is empty"),
        ({"conversations": [{"from": "gpt", "value": ""}]}, "turn 0: .* answer is empty"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "no turn of the assistant is learnt",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "turn 0: weight 0.5, expected 0",
        ),
    ],
)
def test_a_row_of_none_says_what_is_wrong(row, message):
    with pytest.raises(ValueError, match=message):
        parse_record(row)
