"""The record of compiled programs reads their text rightly, and makes a page of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.accelerators import _record
from benchmarks.accelerators._others import others
from benchmarks.accelerators._steps import decoder_steps
from benchmarks.accelerators._table import gradient_of, page
from jaxkfac.planning import program_work

TEXT = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %c = f32[4]{0} all-reduce(%z), replica_groups={{0,1}}, to_apply=%sum
  %v = (f32[16,16]{0,1}, s32[]) custom-call(%y), custom_call_target="cusolver_potrf_ffi"
}

%first (p: f32[3,8,8]) -> f32[3,8,8] {
  %a = (f32[3,8,8]{1,2,0}, f32[3,8]{1,0}) custom-call(%x), custom_call_target="cusolver_syevd_ffi"
}

%second (p: f64[16,16]) -> f64[16,16] {
  %b = (f64[16,16]{0,1}, f64[16]{0}) custom-call(%y), custom_call_target="cusolver_syevd_ffi"
}

ENTRY %main (p: f32[4]) -> f32[8] {
  %w = (f32[4], s32[]) while(%p), condition=%never, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %d = (f32[4]{0}, bf16[4]{0}) all-reduce-start(%z), replica_groups={{0,1}}, to_apply=%sum
  %e = (f32[4]{0}, bf16[4]{0}) all-reduce-done(%d)
  %f = f32[8]{0} all-gather(%c), dimensions={0}
  %g = f32[4] conditional(%i, %l, %r), branch_computations={%first, %second}
  %h = f32[4] custom-call(%i), custom_call_target="__cudnn$convForward"
}
"""


def test_loops_count_as_they_turn_and_branches_as_the_one_that_solves_most():
    found = program_work(TEXT)
    assert found["solves"] == ["1 x 16", "cholesky 5 x 16"]
    assert found["cubes"] == 6 * 16**3
    assert found["scratch"] == 8 * (1 + 6 * 16 + 2 * 16**2)  # of float64
    assert found["cudnn_calls"] == 1
    assert found["collectives"] == {
        "all-reduce": {"count": 6, "bytes": 5 * 16 + 16 + 8},
        "all-gather": {"count": 1, "bytes": 32},
    }


def test_scratch_is_of_all_matrices_that_one_call_solves():
    """As many as fit into 2**31 - 1 bytes."""
    shape = '  %b = (f32[{0},{1},{1}]) custom-call(%y), custom_call_target="cusolver_syevd_ffi"'
    for batch, n, together in ((3, 8, 3), (200, 4096, 31), (2, 30000, 1)):
        text = "ENTRY %main (p: f32[4]) -> f32[8] {\n" + shape.format(batch, n)
        assert program_work(text)["scratch"] == together * 4 * (1 + 6 * n + 2 * n**2)


