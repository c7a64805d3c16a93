"""Bytes that are taken ahead of the jobs that hold them."""

import pytest

from jaxkfac.curvature.host._threads import Monitor, Workers


def test_room_that_a_wait_gave_up_on_is_given_back_whole():
    monitor = Monitor(timeout=0.01)
    workers = Workers("test", 1, monitor, limit=100)
    try:
        workers.take({"other": 60}, "what another thread holds")
        with pytest.raises(TimeoutError), workers.room(40):
            workers.take({"more": 50}, "more than there is")
        assert workers.taken == 60
        workers.give_back("other")
        assert workers.taken == 0
    finally:
        monitor.close()
