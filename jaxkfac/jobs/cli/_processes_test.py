"""The options that start a run in several processes; a run of one process is told nothing."""

import pytest

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._processes import ALONE
from jaxkfac.memory import note_on_cpus


@pytest.mark.default(6, slow=2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--processes", "2"), "--processes needs --coordinator HOST:PORT"),
        (("--process", "0"), "--process needs --coordinator HOST:PORT"),
        (("--coordinator", "auto", "--process", "0"), "--process needs --coordinator HOST:PORT"),
        (("--coordinator", "a:1"), "--coordinator a:1 needs --processes, how many there are"),
        (("--coordinator", "a:1", "--processes", "2", "--process", "2"), "must lie in 0 .. 1"),
        (("--coordinator", "a", "--processes", "2", "--process", "0"), "must be HOST:PORT or auto"),
    ],
)
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_options_that_do_not_go_together_are_refused(command, words, message, capsys, tmp_path):
    assert main([command, "--output", str(tmp_path / "run"), *words]) == 2
    assert message in capsys.readouterr().err


def test_one_process_alone_raises_its_own_errors_and_waits_for_nobody():
    with ALONE.together("loading") as same, ALONE.stopping_together():
        same.append(1)
        ALONE.pause(3)
    assert ALONE.first and not ALONE.several and ALONE.stop_together
    with pytest.raises(OSError, match="full"):
        ALONE.pause(3, OSError("full"))
    with pytest.raises(KeyError), ALONE.together("loading"):
        raise KeyError


@pytest.mark.parametrize(
    ("platform", "threads", "said"),
    [("cpu", None, True), ("cpu", "8", True), ("cpu", "1", False), ("cuda", None, False)],
)
def test_processes_on_cpus_are_told_what_to_do_about_aborts_of_gloo(
    platform, threads, said, monkeypatch
):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if threads:
        monkeypatch.setenv("PJRT_NPROC", threads)
    assert ("set PJRT_NPROC=1" in note_on_cpus(platform)) == said
