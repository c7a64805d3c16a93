"""Streamed pairs: what batches hold, going on, rows that are none."""

import json

import numpy as np
import pytest

from jaxkfac.jobs.data.pairs import pair_files, pair_stream


class Letters:
    eos_ids, pad_id = (1,), 0

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text] + [1] * add_special_tokens

    def decode(self, ids):
        return "".join(map(chr, ids))

    def chat(self, messages, **_):
        return []


LENGTHS = {"max_source_length": 20, "max_target_length": 9}


def stream_of(path, *, strict=False, prefix="", **options):
    rows, _ = pair_files(path, prefix=prefix, strict=strict)
    chosen = {"batch_size": 3, "pad_id": 0, "start_id": 0, **LENGTHS, **options}
    return pair_stream(rows, Letters(), **chosen)


@pytest.fixture
def path(tmp_path):
    rows = [{"source": "s" * (1 + i % 13), "target": f"t{i}"} for i in range(30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def sources(batch):
    return ["".join(map(chr, row[row > 1])) for row in batch.source]


def test_every_pair_comes_once_in_a_pass_padded_to_the_longest_of_its_batch(path):
    batches = stream_of(path, prefix="say ").iterate()
    found = [next(batches)[0] for _ in range(10)]
    assert sorted(len(s) for b in found for s in sources(b)) == sorted(
        4 + 1 + i % 13 for i in range(30)
    )
    for batch in found:
        assert batch.source.shape[1] in (8, 16, 24) and batch.targets.shape[1] in (8, 16)
        longest = int(batch.source_mask.sum(1).max())
        assert batch.source.shape[1] - longest < 8
        assert batch.decoder_inputs[0, 0] == 0
        np.testing.assert_array_equal(batch.decoder_inputs[:, 1:3], batch.targets[:, :2])


@pytest.mark.slow
def test_from_any_position_the_same_batches_follow(path):
    stream = stream_of(path, window=7, seed=3)
    batches = stream.iterate()
    seen = [next(batches) for _ in range(14)]
    for start in (0, 4, 10):
        position = json.loads(json.dumps(seen[start][1]))
        again = stream_of(path, window=7, seed=3).iterate(position)
        for batch, _ in seen[start + 1 : start + 4]:
            for a, b in zip(next(again)[0], batch, strict=True):
                np.testing.assert_array_equal(a, b)


def test_sides_that_are_cut_and_rows_that_are_none_are_counted(path):
    with path.open("a") as file:
        file.write(
            '\n{"source": "", "target": "x"}\n{\n{"source": "' + "s" * 40 + '", "target": "x"}'
        )
    batches = stream_of(path).iterate()
    tally = [next(batches)[1]["tally"] for _ in range(10)][-1]
    assert (tally["bad"], tally["truncated"], tally["longest"]) == (2, 1, 20)
    assert "pairs.jsonl:31: the source ('source') is empty" in tally["bad_rows"][0]
    with pytest.raises(ValueError, match=r"pairs.jsonl:31: the source"):
        list(zip(range(12), stream_of(path, strict=True).iterate()))


def test_lengths_in_which_nothing_fits_are_refused(path):
    with pytest.raises(ValueError, match="max_target_length=1: expected at least 2"):
        stream_of(path, max_target_length=1)
    with pytest.raises(ValueError, match="num_lengths must be at least 1"):
        stream_of(path, num_lengths=0)
