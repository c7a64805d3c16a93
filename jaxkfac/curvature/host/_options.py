"""The options of a service, its schedule, and the bytes that follow from the options."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import numpy as np

from jaxkfac._errors import one_of
from jaxkfac.blocks import Factors, Layout, check_decay, layout_of
from jaxkfac.curvature._placement import Placement
from jaxkfac.curvature.host._average import outgrows_single
from jaxkfac.curvature.host._store import Storage
from jaxkfac.linalg.spectral import HostDType, check_clipping

# ---------------- the schedule of refreshes, in step numbers only


class Refresh(NamedTuple):
    """One refresh.

    Attributes:
        step: It includes every push of this step and of earlier ones.
        group: The group of blocks that is decomposed; ``None`` for all.
        age: How many different steps had been pushed by then.
    """

    step: int
    group: int | None
    age: int


class Action(NamedTuple):
    """The next thing to do. The schedule moves on when the next action is requested.

    An action that was interrupted, or was done before the schedule moved on, is issued again.
    """

    kind: Literal["snapshot", "hand over"]
    refresh: Refresh


@dataclasses.dataclass
class Schedule:
    """The steps of a service.

    The first step pushed is a refresh of everything. After it, the first step pushed at least
    ``every`` steps after the last refresh is a refresh; the groups take turns. A refresh is *open*
    while its step may still be pushed to; its snapshot is taken when the step grows. Its bases are
    handed over when bases are requested at ``step + lag`` or later. Only one refresh is in work at
    a time, so a refresh whose bases nobody has requested is handed over before the next snapshot.

    Attributes:
        every: Least number of steps between two refreshes.
        lag: Steps from a refresh to its hand-over.
        groups: How many groups take turns.
        clock: Largest step pushed or requested.
        pushed: Largest step pushed.
        age: How many different steps have been pushed.
        number: How many refreshes have begun.
        last: Step of the last refresh.
        open: A refresh whose step may still be pushed to.
        pending: A refresh that has been snapshot but not handed over.
    """

    every: int
    lag: int
    groups: int
    clock: int | None = None
    pushed: int | None = None
    age: int = 0
    number: int = 0
    last: int | None = None
    open: Refresh | None = None
    pending: Refresh | None = None

    def due(self, step: int) -> Iterator[Action]:
        """The actions before factors of ``step`` are added. Consume all of them.

        Actions stay done if the push fails afterwards; ``step`` then counts as seen.

        Raises:
            ValueError: at once: the step goes backwards, or its bases were taken with ``lag=0``.
        """
        self._check(step, "push")
        if self.lag == 0 and self.last == step and self.open is None:
            raise ValueError(
                f"push at step {step}: with lag=0 its factors have been decomposed already; push "
                "all of a step before asking for its bases, or use lag >= 1"
            )
        over = self.open is not None and step > self.open.step
        return self._snapshot(step) if over else iter(())

    def pushed_to(self, step: int) -> "Schedule":
        """The schedule after factors of ``step`` are added and all due actions are done.

        It is a copy, so that a push changes the schedule by a single assignment.
        """
        age = self.age + (self.pushed is None or step > self.pushed)
        after = dataclasses.replace(self, clock=step, pushed=step, age=age)
        if self.last is None or step >= self.last + self.every:
            group = (self.number - 1) % self.groups if self.number and self.groups > 1 else None
            after.open = Refresh(step, group, age)
            after.last, after.number = step, self.number + 1
        return after

    def ask(self, step: int, *, have_bases: bool) -> Iterator[Action]:
        """The actions before bases of ``step`` are returned. Consume all of them.

        Raises:
            ValueError: the step goes backwards, or there are no bases and no factors to compute
                them from.
        """
        self._check(step, "bases")
        if not have_bases and self.open is None and self.pending is None:
            raise ValueError(
                f"bases at step {step}: no factors have been pushed; push first, or pass "
                "initial='identity', like=stats.factor_shapes(params, batch)"
            )
        at_once = self.lag == 0 or not have_bases
        if self.open is not None and (step > self.open.step or at_once):
            yield from self._snapshot(step)
        if self.pending is not None and (step >= self.pending.step + self.lag or not have_bases):
            yield from self._hand_over()
        self.clock = step

    def _check(self, step: int, what: str) -> None:
        if self.clock is not None and step < self.clock:
            raise ValueError(f"{what} at step {step}, but step {self.clock} has been seen before")

    def _snapshot(self, step: int) -> Iterator[Action]:
        if self.pending is not None:
            yield from self._hand_over()
        assert self.open is not None
        yield Action("snapshot", self.open)
        # One statement without a call, so that no interrupt falls into it: a refresh whose snapshot
        # is taken must not be open to further pushes.
        self.pending, self.open, self.clock = self.open, None, step

    def _hand_over(self) -> Iterator[Action]:
        assert self.pending is not None
        yield Action("hand over", self.pending)
        self.pending = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {
            name: None if refresh is None else list(refresh)
            for name, refresh in (("open", self.open), ("pending", self.pending))
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Schedule":
        """The schedule that :meth:`to_dict` described."""
        refreshes = {
            name: None if values[name] is None else Refresh(*values[name])
            for name in ("open", "pending")
        }
        return cls(**{**values, **refreshes})


# ---------------- options and host memory


Initial = Literal["wait", "identity"]
BasesIn = Literal["device", "host"]
VectorsDtype = Literal["bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The arguments of :class:`HostCurvature`, which explains them, and their defaults."""

    decay: float = 0.95
    refresh_every: int = 50
    lag: int = 5
    max_condition: float = 1e6
    floor: float = 0.0
    placement: Placement = "host"
    initial: Initial = "wait"
    stagger: int = 1
    keep_previous: int = 3
    reuse_tolerance: float | None = None
    storage: Storage = "float32"
    bases_in: BasesIn = "device"
    vectors_dtype: VectorsDtype | None = None
    rank: int | None = None
    dtype: HostDType = "float64"
    workers: int = 1
    in_flight_bytes: int = 1 << 30
    host_bytes: int | None = None
    disk: Path | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_decay(self.decay)
        check_clipping(self.max_condition, self.floor)
        one_of("placement", self.placement, get_args(Placement))
        one_of("initial", self.initial, get_args(Initial))
        one_of("storage", self.storage, get_args(Storage))
        one_of("dtype", self.dtype, get_args(HostDType))
        one_of("bases_in", self.bases_in, get_args(BasesIn))
        one_of("vectors_dtype", self.vectors_dtype, (None, *get_args(VectorsDtype)))
        for name in ("refresh_every", "lag", "stagger", "keep_previous", "workers"):
            if not isinstance(getattr(self, name), SupportsIndex):
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        for name in ("refresh_every", "stagger", "workers", "in_flight_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lag", "keep_previous"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be zero or positive, got {getattr(self, name)}")
        if self.refresh_every % self.stagger:
            raise ValueError(
                f"stagger={self.stagger} must divide refresh_every={self.refresh_every}"
            )
        if self.lag > self.every:
            raise ValueError(
                f"lag={self.lag} is longer than the {self.every} steps between two refreshes "
                f"(refresh_every={self.refresh_every} / stagger={self.stagger}), so bases would "
                "be out of date before they are used; lower lag or raise refresh_every"
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive seconds, got {self.timeout}")
        if self.reuse_tolerance is not None and not 0 <= self.reuse_tolerance < 1:
            raise ValueError(f"reuse_tolerance must be in [0, 1), got {self.reuse_tolerance}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if self.rank is not None and self.reuse_tolerance is not None:
            raise ValueError(
                f"reuse_tolerance={self.reuse_tolerance} keeps whole eigenbases, and "
                f"rank={self.rank} drops eigenvectors: give one of them"
            )
        if self.vectors_dtype is not None and self.reuse_tolerance is not None:
            raise ValueError(
                f"reuse_tolerance={self.reuse_tolerance} bounds the error of orthonormal "
                f"eigenvectors, which vectors_dtype={self.vectors_dtype!r} rounds: give one of them"
            )
        if self.disk is not None and not self.disk.is_dir():
            raise ValueError(f"disk={str(self.disk)!r} is no folder; create it first")
        if self.workers > 1 and os.environ.get("OPENBLAS_NUM_THREADS") != "1":
            # Concurrent calls of a multi-threaded OpenBLAS have been seen to wait for one
            # another forever.
            raise ValueError(
                f"workers={self.workers} needs OPENBLAS_NUM_THREADS=1 in the environment before "
                "Python starts; with one worker each decomposition may use every thread"
            )

    @property
    def every(self) -> int:
        """Steps between two refreshes; with groups, each refresh is of one group."""
        return self.refresh_every // self.stagger


class HostBytes(NamedTuple):
    """Host memory of a service in bytes, by purpose.

    Attributes:
        averages: The running averages. These, the snapshots and the bases in work may be on disk.
        snapshots: Copies of the averages; the first refresh copies all groups.
        bases_in_work: Results until their hand-over.
        workspace: For each worker the mean and, in the dtype of the decomposition, LAPACK's
            workspace; and one matrix that is being folded.
        in_flight: Factors pushed and not yet averaged; an array above the limit goes alone.
        bases: Eigenvectors in use, if they stay on the host.
    """

    averages: int
    snapshots: int
    bases_in_work: int
    workspace: int
    in_flight: int
    bases: int

    @property
    def fixed(self) -> int:
        """Bytes that are always in memory."""
        return self.workspace + self.in_flight

    @property
    def movable(self) -> dict[str, int]:
        """Bytes that may be on disk, by name."""
        by_name = {"averages": self.averages, "snapshots": self.snapshots}
        by_name |= {"bases in work": self.bases_in_work}
        return {**by_name, "bases in use": self.bases} if self.bases else by_name


def service_bytes(like: Factors, options: HostOptions) -> HostBytes:
    """The least host memory that a service needs, from shapes alone.

    If there is more memory, averages may take more; see :func:`widening_bytes`.

    Args:
        like: Factors of one step, or ``stats.factor_shapes(params, batch)``.
        options: Options of the service; ``workers``, ``in_flight_bytes``, ``storage`` and
            ``dtype`` matter.

    Returns:
        Bytes by purpose. ``HostCurvature(like=like, host_bytes=...)`` accepts their
        sum and refuses less.
    """
    return layout_bytes(layout_of(like.layers, like.bias), options, double=is_double(like))


def widening_bytes(like: Factors, options: HostOptions, *, contributions: int) -> int:
    """How much averages grow when float32 sums move to float64, if there is memory.

    They move when they hold more than 256 contributions, with a decay near 1 or many pushes at
    each step; see :class:`Averages`.

    Args:
        like: As for :func:`service_bytes`.
        options: Options of the service; ``storage`` and ``decay`` matter.
        contributions: Contributions to one average at each step.
    """
    single = options.storage == "float32" and not is_double(like)
    grows = single and outgrows_single(options.decay, contributions)
    return service_bytes(like, options).averages if grows else 0


def layout_bytes(layout: Layout, options: HostOptions, *, double: bool) -> HostBytes:
    """:func:`service_bytes` for a layout with factors in float64 (``double``) or float32."""
    entries, itemsize = layout.entries.values(), 8 if double else 4
    # Both triangles with their diagonals are n (n + 1) elements: the vectors and values of a basis.
    full_sizes = {entry: itemsize * (1 + entry.dense) * entry.elements for entry in entries}
    triangles = sum(entry.elements for entry in entries)
    triangles *= 2 if options.storage == "bfloat16" else itemsize
    largest = max((entry.size for entry in entries if entry.dense), default=0)
    of_worker = 4 * itemsize  # the mean, the copy that is overwritten, and two scratch matrices
    if options.dtype == "float64" and not double:
        of_worker = itemsize + 4 * 8  # the mean; a copy, its eigenvectors, two scratch matrices
    in_flight = max(options.in_flight_bytes, *full_sizes.values(), 0)
    bases = sum(size for entry, size in full_sizes.items() if entry.dense)
    eigenvector_bytes = sum(
        size * min(options.rank or entry.size, entry.size) // entry.size
        for entry, size in full_sizes.items()
        if entry.dense
    )
    share = itemsize // 2 if options.vectors_dtype == "bfloat16" else 1
    return HostBytes(
        averages=triangles,
        snapshots=triangles,
        bases_in_work=bases,
        workspace=(options.workers * of_worker + itemsize) * largest**2,
        in_flight=min(in_flight, sum(full_sizes.values())),
        bases=eigenvector_bytes // share if options.bases_in == "host" else 0,
    )


def is_double(factors: Factors) -> bool:
    """Whether any array is float64."""
    return any(x.dtype == np.float64 for x in jax.tree.leaves(factors))
