"""`jaxkfac plan` prints the plan of a layout, for people and for programs."""

import json
from typing import get_args

import pytest

from jaxkfac._errors import CompilerError
from jaxkfac.jobs.cli import _plan
from jaxkfac.jobs.cli._plan import OptionName, PlanArguments, run_plan
from jaxkfac.memory import MemoryBudgetError
from jaxkfac.planning import OPTION_NAMES, PRESETS, DecoderLayout
from jaxkfac.planning._temporaries import Temporaries

TINY = {"preset": "tiny", "tokens": 8, "batch": 2}


@pytest.fixture(autouse=True)
def _a_small_layout(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", DecoderLayout(2, 8, 2, 12, 11, fused=True))


def test_the_command_offers_every_option_of_the_planner():
    assert get_args(OptionName) == OPTION_NAMES


@pytest.mark.exhaustive
def test_the_table_is_printed_and_what_fits_is_said(capsys):
    run_plan(PlanArguments(device_bytes=1e9, options=("remat", "host"), **TINY))
    shown = capsys.readouterr().out
    assert shown.split("\n")[0].split() == ["on", "the", "device", "now", "host", "remat"]
    assert "it fits as it is" in shown and "~: temporaries are for NVIDIA H100" in shown


@pytest.mark.exhaustive
def test_with_compiled_none_the_compiler_that_is_named_is_not_asked(capsys, monkeypatch):
    def fail(*_, **__):
        raise CompilerError("asked")

    monkeypatch.setattr(Temporaries, "_ask", fail)
    plan = {"device_bytes": "1GB", "options": (), "compiler": "cpu", **TINY}
    run_plan(PlanArguments(compiled="none", json=True, **plan))
    none = json.loads(capsys.readouterr().out)
    assert not none["now"]["compiled"] and none["now"]["device"]["activations"] > 0
    assert none["within"] > 0
    run_plan(PlanArguments(**plan))
    shown = capsys.readouterr().out
    assert "not compiled: asked" in shown and f"±{none['within']:.0%}" in shown


@pytest.mark.slow
def test_sharded_parameters_are_planned_on_their_devices(capsys):
    plan = {"device_bytes": "1GB", "options": (), "json": True, "curvature": "none", **TINY}
    run_plan(PlanArguments(compiler="cpu", devices=2, fully_sharded=True, **plan))
    half = json.loads(capsys.readouterr().out)
    run_plan(PlanArguments(compiler="cpu", compiled="none", **plan))
    whole = json.loads(capsys.readouterr().out)
    rows = half["now"]["device"], whole["now"]["device"]
    assert rows[0]["parameters"] < 0.6 * rows[1]["parameters"]
    assert half["fully_sharded"] and half["now"]["exchanged"]["all-gather"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_json_holds_bytes_and_the_optimizers_share(capsys):
    found = {}
    for optimizer in ("none", "sgd", "adam", "kfac"):
        run_plan(
            PlanArguments(device_bytes=1e9, options=(), json=True, optimizer=optimizer, **TINY)
        )
        record = json.loads(capsys.readouterr().out)
        found[optimizer] = record["now"]["device"]
        assert record["smallest"]["options"] == [] and record["device_bytes"] == 1e9
    parameters = found["none"]["parameters"]
    state = {name: rows["optimizer"] for name, rows in found.items()}
    assert state["none"] == 0 and state["sgd"] == parameters
    assert 2 * parameters < state["adam"] < 2 * parameters + 16
    assert parameters <= state["kfac"] <= parameters + 40  # and counters
    assert found["kfac"]["factors"] == 2 * found["none"]["factors"]


@pytest.mark.slow
def test_a_micro_batch_is_planned_with_its_accumulators(capsys):
    found = {}
    for dtype, kind in ((None, "device"), ("bfloat16", "device"), (None, "pinned_host")):
        run_plan(
            PlanArguments(
                **{"device_bytes": 1e9, "options": (), "json": True, "curvature": "none", **TINY},
                gradient_accumulation_steps=16,
                accumulator_dtype=dtype,
                accumulator_memory_kind=kind,
            )
        )
        found[dtype, kind] = json.loads(capsys.readouterr().out)["now"]
    wide = found[None, "device"]
    parameters = wide["device"]["parameters"]
    assert wide["steps"] == 16 and wide["device"]["accumulation"] == parameters + 4
    assert found["bfloat16", "device"]["device"]["accumulation"] == parameters // 2 + 4
    assert found[None, "pinned_host"]["device"]["accumulation"] == 0
    assert found[None, "pinned_host"]["host"]["accumulation"] == parameters + 4


@pytest.mark.slow
def test_a_plan_that_fits_nowhere_is_printed_before_it_is_an_error(capsys):
    with pytest.raises(MemoryBudgetError, match="nothing fits 0.977 KiB"):
        run_plan(PlanArguments(device_bytes=1e3, options=("host",), curvature="analyze", **TINY))
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "lama-7b"}, "'llama-7b'"),
        ({"batch": 0}, "batch=0: expected at least 1"),
        ({"device_bytes": -1.0}, "device_bytes=-1"),
        ({"device_bytes": "80XB"}, "device_bytes='80XB': expected .*\"80GB\""),
        ({"host_bytes": "many"}, "host_bytes='many': expected .*\"74.5GiB\""),
        ({"optimizer": "kfac", "curvature": "analyze"}, 'kfac needs "precondition"'),
        ({"preset": "t5-xl", "packed": True}, "--packed.*no such options"),
        ({"collect": 0, "optimizer": "kfac"}, "collect=0: expected at least 1"),
        ({"collect": 2}, "--collect 2: only --optimizer kfac averages factors in turns"),
        ({"collect": 2, "curvature": "none"}, "--collect 2: only --optimizer kfac"),
        ({"damping_mode": "pi"}, "--damping-mode pi: only --optimizer kfac has a damping"),
        ({"collect": 2, "optimizer": "kfac", "curvature": "analyze"}, 'kfac needs "precondition"'),
        ({"preset": "t5-xl", "collect": 2, "optimizer": "kfac"}, "--collect: .*no such options"),
        ({"train": "adapter", "collect": 2, "optimizer": "kfac"}, "--collect: .*no such options"),
    ],
)
def test_what_cannot_be_planned_is_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        run_plan(PlanArguments(**{"device_bytes": 1e9, **TINY, **changes}))


