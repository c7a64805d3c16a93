"""Arrays that are held twice are found, and arrays that are one are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.memory import cast_once, duplicate_report


@pytest.fixture(autouse=True)
def _arrays_of_this_test(monkeypatch, few_objects):
    """Arrays that earlier tests have left are not looked at: there may be thousands."""
    earlier, live_arrays = jax.live_arrays(), jax.live_arrays
    old = {id(x) for x in earlier}
    monkeypatch.setattr(jax, "live_arrays", lambda: [x for x in live_arrays() if id(x) not in old])
    yield
    del earlier  # kept until here, so that no new array has the id of an old one


def names_with(report, name):
    return [d for d in report.duplicates if name in d.names]


def test_copies_are_found_across_dtypes_and_shared_buffers_are_none():
    x = jnp.arange(37.0) / 3
    trees = {
        "model": {"w": x, "tied": x},
        "ema": x + 0,
        "half": x.astype(jnp.bfloat16),
        "other": x + 1,
        "whole": jnp.arange(37),
        "alias": jax.device_put(x, jax.devices()[0]),
    }
    report = duplicate_report(min_bytes=74, **trees)
    (found,) = names_with(report, "model/tied")
    assert found.names == ("model/tied", "ema", "half")
    assert found.wasted_bytes == 148 + 148  # all but the smallest
    assert "model/tied = ema = half" in str(report) and report.wasted_bytes >= 296


def test_integers_that_equal_floats_are_no_copy():
    report = duplicate_report(min_bytes=4, a=jnp.arange(41), b=jnp.arange(41.0))
    assert not names_with(report, "a") and not names_with(report, "b")


def test_constants_and_small_arrays_are_not_named():
    trees = {"mu": jnp.zeros(43), "nu": jnp.zeros(43), "s": jnp.arange(4.0), "t": jnp.arange(4.0)}
    report = duplicate_report(min_bytes=100, **trees)
    assert not [d for d in report.duplicates if {"mu", "nu", "s", "t"} & set(d.names)]
    assert names_with(duplicate_report(min_bytes=16, **trees), "s")


def test_no_array_is_too_small_for_zero_bytes():
    trees = {"s": jnp.arange(3.0), "t": jnp.arange(3.0)}
    assert names_with(duplicate_report(min_bytes=0, **trees), "s")


def test_arrays_that_differ_in_one_entry_are_two():
    x = jnp.arange(47.0)
    assert not names_with(duplicate_report(min_bytes=4, x=x, y=x.at[2].set(9.0)), "x")


def test_a_copy_that_holds_a_nan_is_found():
    x = jnp.arange(61.0).at[7].set(jnp.nan)
    (found,) = names_with(duplicate_report(min_bytes=4, x=x, y=x.astype(jnp.bfloat16)), "x")
    assert found.names == ("x", "y")
    gone = jnp.full(67, jnp.nan)
    assert not names_with(duplicate_report(min_bytes=4, x=gone, y=gone + 1), "x")


def test_a_copy_on_another_device_is_found():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    x = jnp.arange(53.0)
    report = duplicate_report(min_bytes=4, x=x, y=jax.device_put(x, jax.devices()[1]))
    (found,) = names_with(report, "x")
    assert found.names == ("x", "y")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_on_meshes_of_any_kind_and_order_are_compared(kind):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    devices = np.array(jax.devices()[:2])
    values = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    one, other = (
        jax.device_put(values, NamedSharding(Mesh(order, "x", axis_types=(kind,)), P("x")))
        for order in (devices, devices[::-1])
    )
    (found,) = names_with(duplicate_report(min_bytes=0, one=one, other=other), "one")
    assert found.names == ("one", "other")


def test_a_forgotten_copy_is_found_among_live_arrays_and_is_gone_after_a_cast_of_it():
    params = {"w": jnp.arange(59.0) / 7}
    forgotten = params["w"] + 0
    (found,) = names_with(duplicate_report(min_bytes=236, params=params), "params/w")
    assert found.wasted_bytes == 236 and "float32[59] on" in found.names[1]
    kept = cast_once({"forgotten": forgotten}, jnp.bfloat16, delete=True)
    (found,) = names_with(duplicate_report(min_bytes=118, params=params), "params/w")
    assert found.wasted_bytes == 236  # float32 beside the bfloat16 that took its place
    del kept
    report = duplicate_report(min_bytes=118, params=params)
    assert not names_with(report, "params/w")


def test_arrays_of_before_are_ignored_unless_a_tree_has_them():
    before = jnp.arange(73.0) / 7
    copy = before + 0
    options = {"min_bytes": 292, "ignore": [before]}
    assert not names_with(duplicate_report(**options, copy=copy), "copy")
    (found,) = names_with(duplicate_report(**options, copy=copy, params=before), "copy")
    assert found.names == ("copy", "params")


def test_a_report_without_duplicates_says_so():
    assert str(duplicate_report(min_bytes=1 << 50)).startswith("none of 0 arrays of at least")
