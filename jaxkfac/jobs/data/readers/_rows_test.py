"""Files of every format: their rows from any place, and what is said of files that are none."""

import gzip
import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxkfac.jobs.data.readers import (
    Bad,
    FilePlace,
    FileRows,
    _formats,
    find_files,
    known_suffixes,
    read_rows,
)

ROWS = [{"text": f"the {i}th\u2028 row", "turns": [{"a": i, "b": None}]} for i in range(23)]


def write(path, rows=ROWS):
    """A file of the format that its suffix says."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    table = pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".gz":  # of several members, as files that were put together are
            path.write_bytes(gzip.compress(text[:40]) + gzip.compress(text[40:]))
        case ".zst":
            path.write_bytes(pyarrow.compress(text, codec="zstd", asbytes=True))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=5)
        case ".arrow" | ".feather":
            new = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
            with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
        case _:
            path.write_bytes(text)
    return path


def as_it_is(row):
    return row


def rows_of(*files, strict=True):
    return FileRows(files, as_it_is, strict)


SUFFIXES = pytest.mark.parametrize("suffix", known_suffixes())


@pytest.mark.default(6)
@SUFFIXES
def test_every_format_gives_its_rows_and_from_any_place_the_rest(suffix, tmp_path):
    rows = rows_of(write(tmp_path / f"one{suffix}"), write(tmp_path / f"two{suffix}", ROWS[:3]))
    found = list(rows.read())
    assert [row for _, row in found] == [*ROWS, *ROWS[:3]]
    assert rows.count() == 26
    for start, (place, _) in enumerate(found, start=1):
        assert list(rows.read(place)) == found[start:]
    assert rows.where(found[24][0]).endswith(f"two{suffix}:2")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_files_are_read_in_the_order_that_is_asked_for(suffix, tmp_path):
    rows = rows_of(*(write(tmp_path / f"{i}{suffix}", ROWS[i : i + 1]) for i in range(3)))
    found = list(rows.read(order=[2, 0, 1]))
    assert [row for _, row in found] == [ROWS[2], ROWS[0], ROWS[1]]
    assert list(rows.read(found[0][0], order=[2, 0, 1])) == found[1:]


def test_bad_lines_are_left_out_with_their_numbers_or_stop(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{\n{"a": "\xff"}\n  \n{"a": 2}')
    found = [row for _, row in rows_of(path, strict=False).read()]
    assert [row for row in found if not isinstance(row, Bad)] == [{"a": 1}, {"a": 2}]
    first, second = [row for row in found if isinstance(row, Bad)]
    assert str(first).startswith(f"{path}:3: not JSON") and ":4: not UTF-8" in str(second)
    path.write_text('{"a": "\\ud800"}\n{"a": ' + 5000 * "9" + '}\n{"a": "\\u00e9"}\n')
    half, long, good = [row for _, row in rows_of(path, strict=False).read()]
    assert ":1: not UTF-8" in str(half) and ":2: not JSON that can be read" in str(long)
    assert good == {"a": "é"}
    path.write_text('{"a": 1}\n{"a": 2}\n{broken\n{"a": 3}\n')
    assert rows_of(path, strict=False).count() == 4
    with pytest.raises(ValueError, match=r"x.jsonl:3: not JSON"):
        list(rows_of(path).read())


def test_the_first_good_rows_are_found_or_what_is_wrong_is_said(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{\n{"a": 1}\n{"a": 2}\n')
    assert rows_of(path, strict=False).peek(5) == [{"a": 1}, {"a": 2}]
    path.write_text("{\n" * 1200)
    with pytest.raises(
        ValueError, match=r"none of the first 1000 rows can be used: .*:1: not JSON"
    ):
        rows_of(path, strict=False).peek()
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="x.jsonl holds no row"):
        rows_of(path).peek()


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".feather"])
def test_a_file_that_was_cut_short_is_named(suffix, tmp_path):
    path = write(tmp_path / f"x{suffix}")
    path.write_bytes(path.read_bytes()[:-9])
    if suffix == ".arrow":  # a stream may end behind any batch: cut into one
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=rf"x{suffix} is .*: get it again"):
        list(rows_of(path).read())


def test_an_array_is_read_as_lines_are(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("\ufeff \n" + json.dumps([{"a": 1.5, "b": 2}, {"c": "é"}]))
    assert read_rows(path, as_it_is) == [{"a": 1.5, "b": 2}, {"c": "é"}]
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_rows(tmp_path / "x.json.gz", as_it_is) == read_rows(path, as_it_is)
    for broken in ('[{"a": 1}, {"a": ', '[{"a": 1}, nothing]', '[{"a": 1}'):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"x.json is damaged .* behind element [01] .*again"):
            list(rows_of(path).read())


@pytest.mark.parametrize("deep", [101, 200_000])
def test_rows_that_are_nested_too_deeply_are_refused(tmp_path, deep):
    shallow, value = "[" * 99 + "]" * 99, "[" * deep + "]" * deep
    (tmp_path / "x.json").write_text(f'[{{"a": {shallow}}}]')
    assert len(list(rows_of(tmp_path / "x.json").read())) == 1
    (tmp_path / "x.jsonl").write_text(f'{{"a": {value}}}\n{{"a": 1}}\n')
    (tmp_path / "x.json").write_text(f'[{{"a": {value}}}, {{"a": 1}}]')
    bad, good = [row for _, row in rows_of(tmp_path / "x.jsonl", strict=False).read()]
    assert good == {"a": 1} and "1: JSON that is nested too deeply" in str(bad)
    # In an array, reading on would take memory by the square of the depth.
    with pytest.raises(ValueError, match=r"x.json is damaged.*element 0 \(JSON that is nested"):
        list(rows_of(tmp_path / "x.json", strict=False).read())


@pytest.mark.default(1)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_brackets_in_strings_are_no_depth_wherever_a_chunk_ends(tmp_path, size):
    strings = ['[[{"', "\\", '\\"', "{" * 300, 'a\\\\"[[[', "é]]]"]
    text = json.dumps([strings * 9, {"[": "]"}]).encode()
    shallow = _formats._Shallow(io.BufferedReader(io.BytesIO(text)))
    read = b"".join(iter(lambda: shallow.read(size), b""))
    assert read == text and shallow._depth == 0
    deep = _formats._Shallow(io.BufferedReader(io.BytesIO(b'["]]]]", ' + b"[" * 120)))
    with pytest.raises(ValueError, match="nested too deeply"):
        b"".join(iter(lambda: deep.read(size), b""))


def test_an_integer_without_end_in_an_array_is_named(tmp_path):
    (tmp_path / "x.json").write_text('[{"a": 1}, {"a": ' + 5000 * "9" + "}]")
    with pytest.raises(
        ValueError, match=r"x.json is damaged or cut short behind element 1 .*again"
    ):
        list(rows_of(tmp_path / "x.json").read())


@pytest.mark.parametrize("suffix", [".arrow", ".feather"])
def test_arrow_whose_offsets_point_outside_is_named(suffix, tmp_path):
    """Reading such a string ends the process by SIGBUS or SIGSEGV."""
    path = write(tmp_path / f"x{suffix}")
    offsets = np.cumsum([0, *(len(row["text"].encode()) for row in ROWS[:4])], dtype=np.int32)
    data = path.read_bytes()
    at = data.index(offsets.tobytes())
    path.write_bytes(data[: at + 8] + np.int32(1 << 30).tobytes() + data[at + 12 :])
    with pytest.raises(
        ValueError, match=rf"x{suffix} is damaged or cut short behind row 0 .*again"
    ):
        list(rows_of(path).read())


@pytest.mark.parametrize("at", [20, 30_000])
def test_a_compressed_array_whose_bytes_have_changed_is_named(tmp_path, at):
    """In the beginning, by which it is known as an array, or behind it."""
    rng = np.random.default_rng(0)
    array = json.dumps([{"a": x} for x in rng.standard_normal(9000).tolist()])
    packed = bytearray(gzip.compress(array.encode()))
    packed[at : at + 99] = bytes(range(99))
    path = tmp_path / "x.json.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"x.json.gz is damaged or cut short.*get it again"):
        list(rows_of(path).read())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"])
def test_a_file_of_another_format_is_named(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"neither one nor the other" * 9)
    with pytest.raises(ValueError, match=rf"x{suffix} is .*: get it again"):
        list(rows_of(path).read())


def test_the_first_feather_is_named(tmp_path):
    (tmp_path / "x.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    with pytest.raises(ValueError, match=r"x.feather has the first version .*write_feather"):
        list(rows_of(tmp_path / "x.feather").read())


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl, which does not exist"):
        read_rows(tmp_path / "nowhere.jsonl", as_it_is)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ValueError, match=r"suffix '.csv' belongs to no format; expected .*\.jsonl"):
        read_rows(tmp_path / "x.csv", as_it_is)
    (tmp_path / "x.jsonl").write_text(" \n")
    with pytest.raises(ValueError, match="x.jsonl holds no line"):
        read_rows(tmp_path / "x.jsonl", as_it_is)
    with pytest.raises(FileNotFoundError, match=r"nothing to train on in .*, which holds x.csv"):
        find_files(_folder(tmp_path / "only", "x.csv"))


def _folder(folder, *names):
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl", "README.md"], [0], [1]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], [0, 1], []),
        (["train/data-0.arrow", "validation/data-0.arrow", "train/state.json"], [0], [1]),
        (["b.jsonl", "a.jsonl", "dev.jsonl", "test.jsonl", ".hidden.jsonl"], [1, 0], [2]),
        (["training_set.jsonl", "valid.jsonl.gz"], [0], [1]),
        (["alpaca_data.json", "dataset_info.json"], [0], []),
    ],
)
def test_splits_are_told_by_names(names, train, validation, tmp_path):
    found = find_files(_folder(tmp_path, *names))
    assert found.train == tuple(tmp_path / names[i] for i in train)
    assert found.validation == tuple(tmp_path / names[i] for i in validation)


def test_the_checksum_is_of_names_and_bytes(tmp_path):
    path = write(tmp_path / "x.jsonl")
    before = rows_of(path).checksum()
    path.write_bytes(path.read_bytes().replace(b"the 9th", b"the 8th"))
    changed = rows_of(path).checksum()
    assert before != changed == rows_of(path).checksum()
    assert rows_of(path.rename(tmp_path / "y.jsonl")).checksum() != changed
    with (tmp_path / "large.jsonl").open("wb") as file:  # a hole takes no room
        file.truncate(100 << 20)
    empty = rows_of(tmp_path / "large.jsonl").checksum()
    with (tmp_path / "large.jsonl").open("rb+") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert rows_of(tmp_path / "large.jsonl").checksum() != empty


def test_a_place_is_of_plain_numbers():
    assert json.loads(json.dumps(list(FilePlace(1, 2, 3)))) == [1, 2, 3]
