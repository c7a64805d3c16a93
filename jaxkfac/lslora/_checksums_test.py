"""Damage anywhere in an adapter's files is named, and nothing else is called damage."""

import errno
import itertools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkfac._errors import DamagedFileError
from jaxkfac.lslora import Config, attach, init, load, read_modules, save

PARAMS = {"layers": {"kernel": jnp.ones((2, 4, 4))}, "head": {"kernel": jnp.ones((4, 3))}}
X = jnp.ones((5, 4))
CONFIG = Config(rank=2, alpha=3, target=".*kernel", rank_pattern={"head/.*": 1})
PLAIN = Config(rank=2, alpha=3, target=".*kernel", fourier_placement="none")
FILES = ("adapter_config.json", "adapter_model.safetensors")


def fn(p, x):
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"]["kernel"])[0]
    return x @ p["head"]["kernel"]


def written(folder, config=CONFIG, scale=1.0, **options):
    adapters = init(fn, config, PARAMS, X, key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: scale * (x + 0.1), adapters)
    save(folder, adapters, config, **options)
    return adapters


def flipped(folder, damaged, seed, count):
    """Copies of a folder, each with one byte changed; positions at random over both files."""
    generator = np.random.default_rng(seed)
    sizes = [(folder / name).stat().st_size for name in FILES]
    for position in generator.integers(0, sum(sizes), count):
        shutil.copytree(folder, damaged, dirs_exist_ok=True)
        file, at = (0, position) if position < sizes[0] else (1, position - sizes[0])
        data = bytearray((folder / FILES[file]).read_bytes())
        data[at] ^= generator.integers(1, 256)
        (damaged / FILES[file]).write_bytes(data)
        yield FILES[file]


def test_one_byte_changed_at_any_of_200_places_is_an_error_with_the_files_name(tmp_path):
    written(tmp_path / "good")
    for file in flipped(tmp_path / "good", tmp_path / "bad", 0, 200):
        with pytest.raises(ValueError, match=file):
            load(tmp_path / "bad")
        with pytest.raises(ValueError, match=file):
            read_modules(tmp_path / "bad")


def test_every_byte_counts(tmp_path):
    """A change that leaves JSON as it was included: a space for a tab, at the end of the header."""
    written(tmp_path / "good")
    for file in FILES:
        data = (tmp_path / "good" / file).read_bytes()
        shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        for at in [i for i, byte in enumerate(data) if byte == ord(" ")][::7]:
            (tmp_path / "bad" / file).write_bytes(data[:at] + b"\t" + data[at + 1 :])
            with pytest.raises(ValueError, match=file):
                load(tmp_path / "bad")


def test_a_damaged_tensor_is_named(tmp_path):
    written(tmp_path)
    file = tmp_path / FILES[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    last = max(header, key=lambda key: header[key]["data_offsets"])
    with pytest.raises(DamagedFileError, match=rf"is damaged, .*\({last}\)"):
        load(tmp_path)


def test_a_shortened_file_is_named(tmp_path):
    written(tmp_path)
    for name in FILES:
        data = (tmp_path / name).read_bytes()
        for end in (0, 1, len(data) // 2, len(data) - 1):
            (tmp_path / name).write_bytes(data[:end])
            with pytest.raises(DamagedFileError, match=f"{name} is damaged"):
                load(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"it has no {name}"):
            load(tmp_path)
        (tmp_path / name).write_bytes(data)
    load(tmp_path)


def test_files_of_two_saves_do_not_pass_for_one_adapter(tmp_path):
    written(tmp_path / "one")
    written(tmp_path / "two", scale=2.0)
    shutil.copy(tmp_path / "two" / FILES[1], tmp_path / "one" / FILES[1])
    with pytest.raises(DamagedFileError, match="of another save than the config beside it"):
        load(tmp_path / "one")


def test_an_edited_config_is_read_when_its_reader_says_so(tmp_path):
    adapters = written(tmp_path)
    record = json.loads((tmp_path / FILES[0]).read_text())
    (tmp_path / FILES[0]).write_text(json.dumps(record | {"lora_dropout": 0.25}))
    with pytest.raises(DamagedFileError, match="damaged, or was edited: .*verify=False"):
        load(tmp_path)
    again, config = load(tmp_path, verify=False)
    assert config.dropout == 0.25
    assert read_modules(tmp_path, verify=False).record["lora_dropout"] == 0.25
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_a_setting_that_the_files_lack_is_assumed_for_their_modules(tmp_path):
    written(tmp_path)
    record = json.loads((tmp_path / FILES[0]).read_text())
    del record["jaxkfac"], record["init_sigma"]
    (tmp_path / FILES[0]).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="pass assume="):
        read_modules(tmp_path)
    found = read_modules(tmp_path, assume={"init_sigma": 1.0})
    assert list(found.modules) == ["head", "layers.0", "layers.1"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_is_full_at_either_file_leaves_the_older_adapter(number, tmp_path, monkeypatch):
    older = written(tmp_path)
    calls, fsync = itertools.count(1), os.fsync

    def full(descriptor):
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "full")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the adapter could not be saved.* are as they were"):
        written(tmp_path, scale=2.0)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path)[0], older)


def test_folders_of_an_older_version_have_no_checksums_and_are_read(tmp_path):
    adapters = written(tmp_path)
    record = json.loads((tmp_path / FILES[0]).read_text())
    del record["jaxkfac"]["checksums"]
    (tmp_path / FILES[0]).write_text(json.dumps(record))
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path)[0], adapters)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_damage_to_another_writers_files_is_named_or_still_gives_an_adapter(config, tmp_path):
    """They have no checksums: what cannot be seen is a changed number."""
    folder, layers = tmp_path / "good", {"layers/kernel", "head/kernel"}
    written(folder, config, dialect="peft")
    safetensors.numpy.save_file(safetensors.numpy.load_file(folder / FILES[1]), folder / FILES[1])
    record = json.loads((folder / FILES[0]).read_text())
    del record["jaxkfac"]
    (folder / FILES[0]).write_text(json.dumps(record))
    errors = []
    for _ in flipped(folder, tmp_path / "bad", 1, 200):
        try:
            adapters, _ = load(tmp_path / "bad", scanned="layers")
        except ValueError as error:
            errors.append(str(error))
        else:
            assert adapters.keys() == layers
    assert len(errors) > 50 and all("file" in e or "adapter_" in e or "bad" in e for e in errors)


@pytest.mark.slow
def test_a_folder_that_was_read_computes_what_was_written(tmp_path):
    adapters = written(tmp_path)
    expected = attach(fn, CONFIG)(PARAMS, adapters, X)
    again, config = load(tmp_path)
    np.testing.assert_array_equal(attach(fn, config)(PARAMS, again, X), expected)
