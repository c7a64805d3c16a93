"""Analyses that Ctrl-C or SIGKILL stops go on to the bits of one that nobody stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxkfac.jobs.cli.analysis import _decompose, _gather, _stages
from jaxkfac.jobs.cli.analysis._files import Folder
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel
from jaxkfac.jobs.cli.analysis._run_test import found
from jaxkfac.jobs.cli.analysis._texts import Texts

WORDS = ("--checkpoint-every", "9", "--lanczos", "1", "--lanczos-steps", "3")
# Where Ctrl-C comes: what is called, for which time, and what is there then.
MOMENTS = {
    "a batch": (_gather, "_add", 1, "factors/pass-0"),
    "the last batch": (_gather, "_add", 2, "factors/pass-0.json"),
    "Lanczos": (_decompose, "_dot", 5, "lanczos/state.json"),
    "decompose": (_decompose, "_values", 2, "spectra"),
}


@pytest.fixture(scope="module")
def whole(model, texts, tmp_path_factory):
    """What an analysis finds that nobody stops."""
    from jaxkfac.jobs.cli import main

    output = tmp_path_factory.mktemp("whole")
    fixed = ("--data", str(texts), "--max-length", "16", "--batch-size", "4")
    assert main(["analyze", str(model), *fixed, "--output", str(output), *WORDS]) == 0
    return found(output)


STOPS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}
STOPS[signal.SIGHUP] = "stopped by SIGHUP"
USUAL = "the last batch", signal.SIGINT
OTHERS = [(moment, stop) for moment in MOMENTS for stop in STOPS if (moment, stop) != USUAL]


@pytest.fixture
def unheld():
    """SIGTERM and SIGHUP as a process has them that nobody started with ``nohup``."""
    numbers = [number for number in STOPS if number != signal.SIGINT]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("unheld")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("moment", "stop"),
    [USUAL, *(pytest.param(*other, marks=pytest.mark.exhaustive) for other in OTHERS)],
)
def test_a_signal_is_answered_with_the_command_that_goes_on(
    analyze, whole, monkeypatch, tmp_path, capsys, moment, stop
):
    module, name, number, kept = MOMENTS[moment]
    original, calls = getattr(module, name), []

    def pressed(*args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            os.kill(os.getpid(), stop)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, pressed)
        assert analyze(*WORDS) == 128 + stop
    said = capsys.readouterr().err
    assert f"{STOPS[stop]}; continue with: jaxkfac analyze" in said and "--resume" in said
    assert "Traceback" not in said
    if module is _gather:
        assert "the batch under way is ended and kept, then stopping" in said
    assert (tmp_path / "out" / kept).exists()
    assert not (tmp_path / "out" / "metrics.json").exists()
    assert analyze(*WORDS, "--resume") == 0
    assert found(tmp_path / "out") == whole


def test_ctrl_c_before_the_old_analysis_is_gone_is_answered_with_the_same_command(
    analyze, monkeypatch, tmp_path, capsys
):
    old = tmp_path / "out" / "analysis.json"
    old.parent.mkdir()
    old.write_text("{}")

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_stages, "read_texts", pressed)
    assert analyze("--overwrite") == 130
    said = capsys.readouterr().err
    assert "start with: jaxkfac analyze" in said and said.endswith("--overwrite\n")
    assert "--resume" not in said and old.read_text() == "{}"


def test_a_kill_at_the_end_of_a_pass_does_not_repeat_it(tmp_path, monkeypatch):
    folder, passes = Folder(tmp_path), []
    sums = tmp_path / "factors" / "pass-0"
    sums.parent.mkdir()
    sums.touch()
    analysis = AnalyzedModel.__new__(AnalyzedModel)  # of one pass, which is not run here
    analysis.passes = (None,)
    texts = Texts([], [], 0, 0, 0, "")

    def gather():
        return _gather.gather(analysis, None, texts, folder, every=1, advance=lambda *_: None)

    def one_pass(*_):
        passes.append(None)
        return {"loss": 1.0, "terms": 2.0}

    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(_gather, "_one_pass", one_pass)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "drop_sums", killed)
        with pytest.raises(SystemExit):
            gather()
    assert gather() == {"loss": 1.0, "terms": 2.0}
    assert len(passes) == 1 and not sums.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "file", ["lanczos/state.json", "factors/pass-0", "factors/pass-0.json", "spectra/*"]
)
def test_a_killed_process_is_gone_on_with_to_the_same_bits(
    model, texts, whole, analyze, tmp_path, file
):
    """Killed as soon as it has written a file."""
    output = tmp_path / "out"
    fixed = ("--data", str(texts), "--max-length", "16", "--batch-size", "4")
    words = (*WORDS, "--checkpoint-every", "1", "--output", str(output))
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxkfac", "analyze", str(model), *fixed, *words],
        env=os.environ | {"JAXKFAC_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not list(output.glob(file)):
        time.sleep(0.001)
    process.kill()
    _, error = process.communicate()
    assert list(output.glob("*")), error.decode()
    assert process.returncode == -signal.SIGKILL, error.decode()
    assert not (output / "metrics.json").exists()
    assert json.loads((output / "analysis.json").read_text())["texts"]
    assert analyze(*WORDS, "--checkpoint-every", "1", "--resume") == 0
    assert found(output) == whole
