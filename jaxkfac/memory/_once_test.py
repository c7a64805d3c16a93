"""Leaves are cast and placed one at a time; sources go, and what is right is not touched."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkfac.memory import MemoryBudgetError, cast_once, place_once
from jaxkfac.memory import _budget as budget
from jaxkfac.memory import _place as cast


def tree():
    kernel = jnp.arange(6.0).reshape(3, 2) / 7
    return {
        "kernel": kernel,
        "half": jnp.ones((4,), jnp.bfloat16),
        "ids": jnp.arange(3),
        "key": jax.random.key(0),
        "numpy": np.arange(3.0),
        "number": 1.5,
        "tied": kernel,
        "alias": jax.device_put(kernel, jax.devices()[0]),  # another object, the same buffer
        "none": None,
    }


@pytest.fixture
def devices():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.devices()[:2]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
def test_floating_leaves_get_the_dtype_and_all_others_stay(dtype):
    params = tree()
    expected = np.asarray(params["kernel"]).astype(dtype)
    done = cast_once(params, dtype)
    assert done.keys() == params.keys()
    np.testing.assert_array_equal(np.asarray(done["kernel"]), expected)
    assert done["kernel"].dtype == done["half"].dtype == done["numpy"].dtype == dtype
    assert isinstance(done["numpy"], np.ndarray) and params["numpy"].dtype == np.float64
    for name in ("ids", "key", "number", "none"):
        assert done[name] is params[name]
    again = cast_once(done, dtype)
    assert all(again[name] is done[name] for name in done)


def test_sources_are_deleted_and_tied_leaves_stay_tied():
    params = tree()
    done = cast_once(params, jnp.bfloat16)
    deleted = [n for n, x in params.items() if isinstance(x, jax.Array) and x.is_deleted()]
    assert deleted == ["kernel", "tied", "alias"]
    assert done["kernel"] is done["tied"] is done["alias"]
    with pytest.raises(ValueError, match="cast_once: the array at 'alias' is deleted"):
        cast_once(params, jnp.bfloat16)


def test_sources_can_be_kept():
    params = tree()
    cast_once(params, jnp.bfloat16, delete=False)
    assert not any(x.is_deleted() for x in params.values() if isinstance(x, jax.Array))


def test_each_source_is_gone_before_the_next_leaf_is_made(monkeypatch):
    params = {f"layer{i}": jnp.full((5,), float(i)) for i in range(4)}
    alive, empty = [], cast.aligned_empty

    def spy(shape, dtype):
        alive.append(sum(not p.is_deleted() for p in params.values()))
        return empty(shape, dtype)

    monkeypatch.setattr(cast, "aligned_empty", spy)
    cast_once(params, jnp.bfloat16)
    assert alive == [4, 3, 2, 1]


def test_cast_keeps_where_an_array_is_and_whether_it_is_committed(devices):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    host = SingleDeviceSharding(devices[1], memory_kind="pinned_host")
    values = np.ones((4, 2), np.float32)
    params = {
        "sharded": jax.device_put(values, sharding),
        "host": jax.device_put(values, host),
        "free": jnp.ones(2),
    }
    done = cast_once(params, jnp.bfloat16)
    assert done["sharded"].sharding == sharding and done["sharded"].committed
    assert done["host"].sharding == host
    assert not done["free"].committed


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        # XLA converts to eight bits by way of float16.
        *(
            pytest.param(dtype, marks=pytest.mark.float16)
            for dtype in (jnp.float16, jnp.float8_e5m2, jnp.float8_e4m3fn)
        ),
    ],
)
def test_values_are_those_of_a_conversion_on_the_device(dtype):
    values = np.array([1.0, 1 / 3, -2.7, 70000.0, 3e38, np.inf, np.nan, 1e-8, 0.0], np.float32)
    expected = jax.lax.convert_element_type(jnp.asarray(values), dtype)
    (found,) = cast_once([jnp.asarray(values)], dtype)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_cast_inside_a_program_is_a_conversion():
    out = jax.jit(lambda p: cast_once(p, jnp.bfloat16))({"x": jnp.ones(2), "i": jnp.arange(2)})
    assert out["x"].dtype == jnp.bfloat16 and out["i"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("dtype", "message"), [("int8", "floating dtype, got int8"), ("float64", "x64")]
)
def test_a_dtype_that_parameters_cannot_have_is_refused(dtype, message):
    params = {"x": jnp.ones(2)}
    with pytest.raises(ValueError, match=message):
        cast_once(params, dtype)
    assert not params["x"].is_deleted()


def test_double_precision_where_it_is_on(x64):
    assert cast_once({"x": jnp.ones(2, jnp.float32)}, "float64")["x"].dtype == jnp.float64


def test_placed_leaves_are_committed_where_they_should_be(devices):
    params = tree()
    expected = jax.tree.map(lambda x: x, {k: v for k, v in params.items() if k != "key"})
    expected = jax.tree.map(np.asarray, expected)
    placed = place_once(params, devices[1])
    for name, value in expected.items():
        assert name == "none" or placed[name].devices() == {devices[1]}
        if name != "none":
            np.testing.assert_array_equal(
                np.asarray(placed[name]), value.astype(placed[name].dtype)
            )
    assert jax.random.key_data(placed["key"]).devices() == {devices[1]}
    assert params["kernel"].is_deleted() and not params["key"].is_deleted()
    assert placed["kernel"] is placed["tied"]
    again = place_once(placed, SingleDeviceSharding(devices[1]))
    assert all(again[name] is placed[name] for name in placed)


def test_an_uncommitted_array_in_its_place_is_committed_without_a_copy():
    params = {"x": jnp.ones(3)}
    placed = place_once(params, jax.devices()[0])
    assert placed["x"].committed and not params["x"].is_deleted()
    assert placed["x"].unsafe_buffer_pointer() == params["x"].unsafe_buffer_pointer()


def test_another_memory_of_the_same_device_is_another_place():
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        pytest.skip("this device has one memory")
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    params = place_once({"x": np.ones(2, np.float32)}, host)
    assert params["x"].sharding.memory_kind == "pinned_host"
    assert place_once(params, host)["x"] is params["x"]
    back = place_once(params, device)
    assert back["x"].sharding.memory_kind == device.default_memory().kind
    assert float(back["x"].sum()) == 2


def test_a_buffer_that_a_result_took_over_is_not_deleted(devices):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    x = jax.device_put(np.ones((4,), np.float32), devices[0])
    placed = place_once({"x": x, "y": jnp.ones(2)}, NamedSharding(mesh, PartitionSpec()))
    assert float(placed["x"].sum()) == 4 and placed["x"].sharding.is_fully_replicated
    again = jax.device_put(np.ones((4,), np.float32), devices[0])
    both = {"a": again, "b": jax.device_put(again, NamedSharding(mesh, PartitionSpec()))}
    moved = place_once(both, {"a": devices[1], "b": NamedSharding(mesh, PartitionSpec())})
    assert moved["b"] is both["b"] and float(moved["b"].sum()) == 4


def test_a_tree_of_shardings_may_be_a_prefix(devices):
    params = {"a": {"x": jnp.ones(2), "y": jnp.ones(3)}, "b": jnp.ones(2)}
    placed = place_once(params, {"a": devices[0], "b": devices[1]})
    assert [x.devices() for x in jax.tree.leaves(placed)] == [
        {devices[0]},
        {devices[0]},
        {devices[1]},
    ]
    with pytest.raises(ValueError, match="structure"):
        place_once(placed, {"a": devices[0]})
    with pytest.raises(TypeError, match="expected a jax.sharding.Sharding or a device, got 'cpu'"):
        place_once(placed, "cpu")


def test_a_later_write_into_a_numpy_source_does_not_show():
    memory = np.zeros(1 << 16, np.uint8)
    start = -memory.ctypes.data % 64  # aligned, so that a plain device_put takes it as it is
    source = memory[start : start + 4096].view(np.float32)
    assert jax.device_put(source).unsafe_buffer_pointer() == source.ctypes.data
    placed = place_once({"x": source}, jax.devices("cpu")[0])
    source[:] = 7
    assert float(placed["x"].max()) == 0


def test_half_precision_numpy_leaves_are_placed_as_they_are():
    placed = place_once({"x": np.ones(3, ml_dtypes.bfloat16)}, jax.devices()[0])
    assert placed["x"].dtype == jnp.bfloat16


def test_nothing_is_consumed_where_it_would_not_fit(monkeypatch):
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 4000)
    params = {f"x{i}": jnp.ones(1000) for i in range(3)}
    # One leaf of 2000 bytes comes before 4000 go: never more than 2000 bytes beyond the start.
    done = cast_once(params, jnp.bfloat16)
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 5999)
    with pytest.raises(MemoryBudgetError, match=r"cast_once needs 7.81 KiB .* 5.86 KiB are free"):
        cast_once(done, jnp.float32)
    assert not any(x.is_deleted() for x in done.values())


def test_an_uncommitted_leaf_stays_on_its_device(devices):
    with jax.default_device(devices[1]):
        params = {"kernel": jnp.arange(6.0)}
    small = cast_once(params, jnp.bfloat16)["kernel"]
    assert (small.devices(), small.committed) == ({devices[1]}, False)
