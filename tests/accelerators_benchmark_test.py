"""The record of compiled programs reads their text rightly, and makes a page of it."""

import jax
import pytest

from benchmarks.accelerators._compiled import described
from benchmarks.accelerators._programs import DTYPES, SIZES, Steps, steps
from benchmarks.accelerators._table import page

TEXT = """
  %a = (f32[3,8,8]{1,2,0}, f32[3,8]{1,0}) custom-call(%x), custom_call_target="cusolver_syevd_ffi"
  %b = (f64[16,16]{0,1}, f64[16]{0}) custom-call(%y), custom_call_target="cusolver_syevd_ffi"
  %c = f32[4]{0} all-reduce(%z), replica_groups={{0,1}}, to_apply=%sum
  %d = (f32[4]{0}, f32[4]{0}) all-reduce-start(%z), replica_groups={{0,1}}, to_apply=%sum
  %e = f32[4]{0} all-reduce-done(%d)
  %f = f32[8]{0} all-gather(%c), dimensions={0}
"""


def test_solves_scratch_and_collectives_are_read_from_the_text():
    found = described(TEXT)
    assert found["solves"] == ["1 x 16", "3 x 8"]
    assert found["scratch"] == 8 * (1 + 6 * 16 + 2 * 16**2)  # the larger call, in float64
    assert found["collectives"] == {"all-reduce": 2, "all-gather": 1}
    assert found["cudnn_calls"] == 0


def test_the_page_has_a_line_for_every_row_beside_the_gradient():
    row = {
        "temporaries": 3 * 2**20,
        "arguments": 0,
        "outputs": 0,
        "compile_cpu_s": 1.0,
        **described(TEXT),
    }
    rows = {
        "h100/one device/small/float32/gradient": row | {"temporaries": 2 * 2**20},
        "h100/one device/small/float32/decomposition": row,
        "h100/one device/small/float32/EKFAC pass": {"stopped": "no result after 300 CPU s"},
    }
    lines = page({"command": "make accelerators", "versions": {}, "rows": rows}).splitlines()
    lines = [line for line in lines if line.startswith("| ")][1:]
    assert lines[0].startswith("| gradient | 2.0 | 1.000 |")
    assert lines[1] == "| EKFAC pass | no result after 300 CPU s | | | | | | | |"
    assert lines[2].startswith("| decomposition | 3.0 | 1.500 |")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", steps())
def test_every_step_of_the_record_traces_in_bfloat16(name):
    fn, args = steps()[name](Steps(SIZES["small"], DTYPES["bfloat16"]))
    jax.eval_shape(fn, *args)
