"""The service: factors in, eigenbases out, and the threads between."""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import jax
from jaxtyping import DTypeLike

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._layout import factors_without_arrays, layout_of
from jaxkfac.curvature._placement import Placement
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._decompose import Decomposer
from jaxkfac.curvature.host._options import (
    Action,
    BasesIn,
    HostOptions,
    Initial,
    Schedule,
    VectorsDtype,
    is_double,
)
from jaxkfac.curvature.host._push import Push, as_step
from jaxkfac.curvature.host._refresh import ActiveBases
from jaxkfac.curvature.host._state import FORM, MACHINE, State, restore_state, save_state
from jaxkfac.curvature.host._store import Storage, Store
from jaxkfac.curvature.host._threads import Monitor, Workers, call_in_time
from jaxkfac.factors import Factors, check_same_layers, with_origin
from jaxkfac.files import Archive
from jaxkfac.linalg import host_dtype
from jaxkfac.memory import ByteSize, parse_bytes

_SIZES = ("in_flight_bytes", "host_bytes")


class HostCurvature:
    r"""Averages factors in host memory and decomposes them there while training goes on.

    One thread adds pushed factors to :func:`jaxkfac.update_average`'s running average, in the
    order of the pushes; workers decompose snapshots of it. Which bases a step gets depends on
    step numbers only, never on how fast anything ran, so that a run is bitwise reproducible:

    - The first step pushed is a *refresh*, and after it the first step pushed at least
      ``refresh_every`` steps later. A refresh at step $s$ sees every push of a step
      $\le s$; it begins once the step grows, because until then more pushes may come.
    - Its bases are used from step $s$ + ``lag`` on. Only a step that asks for them then
      waits, if they are not ready.
    - Before the first hand-over :meth:`bases` waits for the first refresh, of what has been
      pushed by then; or it gives identities, with ``initial="identity"``.

    A contribution that is not finite is left out of the average with its count
    (``left_out``). So is one whose sum with the average is not, and that average begins anew. A
    factor to which nothing has been added since its last refresh for these reasons, or whose
    decomposition is not finite, keeps its previous basis for
    at most ``keep_previous`` refreshes, with a ``RuntimeWarning`` each time; then
    :meth:`bases` raises. An exception in a thread is raised by the next call. A forked process has
    none of the threads: every call there raises at once.

    Factors may lie on the devices of several processes (``jax.distributed``). Each process has a
    service with the same arguments and makes the same calls in the same order. Each averages all
    factors, decomposes its share of the matrices, and has the results of the others at the
    hand-over.

    Args:
        decay: $\beta \in [0, 1)$ of the average, once for each step that is pushed.
        refresh_every: Steps between two refreshes.
        lag: Steps from a refresh to its use, at most ``refresh_every / stagger``.
        max_condition: Clipping on read, as in :func:`jaxkfac.eigendecompose`.
        floor: Clipping on read.
        placement: Where matrices are decomposed: ``"host"``; ``"device"``, with the host where
            it has no room; or ``"auto"``: on an accelerator the faster of the two for each
            size, measured once, and the host where the workspace does not fit in half of what
            is free. What is measured may differ from run to run; a saved service keeps it.
        initial: ``"wait"`` or ``"identity"``, which needs ``like``.
        like: Factors or ``stats.factor_shapes(params, batch)``, so that other factors and a
            budget that is too small are refused before the first push. The bases have its
            ``origin``; without it, that of the first push.
        stagger: Into how many groups layers are divided, each refreshed in its turn: every
            ``refresh_every / stagger`` steps one. The first refresh is of all.
        keep_previous: See above.
        reuse_tolerance: $\tau$: old eigenvectors are kept, with new eigenvalues, where the
            off-diagonal part of $Q^\top M Q$ is at most $\tau \lVert M \rVert_F$; ``None``
            always decomposes.
        storage: ``"bfloat16"`` stores averages in half of the bytes, with arithmetic in the
            dtype of the factors; each element is then off by at most $2^{-8} / (1 - \beta)$
            of the largest sum.
        bases_in: ``"host"`` keeps eigenvectors in host memory, as NumPy arrays:
            :func:`jaxkfac.natural_gradient` and :func:`jaxkfac.scale_by_bases`, called outside
            of ``jit``, then send one layer's at a time to the device, of a scanned layer one
            iteration's. All of them cross at every step. As arguments of a function under
            ``jit`` they all go to the device at once.
        vectors_dtype: ``"bfloat16"`` keeps eigenvectors in half of the bytes; each element is
            off by at most $2^{-9}$ of itself, and the arithmetic stays in the factors' dtype. The
            natural gradient is off by more, since the vectors are no longer quite orthogonal
            and it divides by small eigenvalues: 2 % in a small net with a damping of 1e-2.
        rank: Keep the eigenvectors of so many largest eigenvalues of each factor, and for all
            other directions the mean of the other eigenvalues; ``rank_errors`` says what that
            is off by. Measured eigenvalues (:func:`jaxkfac.correct_eigenvalues`) need all, and
            capacity metrics are those of the spectrum with that mean.
        dtype: In which the host decomposes, as in :func:`jaxkfac.eigendecompose`; the bases have
            the dtype of the factors.
        workers: Threads that decompose. More than one need ``OPENBLAS_NUM_THREADS=1``.
        in_flight_bytes: Bytes of factors pushed and not yet in the average, a number or
            ``"1GiB"``; :meth:`push` waits for room. A larger factor goes alone.
        host_bytes: Host memory, likewise, for averages, snapshots, bases that wait for their
            hand-over, workspace and copies in flight; ``None`` is no limit. It must hold the
            first refresh, which is of all layers whatever ``stagger`` is.
        disk: Folder of memory-mapped files for what is beyond ``host_bytes``.
        timeout: Seconds after which any wait gives up.

    Raises:
        ValueError: an argument is out of range, or ``host_bytes`` is too small for ``like``.

    Memory:
        On the host, with $F$ the bytes of the folded factors (half of the whole ones):
        $2 F$ for average and snapshot ($3 F$ once an average is worth more than 256 pushes, of
        one step or with a decay near 1: it goes on in float64, so that 200,000 keep 1e-5),
        bases in use (on the CPU) and those in work,
        ``workers * 36 n**2`` bytes (``16 n**2`` with ``dtype="float32"``) and the bytes in
        flight. With ``bases_in="host"`` the eigenvectors in use are there too, and on the device
        those of two blocks of one layer. Those in work are a share of ``1 / stagger``, but in the
        first refresh all: none are in use then, unless there are identities. With
        ``reuse_tolerance`` on an accelerator a host copy of the old eigenvectors of what is
        decomposed, a stack at a time. On the device: the bases; at a hand-over one factor's more,
        unless the caller holds the bases of before (``del bases`` first).
        ``OPENBLAS_NUM_THREADS`` must be the same in two runs for equal bits.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> with jk.HostCurvature(decay=0.9, refresh_every=2, lag=1) as service:
        ...     for step in range(4):
        ...         value, grads, factors = stats(params, batch)
        ...         service.push(factors, step)
        ...         bases = service.bases(step)
        >>> print(bases["kernel"].a_values.round(3))
        [0.333 0.333 0.333]
    """

    def __init__(
        self,
        *,
        decay: float = HostOptions.decay,
        refresh_every: int = HostOptions.refresh_every,
        lag: int = HostOptions.lag,
        max_condition: float = HostOptions.max_condition,
        floor: float = HostOptions.floor,
        placement: Placement = HostOptions.placement,
        initial: Initial = HostOptions.initial,
        like: Factors | None = None,
        stagger: int = HostOptions.stagger,
        keep_previous: int = HostOptions.keep_previous,
        reuse_tolerance: float | None = HostOptions.reuse_tolerance,
        storage: Storage = HostOptions.storage,
        bases_in: BasesIn = HostOptions.bases_in,
        vectors_dtype: VectorsDtype | None = HostOptions.vectors_dtype,
        rank: int | None = HostOptions.rank,
        dtype: DTypeLike = HostOptions.dtype,
        workers: int = HostOptions.workers,
        in_flight_bytes: ByteSize = HostOptions.in_flight_bytes,
        host_bytes: ByteSize | None = HostOptions.host_bytes,
        disk: str | Path | None = HostOptions.disk,
        timeout: float = HostOptions.timeout,
    ) -> None:
        options = HostOptions(
            decay=decay,
            refresh_every=refresh_every,
            lag=lag,
            max_condition=max_condition,
            floor=floor,
            placement=placement,
            initial=initial,
            stagger=stagger,
            keep_previous=keep_previous,
            reuse_tolerance=reuse_tolerance,
            storage=storage,
            bases_in=bases_in,
            vectors_dtype=vectors_dtype,
            rank=rank,
            dtype=host_dtype(dtype),
            workers=workers,
            **_sizes(in_flight_bytes=in_flight_bytes, host_bytes=host_bytes),
            disk=None if disk is None else Path(disk),
            timeout=timeout,
        )
        if initial == "identity" and like is None:
            raise ValueError(
                "initial='identity' needs like=stats.factor_shapes(params, batch): the layers "
                "are not known before the first push"
            )
        self._start(options, Schedule(options.every, options.lag, options.stagger), like)
        if like is not None and initial == "identity":
            self._state.active.take_identities(like)

    def _start(self, options: HostOptions, schedule: Schedule, like: Factors | None) -> None:
        monitor = Monitor(options.timeout)
        store = Store(options.host_bytes, options.disk)
        self._state = State(
            options,
            monitor,
            schedule,
            store,
            ActiveBases(
                options.max_condition,
                options.floor,
                options.keep_previous,
                options.bases_in,
                options.vectors_dtype,
                options.rank,
                store=store,
            ),
            Decomposer(options.placement, options.reuse_tolerance, options.dtype),
        )
        if like is not None:
            self._state.use_layout(layout_of(like.layers, like.bias), double=is_double(like))
            self._state.complete, self._state.origin = True, like.origin
        self._push: Push | None = None  # the last one, until its call returns
        self._lock = threading.RLock()  # one call at a time, from whichever thread
        self._monitor = monitor
        limit = options.in_flight_bytes
        self._averaging = Workers("jaxkfac-average", 1, monitor, limit)  # in order, so one
        self._workers = Workers("jaxkfac-eigh", options.workers, monitor)
        # The threads hold none of this object, so that it can be collected while they run.
        weakref.finalize(self, monitor.close)

    @contextlib.contextmanager
    def _one_call(self, doing: str) -> Iterator[None]:
        # First: another thread may have held the lock when this process was forked.
        self._monitor.check_process(doing)
        with self._lock:
            self._monitor.check(doing)
            if self._push is not None:
                self._push.send()  # what an exception has interrupted
            yield

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HostCurvature stays in the process that made it: its threads cannot be sent to "
            "another one; save() it and load() it there"
        )

    # ------------------------------------------------------------ in

    def push(
        self,
        factors: Factors,
        step: SupportsIndex,
        *,
        first_iteration: int = 0,
        donate: bool = False,
    ) -> None:
        """Add factors to the average; returns as soon as their copies have been dispatched.

        A push counts whole or not at all, whatever exception ends it, ``KeyboardInterrupt`` among
        them, and pushing the same arrays at the same step again counts them once. Where the
        exception came after the factors had been taken, the next call to the service completes
        the push. The step has been seen either way. If a copy fails of factors that are
        larger than ``in_flight_bytes``, some of which are averaged by then, the service ends with
        that error instead.

        Several pushes of one step are added up by count: micro-batches, or parts of one batch.
        A part is ``Factors`` of some of the layers, or whose dictionaries hold some of the
        arrays, each with its own count (``a_counts``, ``terms``), and of a stacked array perhaps
        only the iterations from ``first_iteration`` on. Until the first refresh, and without
        ``like``, a part may bring layers that no push had before.

        Args:
            factors: Arrays of JAX, or of NumPy (copied if they can be written to).
            step: A step number; it may stay or grow, never shrink. The average decays once
                for each different step that is pushed.
            first_iteration: Where arrays begin that hold fewer iterations than their stack.
            donate: Delete the JAX arrays of sums as soon as they have been averaged. By default
                only references are dropped: the buffers go when the caller's do.

        Raises:
            ValueError: factors of other layers or shapes; traced or deleted arrays; a step
                that is smaller than one seen before.
            RuntimeError: the service is closed, or was made before this process was forked.
            TimeoutError: there was no room for longer than ``timeout``.
            TypeError: ``factors`` are none.
        """
        if not isinstance(factors, Factors):
            raise TypeError(
                f"push takes the Factors that value_grad_and_factors returned, got "
                f"{type(factors).__name__}"
            )
        step = as_step(step)
        with self._one_call("push"):
            sent = self._push is not None and self._push.is_of(factors, step, first_iteration)
            if not sent:  # else the call before was interrupted, and this one has completed it
                self._new_push(factors, step, first_iteration, donate)
        # Nothing can interrupt between this and the return: from here on the same push is another.
        self._push = None

    def _new_push(self, factors: Factors, step: int, first_iteration: int, donate: bool) -> None:
        state = self._state
        due = state.schedule.due(step)
        push = Push(state, self._averaging, factors, step, first_iteration, donate)
        try:
            push.prepare()
            for action in due:
                self._do(action)
            push.after(state.schedule)
            self._push = push  # before this line the factors never were; after it they count
        except BaseException:
            if self._push is not push:
                push.withdraw()
            raise
        push.send()

    @contextlib.contextmanager
    def room(self, factors: Factors | ByteSize) -> Iterator[None]:
        """Take bytes in flight before factors are dispatched rather than when they are pushed.

        JAX allocates an output when its computation is enqueued, so a loop that runs ahead
        holds the factors of several steps. In ``with service.room(like): ...`` the block is
        entered when the factors fit in ``in_flight_bytes``; pushes in it, from this thread,
        use what was taken, and the rest is given back.

        Args:
            factors: Factors, their shapes, or a number of bytes.
        """
        if isinstance(factors, Factors):
            tables = (factors.a_sums, factors.g_sums, factors.diagonals)
            leaves = jax.tree.leaves(tables)
            factors = sum(x.size * x.dtype.itemsize for x in leaves)
        self._monitor.check_process("room")
        with self._averaging.room(parse_bytes(factors, name="factors")):
            yield

    def flush(self) -> None:
        """Wait until everything pushed is in the average, and its arrays are let go of."""
        with self._one_call("flush"):
            averaging = self._averaging
            self._monitor.wait_for(lambda: averaging.idle, "pushed factors to reach the average")

    # ------------------------------------------------------------ out

    def bases(self, step: SupportsIndex) -> Eigenbases:
        """The bases of ``step``; the same object from one hand-over to the next.

        Args:
            step: A step number; it may stay or grow, never shrink.

        Returns:
            Bases whose arrays live where the factors did, for
            :func:`jaxkfac.natural_gradient` and :func:`jaxkfac.scale_by_bases`.

        Raises:
            ValueError: nothing has been pushed, a layer has never been, or the step goes
                backwards.
            NonFiniteFactorError: naming the layer, see the class.
            RuntimeError: the service is closed.
            TimeoutError: a decomposition, or another process, took longer than ``timeout``.
            ProcessesDisagreeError: another process failed, or has other factors, options or steps.
        """
        step = as_step(step)
        with self._one_call("bases"):
            state = self._state
            for action in state.schedule.ask(step, have_bases=bool(state.active.tables)):
                self._do(action)
            assert state.layout is not None
            return state.active.bases(state.layout, state.origin)

    def _do(self, action: Action) -> None:
        state, refresh = self._state, action.refresh
        # Each may have been done before, if an exception kept the schedule from moving on.
        if action.kind == "snapshot":
            assert state.averages is not None
            if state.work is None:
                state.work = state.new_work(refresh.group)
            beginning = state.work.beginning(state.averages, refresh.age, self._workers)
            self._averaging.put(beginning)
            return
        if state.work is None:
            return
        self._finish_work()
        assert state.layout is not None
        state.active.hand_over(
            state.work.results, state.work.failures, state.shardings, state.layout
        )
        state.work = None

    def _finish_work(self) -> None:
        work, pending = self._state.work, self._state.schedule.pending
        if work is None or pending is None:
            return
        what = f"the decomposition of the refresh at step {pending.step}"
        error = None
        try:
            self._monitor.wait_for(lambda: work.done, what)
        except BaseException as failure:
            if not work.shares:
                raise
            error = failure
        if work.shares:
            exchange = functools.partial(work.exchange, what, self._state.about(pending), error)
            call_in_time(exchange, self._monitor.timeout, f"the other processes, after {what}")

    def average(self) -> Factors:
        """The running average as :class:`Factors` of NumPy arrays, whole matrices.

        Its means are those that a refresh would decompose now. ``terms`` is the largest number of
        loss terms of a layer; sums over fewer, because contributions were left out or did not
        hold the layer, are scaled to it.

        Raises:
            ValueError: nothing has been pushed, or nothing finite for a layer, by name.
        """
        with self._one_call("average"):
            self.flush()
            if self._state.averages is None or not self._state.averages.running:
                raise ValueError("average: no factors have been pushed")
            found = self._state.averages.factors(self._state.schedule.age)
            return with_origin(found, self._state.origin)

    @property
    def left_out(self) -> dict[str, int]:
        """``{factor: number of contributions left out}``: not finite, or too much for the sum."""
        averages: Averages | None = self._state.averages
        return {} if averages is None else dict(averages.left_out)

    @property
    def kept(self) -> dict[str, int]:
        """``{factor: refreshes in a row for which its previous basis has been kept}``."""
        return dict(self._state.active.kept)

    @property
    def rank_errors(self) -> dict[str, float]:
        r"""``{factor: error}`` of ``rank``, $\lVert M - M_r \rVert_F / \lVert M \rVert_F$."""
        return dict(self._state.active.rank_errors)

    @property
    def placements(self) -> dict[str, str]:
        """``{"size/dtype": "device" or "host"}``, what ``placement="auto"`` has chosen."""
        return dict(self._state.decomposer.chosen)

    # ------------------------------------------------------------ saving, ending

    def save(self, path: str | Path) -> None:
        """Write everything to one file; a run that goes on from it is bitwise the same.

        Waits for what is in flight and for a decomposition in work. Where several processes share
        one, each calls this, and the files are the same. The file is written under
        another name first, so that it is whole or not there, and has a checksum of every array
        and of itself.

        Raises:
            OSError: the disk is full, with the room that is needed, or ``path`` cannot be
                written to; an older file is as it was.
        """
        with self._one_call("save"):
            self.flush()
            self._finish_work()
            save_state(self._state, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, *, like: Factors | None = None, **machine: Any
    ) -> "HostCurvature":
        """A service that goes on where the saved one was.

        Args:
            path: What :meth:`save` wrote.
            like: Factors or their shapes, to refuse a service of another model at once.
            machine: ``workers``, ``in_flight_bytes``, ``host_bytes``, ``disk``, ``timeout``;
                these are not saved. The other arguments are.

        Raises:
            DamagedFileError: a byte of the file is not what was written; the array is named.
            ValueError: the file is no saved service, or the budget is too small for it.
            CheckpointMismatchError: it is of other layers than ``like``.
            TypeError: another argument is given.
        """
        unknown = sorted(set(machine) - set(MACHINE))
        if unknown:
            raise TypeError(f"load takes {', '.join(MACHINE)}, got {', '.join(unknown)}")
        if machine.get("disk") is not None:
            machine["disk"] = Path(machine["disk"])
        machine |= _sizes(**{name: machine[name] for name in _SIZES if name in machine})
        with Archive(Path(path), FORM, "saved service") as saved:
            # Files of before there was a choice go on as they were made.
            options = HostOptions(**({"dtype": "float32"} | saved.about["options"]), **machine)
            service = cls.__new__(cls)
            service._start(options, Schedule.from_dict(saved.about["schedule"]), None)
            try:
                restore_state(service._state, saved)
                service._check_model(like, path)
            except BaseException:
                service.close()
                raise
        return service

    def _check_model(self, like: Factors | None, path: str | Path) -> None:
        layout = self._state.layout
        if like is not None and layout is not None:
            try:
                check_same_layers(like, factors_without_arrays(layout.layers, layout.bias))
            except ValueError as error:
                raise CheckpointMismatchError(f"{path} is of another model: {error}") from error

    def close(self) -> None:
        """End the threads; what has not been decomposed is dropped. May be called twice.

        Raises:
            TimeoutError: a thread did not end within ``timeout``.
            BaseException: what a thread has failed with, if no call has raised it yet.
        """
        self._monitor.close()
        deadline = time.monotonic() + self._monitor.timeout
        running = [*self._averaging.join(deadline), *self._workers.join(deadline)]
        if running:
            raise TimeoutError(
                f"close waited {self._monitor.timeout:g} s and {', '.join(running)} still runs"
            )
        error = self._monitor.untold()
        if error is not None:
            raise error

    def __enter__(self) -> "HostCurvature":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the error on its way says more
            self.close()


def _sizes(**sizes: ByteSize | None) -> dict[str, Any]:
    """Arguments that are sizes, in bytes."""
    return {k: None if size is None else parse_bytes(size, name=k) for k, size in sizes.items()}
