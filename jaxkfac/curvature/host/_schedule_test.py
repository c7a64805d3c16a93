import json

import pytest

from jaxkfac.curvature.host._options import Schedule


def run(schedule, calls):
    """What happens in calls such as ``"push 3"``; ``bases 0`` of an empty service waits."""
    seen, have = [], False
    for call in calls.split(", "):
        kind, step = call.split()
        actions = (
            push(schedule, int(step))
            if kind == "push"
            else schedule.ask(int(step), have_bases=have)
        )
        for action in actions:
            seen.append(f"{action.kind} {action.refresh.step} at {call}")
            have |= action.kind == "hand over"
    return seen


def push(schedule, step):
    """What is due, then the push itself, in place."""
    yield from schedule.due(step)
    vars(schedule).update(vars(schedule.pushed_to(step)))


def test_a_refresh_is_snapshot_when_its_step_is_over_and_handed_over_at_the_lag():
    calls = ", ".join(f"push {i}, bases {i}" for i in range(10))
    assert run(Schedule(every=4, lag=2, groups=1), calls) == [
        "snapshot 0 at bases 0",  # the first is waited for
        "hand over 0 at bases 0",
        "snapshot 4 at push 5",
        "hand over 4 at bases 6",
        "snapshot 8 at push 9",
    ]


def test_bases_before_push_see_the_same_steps():
    calls = "push 0, " + ", ".join(f"bases {i}, push {i}" for i in range(1, 8))
    assert run(Schedule(every=4, lag=2, groups=1), calls)[2:] == [
        "snapshot 4 at bases 5",
        "hand over 4 at bases 6",
    ]


def test_pushes_between_bases_of_one_step_belong_to_its_refresh():
    schedule = Schedule(every=2, lag=1, groups=1)
    calls = "push 0, bases 0, push 0, push 2, bases 2, push 2, bases 2, push 3, bases 3"
    assert run(schedule, calls)[2:] == ["snapshot 2 at push 3", "hand over 2 at bases 3"]
    assert schedule.age == 3


def test_skipped_steps_refresh_at_the_first_push_after_the_period():
    calls = "push 3, bases 3, push 12, push 13, bases 20, push 21, push 22, bases 30"
    assert run(Schedule(every=5, lag=5, groups=1), calls)[2:] == [
        "snapshot 12 at push 13",
        "hand over 12 at bases 20",
        "snapshot 21 at push 22",
        "hand over 21 at bases 30",
    ]


def test_one_refresh_is_in_work_at_a_time_even_if_nobody_asks():
    calls = ", ".join(f"push {i}" for i in range(6))
    assert run(Schedule(every=2, lag=2, groups=1), calls) == [
        "snapshot 0 at push 1",
        "hand over 0 at push 3",
        "snapshot 2 at push 3",
        "hand over 2 at push 5",
        "snapshot 4 at push 5",
    ]


def test_groups_take_turns_after_a_first_refresh_of_all():
    schedule, groups = Schedule(every=2, lag=1, groups=3), []
    for step in range(10):
        for action in push(schedule, step):
            if action.kind == "snapshot":
                groups.append((action.refresh.step, action.refresh.group))
    assert groups == [(0, None), (2, 0), (4, 1), (6, 2), (8, 0)]


def test_without_lag_the_bases_are_those_of_the_step_itself():
    schedule = Schedule(every=2, lag=0, groups=1)
    assert run(schedule, "push 0, bases 0, push 1, bases 1, push 2, bases 2")[2:] == [
        "snapshot 2 at bases 2",
        "hand over 2 at bases 2",
    ]
    with pytest.raises(ValueError, match="push at step 2: with lag=0"):
        list(push(schedule, 2))


def test_an_action_that_fails_is_due_again():
    schedule = Schedule(every=4, lag=2, groups=1)
    list(push(schedule, 0))
    for _ in range(2):
        actions = push(schedule, 1)
        assert next(actions).kind == "snapshot"
        actions.close()
    assert schedule.pushed == 0 and schedule.pending is None


def test_steps_never_go_backwards_and_bases_need_a_push():
    schedule = Schedule(every=4, lag=2, groups=1)
    with pytest.raises(ValueError, match="no factors have been pushed.*initial='identity'"):
        list(schedule.ask(0, have_bases=False))
    assert not list(schedule.ask(0, have_bases=True))
    list(push(schedule, 5))
    for go_back in (schedule.due, lambda step: schedule.ask(step, have_bases=True)):
        with pytest.raises(ValueError, match="at step 4, but step 5 has been seen"):
            list(go_back(4))


def test_a_schedule_survives_json():
    schedule = Schedule(every=4, lag=2, groups=2)
    run(schedule, "push 0, bases 0, push 4, push 5, bases 5")
    assert schedule.pending is not None
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
