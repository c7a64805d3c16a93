"""A checkpoint of any layout arrives whole, in its dtype and place, or is refused by name."""

import json
import re
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkfac.memory import MemoryBudgetError, load_safetensors
from jaxkfac.memory import _budget as budget

WEIGHTS = {
    "model.layers.0.up_proj.weight": np.arange(12, dtype=np.float32).reshape(4, 3) / 7,
    "model.layers.1.up_proj.weight": np.arange(12, dtype=np.float32).reshape(4, 3) / 9,
    "model.norm.weight": np.arange(5).astype(ml_dtypes.bfloat16),
    "position_ids": np.arange(6, dtype=np.int64),
    "scalar": np.array(3, np.uint8),
    "empty": np.zeros((0, 2), np.float16),
}


def write(file, tensors):
    """The format, by hand: a library writes only what it knows, and the tests need more."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_shards(folder, stem="model"):
    shards = {
        f"{stem}-1-of-2.safetensors": list(WEIGHTS)[:2],
        f"{stem}-2-of-2.safetensors": list(WEIGHTS)[2:],
    }
    for shard, names in shards.items():
        safetensors.numpy.save_file({n: WEIGHTS[n] for n in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def check(loaded):
    assert loaded.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        expected = value.astype(np.int32) if value.dtype == np.int64 else value
        assert loaded[name].dtype == expected.dtype and loaded[name].shape == expected.shape
        np.testing.assert_array_equal(np.asarray(loaded[name]), expected)


def test_one_file_by_its_path_or_its_folder(tmp_path):
    safetensors.numpy.save_file(WEIGHTS, tmp_path / "adapter_model.safetensors")
    check(load_safetensors(tmp_path / "adapter_model.safetensors"))
    check(load_safetensors(str(tmp_path)))
    safetensors.numpy.save_file({"x": np.ones(1)[:0]}, tmp_path / "another.safetensors")
    with pytest.raises(ValueError, match=r"holds \['adapter_model.safetensors', 'another"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_shards_by_their_index_or_their_folder(tmp_path, stem):
    index = write_shards(tmp_path, stem)
    check(load_safetensors(index))
    check(load_safetensors(tmp_path))


def test_floating_tensors_get_the_dtype_and_all_others_stay(tmp_path):
    write_shards(tmp_path)
    loaded = load_safetensors(tmp_path, dtype=jnp.bfloat16)
    for name, value in WEIGHTS.items():
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        assert (loaded[name].dtype == jnp.bfloat16) == floating, name
    name = "model.layers.1.up_proj.weight"
    expected = WEIGHTS[name].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded[name]), expected)
    assert not loaded[name].committed


def test_tensors_are_put_where_they_belong(tmp_path):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    write_shards(tmp_path)
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("x"))

    def sharding(name, shape):
        return split if len(shape) == 2 else devices[1]

    loaded = load_safetensors(tmp_path, sharding=sharding, dtype=jnp.float32)
    check(
        {
            n: x if n in ("scalar", "position_ids") else x.astype(WEIGHTS[n].dtype)
            for n, x in loaded.items()
        }
    )
    for array in loaded.values():
        assert array.committed
        assert array.sharding.device_set == (set(devices) if array.ndim == 2 else {devices[1]})
    assert load_safetensors(tmp_path, sharding=devices[1])["scalar"].devices() == {devices[1]}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F8_E4M3", jnp.float8_e4m3fn),
        ("F8_E5M2", jnp.float8_e5m2),
        ("BOOL", np.bool_),
        ("I8", np.int8),
        ("U16", np.uint16),
        ("C64", np.complex64),
    ],
)
def test_other_stored_dtypes(tmp_path, stored, dtype):
    value = np.array([0, 1, 1]).astype(dtype)
    write(tmp_path / "model.safetensors", {"x": (stored, [3], value.tobytes())})
    (loaded,) = load_safetensors(tmp_path).values()
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(np.asarray(loaded), value)


def test_a_dtype_that_jax_does_not_have_is_named(tmp_path):
    write(tmp_path / "model.safetensors", {"x": ("F4", [4], b"\x12\x34")})
    with pytest.raises(ValueError, match=r"tensor 'x' .* dtype F4, which JAX has no array for"):
        load_safetensors(tmp_path)
    write(tmp_path / "model.safetensors", {"x": ("F7", [1], b"\x12")})
    with pytest.raises(ValueError, match=r"no whole safetensors file: .*F7"):
        load_safetensors(tmp_path)


def test_64_bits_are_kept_or_refused_and_never_cut_off(tmp_path):
    doubles, big = np.array([1.0, 1 + 1e-12]), np.array([1, 2**40])
    safetensors.numpy.save_file({"x": doubles}, tmp_path / "x.safetensors")
    safetensors.numpy.save_file({"i": big}, tmp_path / "i.safetensors")
    with pytest.raises(ValueError, match=r"'x' .* is float64: give dtype=, or enable x64"):
        load_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"'i' .* int64 values beyond int32: enable x64"):
        load_safetensors(tmp_path / "i.safetensors")
    assert load_safetensors(tmp_path / "x.safetensors", dtype="float32")["x"].dtype == "float32"
    with jax.enable_x64(True):
        np.testing.assert_array_equal(load_safetensors(tmp_path / "x.safetensors")["x"], doubles)
        np.testing.assert_array_equal(load_safetensors(tmp_path / "i.safetensors")["i"], big)
        assert load_safetensors(tmp_path / "x.safetensors", dtype="float32")["x"].dtype == "float32"


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere, which does not exist"):
        load_safetensors(tmp_path / "nowhere")
    (tmp_path / "readme").touch()
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors in .* holds \['readme'\]"):
        load_safetensors(tmp_path)
    index = write_shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"2 shards, and \['model-2-of-2.safetensors'\]"):
        load_safetensors(index)


def test_an_index_that_does_not_fit_its_shards_is_refused_by_name(tmp_path):
    index = write_shards(tmp_path)
    record = json.loads(index.read_text())

    def with_map(**changes):
        weight_map = {k: v for k, v in (record["weight_map"] | changes).items() if v}
        index.write_text(json.dumps({"weight_map": weight_map}))

    with_map(absent="model-1-of-2.safetensors")
    with pytest.raises(ValueError, match=r"they lack \['absent'\]"):
        load_safetensors(index)
    with_map(scalar=None)
    with pytest.raises(ValueError, match=r"hold \['scalar'\] which it does not know"):
        load_safetensors(index)
    with_map(scalar="model-1-of-2.safetensors")  # it is in the other one
    with pytest.raises(ValueError, match=r"they lack \['scalar'\] .* hold \['scalar'\]"):
        load_safetensors(index)
    with_map(scalar="../model-1-of-2.safetensors")
    with pytest.raises(ValueError, match="names of files beside the index"):
        load_safetensors(index)
    for shard in (3, ["model-1-of-2.safetensors"]):
        with_map(scalar=shard)
        with pytest.raises(ValueError, match=f"{index}.* names of files .*{re.escape(str(shard))}"):
            load_safetensors(index)
    with_map(**dict.fromkeys(record["weight_map"]))
    with pytest.raises(ValueError, match="names no tensor"):
        load_safetensors(index)
    for text in ("{", "{}", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="is no index of shards"):
            load_safetensors(index)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index = write_shards(tmp_path)
    name = "model.norm.weight"
    first = {n: WEIGHTS[n] for n in [*list(WEIGHTS)[:2], name]}
    safetensors.numpy.save_file(first, tmp_path / "model-1-of-2.safetensors")
    with pytest.raises(ValueError, match=r"hold \['model.norm.weight'\]"):
        load_safetensors(index)


@pytest.mark.parametrize("kept", [-1, 20, 4, 0])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors \(\d+ bytes\) is no whole safetens"):
        load_safetensors(tmp_path)


def test_a_header_that_claims_other_sizes_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    write(file, {"x": ("F32", [3], bytes(8))})
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_safetensors(file)
    file.write_bytes(b"PK\x03\x04" * 50)
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_safetensors(file)


def test_what_would_not_fit_is_not_read(tmp_path, monkeypatch):
    write_shards(tmp_path)
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 100)
    with pytest.raises(MemoryBudgetError, match=r"loading .* needs 131 B on .* 100 B are free"):
        load_safetensors(tmp_path)
