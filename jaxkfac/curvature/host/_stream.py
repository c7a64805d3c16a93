"""From the device into the average: copies in flight and the thread that takes them in."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkfac.curvature.host._arrivals import Arrival, on_its_way
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._in_flight import InFlight
from jaxkfac.curvature.host._monitor import Monitor
from jaxkfac.curvature.host._threads import Job, Lane


class Stream:
    """One thread that adds what is sent to it, in the order in which it was sent.

    Args:
        limit: Bytes that may be in flight.
        monitor: Of the service.
    """

    def __init__(self, limit: int, monitor: Monitor) -> None:
        self.in_flight = InFlight(limit, monitor)
        self.lane = Lane("jaxkfac-average", 1, monitor)
        self._monitor = monitor

    def send(
        self,
        arrival: Arrival,
        averages: Averages,
        *,
        first: int,
        step: int,
        age: int,
        delete: bool,
    ) -> None:
        """Start a copy as soon as there is room for it, and queue it for the average."""
        self.in_flight.take(arrival.nbytes, arrival.entry.name)
        try:
            value, count = on_its_way(arrival.value), on_its_way(arrival.count)
        except BaseException:
            self.in_flight.give_back(arrival.nbytes)
            raise
        to_delete = arrival.value if delete and isinstance(arrival.value, jax.Array) else None
        kept = arrival._replace(value=None, count=None)
        flight = _Flight(kept, value, count, averages, first, step, age, to_delete)
        self.lane.put(_Landing(flight, self.in_flight, arrival.nbytes))

    def flush(self) -> None:
        """Wait until everything sent so far is in the average."""
        landed: list[bool] = []

        def mark() -> None:
            with self._monitor.changing():
                landed.append(True)

        self.put(mark)
        self._monitor.wait_for(lambda: bool(landed), "pushed factors to reach the average")

    def put(self, job: Job) -> None:
        """Have ``job`` done after everything sent so far and before anything sent later."""
        self.lane.put(job)


@dataclasses.dataclass
class _Flight:
    """A copy on its way."""

    arrival: Arrival
    value: Any
    count: Any
    averages: Averages
    first: int
    step: int
    age: int
    to_delete: Any

    def land(self) -> None:
        value, count = np.asarray(self.value), np.asarray(self.count)
        self.averages.add(self.arrival.entry, value, count, self.first, self.age)


class _Landing:
    """The job that ends a flight: references are dropped before the bytes are given back."""

    def __init__(self, flight: _Flight, in_flight: InFlight, nbytes: int) -> None:
        self._flight: _Flight | None = flight
        self._in_flight, self._nbytes = in_flight, nbytes

    def __call__(self) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            flight.land()
            if flight.to_delete is not None:
                flight.to_delete.delete()
        except BaseException as error:
            error.add_note(
                f"while HostCurvature averaged {flight.arrival.entry.name} of step {flight.step}; "
                "a pushed array must not be donated or deleted before flush()"
            )
            raise
        finally:
            del flight
            self._in_flight.give_back(self._nbytes)
