import importlib
import os
import signal

import pytest

from jaxkfac.jobs.cli._interrupts import (
    Stopped,
    interrupts_deferred,
    nothing_begun,
    say_interrupted,
    signal_of,
    stopping_signals,
)
from jaxkfac.jobs.cli._main import main


@pytest.fixture(autouse=True)
def usual_handlers():
    """A shell's background job ignores SIGINT, and nohup SIGHUP: these tests do not."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def press_while_deferred(times):
    """Press inside the block, and say on the way out whether the block went on."""
    went_on = False
    try:
        with interrupts_deferred("saving"):
            for _ in range(times):
                press()
            went_on = True
    except KeyboardInterrupt:
        return went_on
    pytest.fail("the interrupt was lost")


def test_the_block_ends_before_the_interrupt_arrives(capsys):
    assert press_while_deferred(1)
    assert "saving, then stopping" in capsys.readouterr().err


def test_an_inner_block_leaves_the_interrupt_to_the_outer_one(capsys):
    seen = []

    def train():
        with interrupts_deferred("training"):
            with interrupts_deferred("compiling"):
                press()
            seen.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        train()
    assert seen
    assert capsys.readouterr().err.count("then stopping") == 1


def test_a_second_press_acts_at_once():
    assert not press_while_deferred(2)


def test_the_handler_before_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred("saving"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_after_a_ctrl_c_resumes_what_has_begun_and_else_is_the_same(capsys):
    words = ["analyze", "a model", "--overwrite"]
    say_interrupted(words, KeyboardInterrupt())
    assert "continue with: jaxkfac analyze 'a model' --resume\n" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt) as found, nothing_begun():
        raise KeyboardInterrupt
    say_interrupted(words, found.value)
    assert "start with: jaxkfac analyze 'a model' --overwrite\n" in capsys.readouterr().err


SIGNALS = pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])


@SIGNALS
def test_other_signals_stop_as_ctrl_c_does_and_are_told_apart(stop, capsys):
    went_on = []

    def twice():
        with interrupts_deferred("saving"):
            press()
            os.kill(os.getpid(), stop)
            went_on.append("after the second")

    def once():
        with interrupts_deferred("saving"):
            os.kill(os.getpid(), stop)
            went_on.append("after the first")

    def looking():
        with interrupts_deferred("saving") as hold:
            os.kill(os.getpid(), stop)
            if hold.pressed:
                raise KeyboardInterrupt

    with stopping_signals():
        with pytest.raises(Stopped) as at_once:
            os.kill(os.getpid(), stop)
        with pytest.raises(Stopped) as deferred:
            once()
        with pytest.raises(Stopped) as second:
            twice()
        with pytest.raises(Stopped) as asked:
            looking()
    assert went_on == ["after the first"]
    found = {signal_of(error.value) for error in (at_once, deferred, second, asked)}
    assert found == {stop} and signal_of(KeyboardInterrupt()) == signal.SIGINT
    name = signal.Signals(stop).name
    assert f"{name}: saving, then stopping; a second signal stops now" in capsys.readouterr().err
    say_interrupted(["train"], deferred.value)
    assert f"stopped by {name}; continue with: jaxkfac train --resume" in capsys.readouterr().err
    assert signal.getsignal(stop) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.default(8)
@pytest.mark.parametrize(
    ("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("train", "_train.check_output"),
        ("finetune", "finetune._run.check_output"),
        ("analyze", "analysis._run.prepare"),
        ("influence", "influence._run._stages"),
    ],
)
def test_the_exit_code_says_which_signal_came(
    command, function, stop, code, tmp_path, monkeypatch, capsys
):
    module, _, name = function.rpartition(".")
    module = importlib.import_module(f"jaxkfac.jobs.cli.{module}")
    monkeypatch.setattr(module, name, lambda *args, **options: os.kill(os.getpid(), stop))
    model, texts = tmp_path / "model", tmp_path / "x.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for file in (model / "model.safetensors", texts):  # paths are checked first
        file.touch()
    words = {
        "analyze": ["smollm2"],
        "influence": [str(model), "--train", str(texts), "--queries", str(texts)],
    }.get(command, [])
    words += ["--output", str(tmp_path / "out")]
    assert main([command, *words]) == code, capsys.readouterr().err
    assert ("SIGTERM" in capsys.readouterr().err) == (stop == signal.SIGTERM)


@pytest.mark.parametrize("room", ["_train", "finetune._run"])
def test_a_run_that_is_stopped_before_it_overwrites_another_is_not_to_be_resumed(
    room, tmp_path, monkeypatch, capsys
):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        importlib.import_module(f"jaxkfac.jobs.cli.{room}"), "check_output", interrupted
    )
    command = room.strip("_").partition(".")[0]
    assert main([command, "--overwrite", "--output", str(tmp_path)]) == 130
    said = f"start with: jaxkfac {command} --overwrite --output {tmp_path}\n"
    assert capsys.readouterr().err.endswith(said)
