"""Batches from files: every record once a pass, and from any position the same ones."""

import itertools
import json

import numpy as np
import pytest

from jaxkfac.jobs.data.text import record_files, token_stream
from jaxkfac.jobs.data.text._encode_test import Letters

COUNT = 60


@pytest.fixture
def folder(tmp_path):
    """Two files of records that begin with their own letter, two of them bad."""
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"text": chr(200 + i) + "x" * int(rng.integers(1, 30))}) for i in range(COUNT)
    ]
    (tmp_path / "train-0.jsonl").write_text("\n".join([*lines[:20], "{", *lines[20:40]]))
    (tmp_path / "train-1.jsonl").write_text("\n".join(['{"txt": 1}', *lines[40:]]))
    return tmp_path


def stream_of(folder, *, strict=False, **options):
    rows, _ = record_files(folder, strict=strict)
    options = {"batch_size": 4, "max_length": 40, "window": 13, "seed": 3} | options
    return token_stream(rows, Letters(), **options)


def letters(batches):
    """Which records batches hold, by their first letters."""
    starts = [b.ids[(b.positions == 0) & (b.segments > 0)] for b in batches]
    return [int(i) - 200 for ids in starts for i in ids]


def a_pass(stream, number=0):
    found = itertools.takewhile(lambda x: x[1]["pass"] <= number, stream.iterate())
    return [batch for batch, position in found if position["pass"] == number]


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"num_lengths": 1}, {"window": 1}, {"window": 1000}, {"batching": "pack"}],
    ids=["pad", "one-length", "in-order", "one-window", "pack"],
)


@pytest.mark.exhaustive
@OPTIONS
def test_a_pass_holds_every_record_once_in_an_order_of_its_own(folder, options):
    stream = stream_of(folder, **options)
    first, second = letters(a_pass(stream)), letters(a_pass(stream, 1))
    if options.get("batching") == "pack":  # rows that fill no batch are left out
        assert len({*first}) == len(first) > COUNT - 20
    else:
        assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert letters(a_pass(stream_of(folder, **options))) == first
    assert letters(a_pass(stream_of(folder, seed=4, **options))) != first


@pytest.mark.slow
@pytest.mark.sampled(1)
@OPTIONS
def test_from_any_position_the_same_batches_follow(folder, options):
    stream = stream_of(folder, **options)
    found = list(itertools.islice(stream.iterate(), 40))
    assert found[-1][1]["pass"] > 0
    for start in (0, 14, 15, 29, 38):
        position = json.loads(json.dumps(found[start][1]))
        again = itertools.islice(stream_of(folder, **options).iterate(position), 39 - start)
        for (batch, behind), (expected, place) in zip(again, found[start + 1 :], strict=True):
            for one, other in zip(batch, expected, strict=True):
                np.testing.assert_array_equal(one, other)
            assert behind == place


@pytest.mark.slow
def test_a_batch_is_padded_to_its_longest_row_and_lengths_are_few(folder):
    padded, fixed = stream_of(folder), stream_of(folder, num_lengths=1)
    assert padded.lengths == (8, 16, 24, 32, 40) and fixed.lengths == (40,)
    for batch in a_pass(padded):
        longest = int((batch.segments > 0).sum(1).max())
        assert batch.ids.shape[1] == next(n for n in padded.lengths if n >= longest)
    bytes_of = [sum(b.ids.nbytes for b in a_pass(stream)) for stream in (padded, fixed)]
    assert bytes_of[0] < 0.6 * bytes_of[1]


def test_a_window_bounds_how_far_a_record_moves(folder):
    (folder / "train-1.jsonl").unlink()
    order = letters(a_pass(stream_of(folder, window=5, batch_size=1)))
    moved = np.abs(np.array(order) - np.arange(40))
    assert 5 < moved.max() < 5 + 16  # behind the window, groups of 16 are sorted by length


@pytest.mark.slow
def test_bad_rows_are_counted_once_with_their_numbers(folder):
    *_, (_, position) = itertools.islice(stream_of(folder).iterate(), 50)
    tally = position["tally"]
    assert (tally["rows"], tally["bad"], tally["examples"]) == (COUNT + 2, 2, COUNT)
    said = sorted(tally["bad_rows"])
    assert "train-0.jsonl:21: not JSON" in said[0]
    assert "train-1.jsonl:1: expected the keys" in said[1] and "got ['txt']" in said[1]
    with pytest.raises(ValueError, match=r"train-\d.jsonl:\d+: "):
        list(itertools.islice(stream_of(folder, strict=True).iterate(), 50))


def test_a_record_that_the_chat_template_refuses_is_a_bad_row(tmp_path):
    class Refuses(Letters):
        def chat(self, messages, **options):
            if messages[0]["content"] == "no":
                raise ValueError("the chat template refuses these messages")
            return super().chat(messages, **options)

    chat = '{"instruction": "%s", "output": "x"}'
    (tmp_path / "x.jsonl").write_text("\n".join(chat % word for word in ("yes", "no", "yes")))
    options = {"batch_size": 2, "max_length": 40}
    rows, _ = record_files(tmp_path)
    stream = token_stream(rows, Refuses(), **options)
    _, position = next(stream.iterate())
    assert stream.per_epoch == 1 and position["tally"]["examples"] == 2
    assert "x.jsonl:2: the chat template refuses" in position["tally"]["bad_rows"][0]
    strict, _ = record_files(tmp_path, strict=True)
    with pytest.raises(ValueError, match="x.jsonl:2: the chat template refuses"):
        next(token_stream(strict, Refuses(), **options).iterate())


def test_batches_of_a_pass_are_counted_or_told_from_the_first_window(folder):
    assert stream_of(folder).per_epoch == 62 // 4
    assert stream_of(folder, window=1000).per_epoch == COUNT // 4
    packed = stream_of(folder, batching="pack", window=1000)
    assert packed.per_epoch == len(a_pass(packed))
    estimate = stream_of(folder, batching="pack", window=30).per_epoch
    assert abs(estimate - packed.per_epoch) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 61}, r"batch_size must lie in 1 .. 60 \(examples\)"),
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"num_lengths": 0}, "num_lengths must be at least 1"),
        ({"max_length": 1}, "max_length=1"),
    ],
)
def test_options_out_of_range_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        stream_of(folder, **options).first()


def test_nothing_to_learn_and_nothing_at_all_are_told_apart(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "aaaaaaaaaa", "completion": "b"}\n')
    message = r"none of 1 records has anything to learn .*longest has 12\): raise max_length"
    with pytest.raises(ValueError, match=message):
        stream_of(tmp_path, max_length=6).first()
    file.write_text("\n")
    with pytest.raises(ValueError, match="x.jsonl holds no row"):
        stream_of(tmp_path).first()
    file.write_text("{\n")
    with pytest.raises(ValueError, match=r"none of 1 rows is a record; .*x.jsonl:1: not JSON"):
        stream_of(tmp_path).first()
