"""Every kind of file that is written and read again: one changed byte, a missing end, the umask."""

import json
import os
import shutil
import stat
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import jaxkfac as jk
from jaxkfac.jobs.cli._checkpoint import Checkpoint, flatten_state, load_checkpoint, save_checkpoint
from jaxkfac.jobs.cli.analysis._files import Folder
from jaxkfac.jobs.cli.influence._stages import STAGES, Stages

PARAMS = {"up": {"kernel": jnp.ones((5, 4))}, "down": {"kernel": jnp.ones((4, 3))}}
BATCH = jnp.linspace(-1, 1, 30).reshape(6, 5), jnp.arange(6) % 3


def apply_fn(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


STATS = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))


def save_service(folder):
    with jk.HostCurvature(refresh_every=2, lag=1) as service:
        for step in range(3):
            service.push(STATS(PARAMS, BATCH)[2], step)
            service.bases(step)
        service.save(folder / "service.npz")


def save_train(folder):
    like = STATS.factor_shapes(PARAMS, BATCH)
    state = jk.kfac(0.1, like=like, damping=1e-3).init(PARAMS)
    leaves, records = flatten_state(PARAMS, state), {"losses": [0.5, 0.25], "epochs": []}
    save_checkpoint(folder, Checkpoint(leaves, {"seed": 0}, "kfac", records, 7))


def save_finetune(folder):
    config = jk.lslora.Config(rank=2, target=".*kernel")
    adapters = jk.lslora.init(apply_fn, config, PARAMS, BATCH[0], key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adapters)
    leaves = flatten_state(adapters, optax.sgd(0.1, momentum=0.9).init(adapters))
    save_checkpoint(folder, Checkpoint(leaves, {"seed": 0}, "adamw", {"losses": []}, 7))


def save_adapter(folder):
    config = jk.lslora.Config(rank=2, target=".*kernel")
    adapters = jk.lslora.init(apply_fn, config, PARAMS, BATCH[0], key=jax.random.key(0))
    jk.lslora.save(folder, adapters, config)


ANALYSIS = {  # what an analysis keeps beside its arrays
    "analysis.json": {"model": "models/tiny", "options": {"seed": 0}, "room": 1 << 30},
    "exact.json": {"asked": [1, 3], "found": {"eigenvalues": [0.75], "steps": 3}},
    "gathered.json": {"loss": 2.5, "terms": 96.0},
    "state.json": {"alphas": [0.5, 0.25], "betas": [0.125, 1e-3]},
}


def save_analysis(folder):
    for name, plain in ANALYSIS.items():
        Folder(folder).write(name, plain)


def load_analysis(folder):
    assert {name: Folder(folder).read(name) for name in ANALYSIS} == ANALYSIS


def save_influence(folder):
    for stage in STAGES:
        Stages(folder).write(stage, {"seed": 0}, {"scores": np.ones((2, 3), np.float32)})


def load_influence(folder):
    for stage in STAGES:
        Stages(folder).read(stage, {"seed": 0})


# {kind: (what writes into a folder, what reads it)}
KINDS = {
    "service": (save_service, lambda path: jk.HostCurvature.load(path / "service.npz").close()),
    "train": (save_train, load_checkpoint),
    "finetune": (save_finetune, load_checkpoint),
    "adapter": (save_adapter, jk.lslora.load),
    "analysis": (save_analysis, load_analysis),
    "influence": (save_influence, load_influence),
}
ERRORS = (ValueError, OSError)


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """``(folder, its files, what reads it)``."""
    write, read = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(folder)
    return folder, sorted(folder.iterdir()), read


@pytest.fixture
def written(saved):
    """The same; the files are restored after each test."""
    folder, files, read = saved
    data = [file.read_bytes() for file in files]
    read(folder)
    yield saved
    for file, content in zip(files, data, strict=True):
        if file.is_dir():
            file.rmdir()
        file.write_bytes(content)


def refused(read, folder) -> str:
    """What reading raises; empty if it raises nothing."""
    try:
        read(folder)
    except ERRORS as error:
        return str(error)
    return ""


