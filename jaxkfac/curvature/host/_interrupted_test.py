"""A push counts whole or not at all, whatever ends it, and once however often it is repeated."""

import sys
import threading

import jax
import numpy as np
import pytest

from jaxkfac.blocks._random_factors_test import random_factors
from jaxkfac.curvature.host import _average, _push
from jaxkfac.curvature.host._service_test import LAYERS, same, service, threads, until

TOGETHER, ONE_BY_ONE = (
    1 << 20,
    8,
)  # bytes in flight: all copies of a push fit, or none beside another
NUM_COPIES = 16  # sums and counts of eight arrays


@pytest.fixture(scope="module")
def factors():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(4)]


def train(factors, in_flight, *, interrupted=lambda push: push(), without=None):
    """Averages and bases of four steps; the push of step 2 goes through ``interrupted``."""
    with service(refresh_every=1, lag=1, in_flight_bytes=in_flight) as running:
        for step, each in enumerate(factors):
            if step == 2:
                interrupted(lambda each=each: running.push(each, 2))
            elif step != without:
                running.push(each, step)
            if step != 2:  # where it is not pushed, bases are asked for at other steps only
                bases = running.bases(step)
        running.flush()
        assert running._averaging.taken == 0
        return running.average(), bases, running._state.schedule.to_dict()


def equal(one, other):
    return all(same(a, b) for a, b in zip(one[:2], other[:2])) and one[2] == other[2]


@pytest.fixture(scope="module")
def whole(factors):
    return train(factors, TOGETHER)


@pytest.fixture(scope="module")
def never(factors):
    return train(factors, TOGETHER, interrupted=lambda push: None)


def failing_copy(monkeypatch, number, error):
    """The copy of this number fails, once; the others are made."""
    calls, start = [], _push.start_copy

    def copy(x):
        calls.append(x)
        if len(calls) == number + 1:
            raise error
        return start(x)

    monkeypatch.setattr(_push, "start_copy", copy)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_flight", [TOGETHER, ONE_BY_ONE])
@pytest.mark.parametrize("again", [True, False])
def test_a_push_interrupted_at_any_copy_counts_once_or_never(
    factors, whole, never, monkeypatch, in_flight, again
):
    outcomes = set()
    for number in range(NUM_COPIES):

        def interrupted(push, number=number):
            with monkeypatch.context() as patch:
                failing_copy(patch, number, KeyboardInterrupt)
                with pytest.raises(KeyboardInterrupt):
                    push()
            if again:
                push()

        found = train(factors, in_flight, interrupted=interrupted)
        outcomes.add((equal(found, whole), equal(found, never)))
    # Copies that fit together are all made before the push counts; else the first decides.
    undone = set() if again else {(False, True)}
    late = in_flight == ONE_BY_ONE
    assert outcomes == undone | ({(True, False)} if again or late else set())


@pytest.mark.exhaustive
def test_a_push_interrupted_before_any_of_its_lines_counts_once(factors, whole, never):
    outcomes = _outcomes(factors, whole, never, stride=17)
    assert {"whole", "never", "again"} <= outcomes and "neither" not in outcomes


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_flight, stride", [(TOGETHER, 1), (ONE_BY_ONE, 5)])
def test_a_push_interrupted_before_every_line_counts_once(factors, whole, never, in_flight, stride):
    outcomes = _outcomes(factors, whole, never, in_flight=in_flight, stride=stride)
    assert outcomes == {"whole", "never", "again"}


def _outcomes(factors, whole, never, *, in_flight=TOGETHER, stride=1):
    """What became of a push that was interrupted before its line 0, stride, 2 · stride, ..."""
    found = set()
    for again in (False, True):
        line, reached = 0, True
        while reached:
            at = Interrupt(line)

            def interrupted(push, at=at, again=again):
                try:
                    with at:
                        push()
                except KeyboardInterrupt:
                    if again:
                        push()

            result = train(factors, in_flight, interrupted=interrupted)
            reached = at.reached
            if again:
                found.add("again" if equal(result, whole) else "neither")
            elif equal(result, whole):
                found.add("whole")
            else:
                found.add("never" if equal(result, never) else "neither")
            assert "neither" not in found, (again, line, at.where)
            line += stride
    return found