@pytest.mark.exhaustive
def test_packed_kfac_takes_half_the_factors_and_inverses(capsys, monkeypatch):
    wide = DecoderLayout(2, 128, 2, 256, 128, fused=True)  # smaller matrices are not packed
    monkeypatch.setitem(PRESETS, "tiny", wide)
    rows = []
    for packed in (False, True):
        arguments = {"optimizer": "kfac", "damping_mode": "pi", "packed": packed, "json": True}
        run_plan(PlanArguments(device_bytes="1GB", options=(), **TINY, **arguments))
        rows.append(json.loads(capsys.readouterr().out)["now"]["device"])
    for name in ("factors", "bases"):
        assert 0.5 < rows[1][name] / rows[0][name] < 0.56


@pytest.mark.exhaustive
def test_factors_in_turns_are_those_of_some_blocks(capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", DecoderLayout(4, 8, 2, 12, 11, fused=True))
    found = {}
    for collect in (1, 4):
        arguments = {"optimizer": "kfac", "collect": collect, "json": True, **TINY}
        run_plan(PlanArguments(device_bytes="1GB", options=("host", "budget"), **arguments))
        found[collect] = json.loads(capsys.readouterr().out)
    rows = {collect: record["now"]["device"] for collect, record in found.items()}
    assert rows[1]["bases"] == rows[4]["bases"]
    # Three of four blocks: A and G of qkv, o, gate and up, and down, without counts and scales.
    sides = 8**2 + 24**2 + 8**2 + 8**2 + 8**2 + 24**2 + 12**2 + 8**2
    saved = rows[1]["factors"] - rows[4]["factors"]
    assert saved == pytest.approx(4 * 3 * sides, rel=0.1)
    assert not found[1]["unavailable"].keys() & {"host"}
    assert found[4]["unavailable"]["host"] == "factors come in turns (collect=)"


@pytest.mark.slow
def test_what_takes_longer_than_two_seconds_says_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr(_plan, "_QUIET", 0.0)
    run_plan(PlanArguments(device_bytes="1GB", options=("remat",), **TINY))
    assert "planning: as it stands\nplanning: remat" in capsys.readouterr().err


def test_the_first_line_does_not_wait_for_the_next_set(capsys, monkeypatch):
    class AtOnce:
        def __init__(self, seconds, run):
            self.start, self.cancel = run, lambda: None

    monkeypatch.setattr(_plan, "_elapsed", lambda start: 0.0)
    monkeypatch.setattr(_plan.threading, "Timer", AtOnce)
    with _plan._progress() as told:
        told("remat")
    assert capsys.readouterr().err == "planning\nplanning: remat\n"


def test_a_timer_that_runs_late_says_nothing(capsys, monkeypatch):
    late = []

    class TooLate:
        def __init__(self, seconds, run):
            late.append(run)
            self.start = self.cancel = lambda: None

    monkeypatch.setattr(_plan.threading, "Timer", TooLate)
    with _plan._progress():
        pass
    late[0]()
    assert capsys.readouterr().err == ""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_7b_decoder_fits_80_gb_and_the_step_has_a_price(capsys):
    run_plan(PlanArguments(device_bytes="80GB", preset="llama-7b", dtype="bfloat16", json=True))
    found = json.loads(capsys.readouterr().out)["smallest"]
    assert found["device_total"] < 72e9 and found["gradients"] < 20
