import json
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import DamagedFileError
from jaxkfac.files import Archive, write_archive

ARRAYS = {
    "layer/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.asarray(jnp.linspace(0, 1, 5, dtype=jnp.bfloat16)),
    "count": np.array(7),
    "empty": np.zeros((0, 3)),
    "transposed": np.arange(6).reshape(2, 3).T,
}


@pytest.fixture
def path(tmp_path):
    write_archive(tmp_path / "a", "test", {"step": 3}, ARRAYS.items(), what="a test")
    return tmp_path / "a"


def opened(path):
    return Archive(path, "test", "test file")


def test_what_is_read_is_what_was_written(path):
    with opened(path) as archive:
        assert archive.about["step"] == 3 and archive.names == list(ARRAYS)
        for name, array in ARRAYS.items():
            found = archive.read(name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert np.array_equal(found, array)


def test_the_same_arrays_are_the_same_bytes_at_another_time(path, tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 2e9)
    write_archive(tmp_path / "b", "test", {"step": 3}, ARRAYS.items(), what="a test")
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_numpy_reads_it_and_its_own_checksums_hold(path):
    with np.load(path) as found:
        assert np.array_equal(found["layer/kernel"], ARRAYS["layer/kernel"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.exhaustive
def test_every_byte_is_under_a_checksum(path):
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=str(path)):
            opened(path)


def test_every_end_that_is_missing_is_noticed(path):
    data = path.read_bytes()
    for kept in range(0, len(data), 7):
        path.write_bytes(data[:kept])
        with pytest.raises(DamagedFileError, match=f"{path} is (no test file|damaged)"):
            opened(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedFileError):
        opened(path)


def test_the_array_that_is_damaged_is_named(path):
    data = path.read_bytes()
    damaged = data.replace(ARRAYS["layer/kernel"].tobytes(), bytes(48))
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match="the array 'layer/kernel' is damaged"):
        opened(path)


def test_sound_arrays_in_each_others_places_are_refused(path):
    """An archive that was put together anew, and is sound in itself."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    parts["count.npy"], parts["half.npy"] = parts["half.npy"], parts["count.npy"]
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)
    with pytest.raises(DamagedFileError, match="the array 'half' is damaged.*the manifest says"):
        opened(path)


def test_a_file_of_another_version_is_refused(path):
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    manifest = json.loads(members["manifest.json"]) | {"version": 1}
    members["manifest.json"] = json.dumps(manifest)
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    with pytest.raises(ValueError, match=r"is \('test', 1\), expected \('test', 2\)"):
        opened(path)


def test_another_kind_of_file_is_said_to_be_one(path, tmp_path):
    with pytest.raises(ValueError, match=r"is \('test', 2\), expected \('other', 2\)"):
        Archive(path, "other", "other file")
    np.savez(tmp_path / "foreign.npz", x=np.zeros(3))
    with pytest.raises(DamagedFileError, match=r"has no readable manifest\.json"):
        opened(tmp_path / "foreign.npz")
    with pytest.raises(FileNotFoundError, match="no test file at"):
        opened(tmp_path / "absent")
    with pytest.raises(DamagedFileError, match="is no test file"):
        opened(tmp_path)


def test_arrays_of_another_byte_order_are_read_again(tmp_path):
    array = np.arange(5, dtype=">f4")
    write_archive(tmp_path / "a", "test", {}, [("a", array)], what="a test")
    with opened(tmp_path / "a") as archive:
        assert np.array_equal(archive.read("a"), array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "i4,f4")])
def test_arrays_that_could_not_be_read_again_are_not_written(array, tmp_path):
    with pytest.raises(TypeError, match="'a': expected numbers or booleans"):
        write_archive(tmp_path / "a", "test", {}, [("a", array)], what="a test")
    assert not list(tmp_path.iterdir())