def assert_refused(read, folder, file, how):
    words = refused(read, folder)
    assert str(file) in words and "\n" not in words, (how, words)


def flip_some(written, count):
    folder, files, read = written
    rng = np.random.default_rng(count)
    for file in files:
        data = file.read_bytes()
        for position in rng.integers(len(data), size=-(-count // len(files))):
            damaged = bytearray(data)
            damaged[position] ^= int(rng.integers(1, 256))
            file.write_bytes(damaged)
            assert_refused(read, folder, file, f"byte {position} of {len(data)}")
        file.write_bytes(data)


@pytest.mark.default(1, slow=2)
def test_a_changed_byte_is_an_error_that_names_the_file(written):
    flip_some(written, 6)


@pytest.mark.exhaustive
def test_200_changed_bytes_are_200_errors_that_name_the_file(written):
    flip_some(written, 200)


def test_a_missing_end_is_an_error_that_names_the_file(written):
    folder, files, read = written
    for file in files:
        data = file.read_bytes()
        for length in (0, 1, len(data) // 9, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:length])
            assert_refused(read, folder, file, f"{length} of {len(data)} bytes")
        file.write_bytes(data)


def test_a_folder_in_place_of_the_file_and_no_file_are_said(written):
    folder, (file, *_), read = written
    file.unlink()
    with pytest.raises(FileNotFoundError, match=str(folder)):
        read(folder)
    file.mkdir()
    with pytest.raises(ERRORS, match=str(folder)):
        read(folder)


def test_saved_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        for name, (write, _) in KINDS.items():
            (tmp_path / name).mkdir()
            write(tmp_path / name)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(KINDS)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


# A pretrained model comes without checksums, so what can be seen is what its headers say.


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """Two shards and their index."""
    folder, index = tmp_path_factory.mktemp("pretrained"), {}
    for shard, shape in (("model-1-of-2.safetensors", (4, 3)), ("model-2-of-2.safetensors", (5,))):
        tensors = {f"layers.{i}.weight{len(shape)}": np.ones(shape, np.float32) for i in range(3)}
        safetensors.numpy.save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def flip_headers(pretrained, folder, count):
    """A changed bit is an error that names a file, or only in the header's own metadata."""
    shutil.copytree(pretrained, folder)
    expected, rng, errors = jk.load_safetensors(folder), np.random.default_rng(count), 0
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        length = 8 + struct.unpack("<Q", data[:8])[0] if file.suffix == ".safetensors" else None
        for position in rng.integers(len(data[:length]), size=count):
            damaged = bytearray(data)
            damaged[position] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            if words := refused(jk.load_safetensors, folder):
                errors += 1
                assert str(folder) in words or file.name in words, (position, words)
                continue
            found = jk.load_safetensors(folder)
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
        file.write_bytes(data)
    assert errors > 2 * count


def test_a_changed_bit_in_a_header_or_an_index_is_an_error_or_changes_nothing(pretrained, tmp_path):
    flip_headers(pretrained, tmp_path / "copy", 7)


@pytest.mark.exhaustive
def test_200_changed_bits_in_headers_and_index_are_errors_or_change_nothing(pretrained, tmp_path):
    flip_headers(pretrained, tmp_path / "copy", 200)


@pytest.mark.parametrize(
    "name", ["model-1-of-2.safetensors", "model.safetensors.index.json", "model-2-of-2.safetensors"]
)
def test_a_file_of_a_pretrained_model_that_is_cut_or_missing_is_named(pretrained, tmp_path, name):
    folder = tmp_path / "copy"
    shutil.copytree(pretrained, folder)
    file = folder / name
    data = file.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ERRORS, match=name):
            jk.load_safetensors(folder)
    file.unlink()
    # Without an index there are two files, and neither is the model.
    with pytest.raises(ERRORS, match="put the index" if "index" in name else name):
        jk.load_safetensors(folder)
    file.mkdir()
    with pytest.raises(ERRORS, match=name):
        jk.load_safetensors(folder)
