"""Room is asked for in bytes, answered with a place, refused with the numbers."""

import types

import jax
import pytest

from jaxkfac._errors import JaxkfacError
from jaxkfac.memory import MemoryBudgetError, bytes_text, free_bytes, free_host_bytes, require
from jaxkfac.memory import _budget as budget

GIB = 2**30


def accelerator(limit, used):
    """A device that says what an accelerator's allocator says."""
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def test_an_accelerators_free_bytes_are_its_limit_less_what_is_in_use():
    assert free_bytes(accelerator(10 * GIB, 4 * GIB)) == 6 * GIB
    assert free_bytes(accelerator(GIB, 4 * GIB)) == 0
    assert free_bytes(jax.devices("cpu")[0]) is None


def test_what_fits_stays_on_the_device_and_what_does_not_goes_to_the_host(monkeypatch):
    device = accelerator(10 * GIB, 4 * GIB)
    ask = dict(device=device, what="factor A of layer 'up'", otherwise="host")
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 20 * GIB)
    assert require(6 * GIB, **ask) == "device"
    assert require(6 * GIB + 1, **ask) == "host"
    assert require(3 * GIB, fraction=0.5, **ask) == "device"
    assert require(3 * GIB + 1, fraction=0.5, **ask) == "host"
    monkeypatch.setattr(budget, "free_host_bytes", lambda: None)
    assert require(2**60, **ask) == "host"  # an unknown limit is no limit


def test_refusal_has_all_the_numbers(monkeypatch):
    monkeypatch.setattr(budget, "free_host_bytes", lambda: 20 * GIB)
    device = accelerator(10 * GIB, 4 * GIB)
    with pytest.raises(MemoryBudgetError, match=r"factor A needs 7 GiB .*; 6 GiB are free there:"):
        require(7 * GIB, device=device, what="factor A")
    with pytest.raises(
        MemoryError, match=r"6 GiB are free there, 20 GiB are free in main mem.*50%"
    ):
        require(11 * GIB, device=device, what="A", otherwise="host", fraction=0.5)
    with pytest.raises(JaxkfacError, match=r"needs 1.07e\+09 GiB on .*20 GiB are free"):
        require(2**60, device=jax.devices("cpu")[0], what="A")
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\], got 0.0"):
        require(1, device=device, what="A", fraction=0.0)


@pytest.mark.parametrize(
    ("limit", "used", "cache", "expected"),
    [
        ("3000000", 1000000, 200000, 2200000),  # the container's limit counts, its cache gives way
        ("max", 1000000, 0, 4096 * 1024),
        ("99999999999", 1000000, 0, 4096 * 1024),
    ],
)
def test_containers_limit_bounds_main_memory(tmp_path, monkeypatch, limit, used, cache, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:  4096 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\nactive_file 3\n")
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    assert free_host_bytes() == expected


@pytest.mark.parametrize(
    ("own", "folder", "limit", "usage"),
    [
        ("0::/jobs/7/step\n", "jobs/7", "memory.max", "memory.current"),
        (
            "3:cpu:/\n4:memory,hugetlb:/jobs/7\n",
            "memory/jobs/7",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_the_limit_of_a_job_below_the_top_counts(tmp_path, monkeypatch, own, folder, limit, usage):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:  4096 kB\n")
    (tmp_path / "own").write_text(own)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / limit).write_text("3000000\n")
    (tmp_path / folder / usage).write_text("1000000\n")
    (tmp_path / folder / "memory.stat").write_text("inactive_file 200000\n")
    for name, path in (("_MEMINFO", "meminfo"), ("_CGROUP", ""), ("_OWN_CGROUPS", "own")):
        monkeypatch.setattr(budget, name, tmp_path / path)
    assert free_host_bytes() == 2200000


def test_main_memory_is_unknown_where_the_system_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "nothing")
    assert free_host_bytes() is None


def test_bytes_have_three_digits_and_a_unit():
    found = [bytes_text(n) for n in (0, 999, 1000, 1536, 2**20, 5.5 * GIB)]
    assert found == ["0 B", "999 B", "0.977 KiB", "1.5 KiB", "1 MiB", "5.5 GiB"]


@pytest.mark.gpu
def test_a_gpu_counts_what_it_holds():
    device = jax.devices("gpu")[0]
    before = free_bytes(device)
    x = jax.block_until_ready(jax.device_put(jax.numpy.ones(2**22), device))
    assert before is not None and before - free_bytes(device) >= x.nbytes
    with pytest.raises(MemoryBudgetError, match="needs"):
        require(before + 1, device=device, what="everything")


def test_a_limit_on_the_process_itself_counts(monkeypatch):
    used = budget.address_space_bytes()
    if used is None:
        pytest.skip("this is about Linux")
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + GIB // 64, 0))
    assert free_host_bytes() <= GIB // 32
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used // 2, 0))
    assert free_host_bytes() == 0
