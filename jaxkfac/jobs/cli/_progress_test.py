import itertools
import time

import pytest

from jaxkfac.jobs.cli._progress import progress, said_if_slow, time_left, timed


@pytest.mark.parametrize(
    ("seconds", "updates", "expected"),
    [
        (0.42, 1710, "about 12 min left (0.42 s an update, 1710 updates)"),
        (0.0123, 100, "about 1 s left (0.012 s an update, 100 updates)"),
        (1e-5, 10, "about 1 s left (1e-05 s an update, 10 updates)"),
        (89.4, 1, "about 89 s left (89.40 s an update, 1 update)"),
        (12.0, 3000, "about 10.0 h left (12.00 s an update, 3000 updates)"),
    ],
)
def test_the_time_left_is_in_the_unit_that_suits_it(seconds, updates, expected):
    assert time_left(seconds, updates) == expected


def test_a_log_gets_lines_with_news_only(capsys):
    with progress("run", 20) as shown:
        for step in range(1, 21):
            shown.advance(step, f"loss {step}" if step % 5 == 0 else None)
        shown.say("done")
    assert capsys.readouterr().err.splitlines() == [
        "run 0/20  compiling",
        *(f"run {step}/20  loss {step}" for step in (5, 10, 15, 20)),
        "run: done",
    ]


def test_the_time_left_is_said_once_and_not_from_steps_that_were_read(capsys, monkeypatch):
    assert time_left(2.0, 3, "batch") == "about 6 s left (2.00 s a batch, 3 batches)"
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress("gather", 100) as shown:
        advance = timed(shown, 100, "batch")
        for step in (40, 80, *range(81, 101)):  # two passes were done already
            advance(step, None)
    said = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert said == ["gather: about 34 s left (2.00 s a batch, 17 batches)"]


def test_only_a_slow_block_says_what_it_does(capsys):
    with said_if_slow("fast", after=30.0):
        pass
    with said_if_slow("slow", after=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().err == "slow\n"