class Interrupt:
    """Raises ``KeyboardInterrupt`` before a line of this package, by the number of lines run."""

    def __init__(self, line):
        self.left, self.reached, self.where = line, False, ""

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if "/curvature/host/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if frame.f_code.co_filename == __file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.reached = True
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                frame.f_trace = None
                raise KeyboardInterrupt
        return self._trace


def test_a_copy_that_fails_leaves_the_step_undone(factors, whole, monkeypatch):
    def interrupted(push):
        with monkeypatch.context() as patch:
            failing_copy(patch, 5, MemoryError("no room on the host"))
            with pytest.raises(MemoryError, match="no room"):
                push()
        push()

    assert equal(train(factors, TOGETHER, interrupted=interrupted), whole)


def test_a_late_copy_of_a_large_push_that_fails_ends_the_service(factors, monkeypatch):
    failing_copy(monkeypatch, 5, MemoryError("no room on the host"))
    running = service(in_flight_bytes=ONE_BY_ONE)
    for call in (lambda: running.push(factors[0], 0), running.flush, lambda: running.bases(0)):
        with pytest.raises(MemoryError, match="no room"):
            call()
    running.close()
    until(lambda: not threads())


@pytest.mark.parametrize("in_flight", [1000, ONE_BY_ONE])
def test_a_push_that_times_out_for_want_of_room_counts_once(factors, monkeypatch, in_flight):
    gate, advance = threading.Event(), _average._advance

    def blocked(*args):
        assert gate.wait(60)
        advance(*args)

    with service() as running:
        running.push(factors[0], 0)
        running.push(factors[1], 0)
        expected = running.average()
    monkeypatch.setattr(_average, "_advance", blocked)
    with service(in_flight_bytes=in_flight, timeout=0.2) as running:
        if in_flight == ONE_BY_ONE:
            with pytest.raises(TimeoutError, match=r"room for .* limit 8") as caught:
                running.push(factors[0], 0)
            (note,) = caught.value.__notes__
            assert note.startswith("1 of the 8 arrays of the push at step 0 have been sent")
        else:
            running.push(factors[0], 0)
            with pytest.raises(TimeoutError, match="and 7 more"):
                running.push(factors[1], 0)
        gate.set()
        running.flush()
        running.push(factors[0 if in_flight == ONE_BY_ONE else 1], 0)
        if in_flight == ONE_BY_ONE:
            running.push(factors[1], 0)
        assert same(running.average(), expected)


def test_numpy_arrays_that_were_pushed_may_be_pushed_again(factors):
    """Only an interrupted push is recognized: equal arrays are otherwise another micro-batch."""
    with service() as running:
        for _ in range(2):
            running.push(factors[0], 0)
        assert np.array_equal(running.average().terms, 2 * factors[0].terms)


def test_the_end_of_a_push_does_not_forget_that_of_another_thread(factors, monkeypatch):
    """The second push begins where the first has left the lock but not yet returned."""
    gate, advance = threading.Event(), _average._advance
    gate.set()

    def blocked(*args):
        assert gate.wait(60)
        advance(*args)

    with service() as running:
        running.push(factors[0], 0)
        running.push(factors[1], 0)
        expected = running.average()
    monkeypatch.setattr(_average, "_advance", blocked)
    with service(in_flight_bytes=ONE_BY_ONE, timeout=0.5) as running:
        errors = []

        def second():
            try:
                running.push(factors[1], 0)
            except TimeoutError as error:
                errors.append(error)

        def between():
            until(lambda: running._averaging.idle)
            gate.clear()
            other = threading.Thread(target=second)
            other.start()
            other.join()

        running._lock = AfterFirst(running._lock, between)
        running.push(factors[0], 0)
        assert errors and "1 of the 8 arrays" in errors[0].__notes__[0]
        gate.set()
        running.flush()
        assert same(running.average(), expected)


class AfterFirst:
    """A lock that calls a function once, after it has been released for the first time."""

    def __init__(self, lock, call):
        self.lock, self.calls = lock, [call]

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        if self.calls:
            self.calls.pop()()