def test_the_page_has_a_line_for_every_row_beside_its_gradient():
    row = {
        "temporaries": 3 * 2**20,
        "arguments": 0,
        "outputs": 0,
        "compile_cpu_s": 4.0,
        **program_work(TEXT),
        "versions": {"jax": "1.2"},
        "date": "2026-01-02",
        "commit": "abc",
    }
    faster = row | {"temporaries": 2 * 2**20, "compile_cpu_s": 2.0}
    rows = {
        "h100/one device/small/float32/gradient": faster,
        "h100/one device/small/float32/decomposition": row,
        "h100/one device/small/float32/EKFAC pass": row | {"stopped": "no result"},
        "h100/one device/small/float32/net, gradient": row,
        "h100/one device/small/float32/net, factors": row,
    }
    lines = page({"command": "make accelerators", "rows": rows}).splitlines()
    lines = [line for line in lines if line.startswith("| ")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| gradient | 2.0 | 1.000 |")
    assert lines[2].startswith("| EKFAC pass | no result | |")
    assert lines[3].startswith("| decomposition | 3.0 | 1.500 |")
    assert "| 4.0 | 2.000 | 1 x 16, cholesky 5 x 16 |" in lines[3]
    assert lines[4].startswith("| net, factors | 3.0 | 1.000 |")
    assert all(line.endswith("| 2026-01-02 abc |") for line in lines[1:])


def every_step(dtype):
    return {**decoder_steps("small", dtype), **others(dtype)}


@pytest.mark.default(1, slow=2)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", every_step(jnp.float32))
def test_every_step_of_the_record_traces_in_bfloat16(name):
    with jax.numpy_dtype_promotion("standard"):  # Flax's layers need it
        fn, args, *_ = every_step(jnp.bfloat16)[name]()
        jax.eval_shape(fn, *args)


def test_a_row_stands_while_program_and_compilers_are_the_same(tmp_path, monkeypatch):
    """And is compiled again where nothing came back."""
    found = {"jax": "1"}
    monkeypatch.setattr(_record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(_record, "versions", lambda target: dict(found))
    place = ("h100", "one device", "small", "float32", "gradient")
    assert not _record.is_current(place, "abc")
    _record.keep(place, {"stopped": _record.BEGUN}, "abc")
    assert not _record.is_current(place, "abc")
    _record.keep(place, {"stopped": "no result after 300 CPU s"}, "abc")
    assert _record.is_current(place, "abc") and not _record.is_current(place, "abd")
    assert "no result after 300 CPU s" in (tmp_path / "record.md").read_text()
    found["jax"] = "2"
    assert not _record.is_current(place, "abc")


def test_the_table_of_the_docs_is_of_the_record():
    """Temporaries at the real size, and their ratio to the gradient's of the same program."""
    record = json.loads(_record.RECORD.read_text())["rows"]
    root = Path(__file__).parents[1]
    table = re.findall(
        r"^\| (.+?) \| (\d+) \((\d\.\d\d)\) \| (\d+) \((\d\.\d\d)\) \|$",
        (root / "docs" / "accelerators.md").read_text(),
        re.MULTILINE,
    )
    steps = decoder_steps("real", jnp.float32)
    assert len(table) == sum(not name.startswith("training") for name in steps)
    for name, *cells in table:
        for dtype, size, ratio in (("float32", *cells[:2]), ("bfloat16", *cells[2:])):
            rows = {
                place.rpartition("/")[2]: row
                for place, row in record.items()
                if place.startswith(f"h100/one device/real/{dtype}/")
            }
            row, gradient = rows[name]["temporaries"], gradient_of(name, rows)["temporaries"]
            assert (size, ratio) == (f"{row / 2**20:.0f}", f"{row / gradient:.2f}"), (name, dtype)


def test_the_docs_table_of_trainings_is_of_the_record():
    """What a training holds with and without packing."""
    prefix = "h100/one device/real/float32/training, "
    record = json.loads(_record.RECORD.read_text())["rows"]
    rows = {key.removeprefix(prefix): x for key, x in record.items() if key.startswith(prefix)}
    root, mib = Path(__file__).parents[1], lambda size: f"{size / 2**20:.0f}"
    names = {
        "SGD with momentum": "SGD with momentum",
        "exact damping": "K-FAC, exact",
        "exact damping, packed": "K-FAC, exact, packed",
        '"pi"': "K-FAC, pi",
        '"pi", packed': "K-FAC, pi, packed",
        "exact damping, packed, in 4 turns": "K-FAC, exact, packed, in 4 turns",
        '"pi", packed, in 4 turns': "K-FAC, pi, packed, in 4 turns",
    }
    assert set(names.values()) == set(rows)
    memory = (root / "docs" / "memory.md").read_text()
    for shown, name in names.items():
        row = rows[name]
        quoted = shown.replace('"pi"', '`"pi"`')
        cell = shown if name.startswith("SGD") else f"`jk.kfac`, {quoted}"
        sizes = f"{int(mib(row['arguments'])):,} | {int(mib(row['temporaries'])):,}"
        assert f"| {cell} | {sizes} |" in memory, (cell, sizes)


def test_on_eight_devices_none_solves_more_than_its_share_and_the_largest_matrix():
    rows = json.loads(_record.RECORD.read_text())["rows"]
    divided = [key for key in rows if key.endswith("K-FAC step, divided")]
    assert len(divided) == 3  # two layouts, one of them in two dtypes
    for key in divided:
        whole, mine = rows[key.removesuffix(", divided")], rows[key]
        largest = max(int(solve.split(" x ")[1]) for solve in whole["solves"]) ** 3
        assert 0 < mine["cubes"] <= whole["cubes"] / 8 + largest
        assert mine["outputs"] < 1.01 * whole["outputs"]  # what is sharded stays so


@pytest.mark.slow
def test_steps_of_a_gpu_run_at_a_small_size_and_go_on(tmp_path):
    file = tmp_path / "steps.json"
    command = [sys.executable, "-m", "benchmarks.gpu_steps", "--size", "small", "--json", str(file)]
    done = subprocess.run([*command, "--step", "kfe_adam"], capture_output=True, text=True)
    assert done.stdout.startswith("kfe_adam: traced and compiled in "), done.stderr
    row = json.loads(file.read_text())["steps"]["kfe_adam"]
    assert min(row["ms"], row["compile_s"], row["planned_mib"]) > 0
    again = subprocess.run([*command, "--minutes", "0"], capture_output=True, text=True)
    assert again.returncode == 0 and not again.stdout
