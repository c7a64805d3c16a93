"""The service that takes factors and returns eigenbases, with its threads."""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

from jaxtyping import DTypeLike

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.blocks import (
    Factors,
    check_same_layers,
    layout_of,
    with_origin,
)
from jaxkfac.curvature._eigenbases import Eigenbases
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
from jaxkfac.files import Archive
from jaxkfac.linalg.spectral import host_dtype
from jaxkfac.memory import ByteSize, parse_bytes

_SIZES = ("in_flight_bytes", "host_bytes")


class HostCurvature:
    r"""Average factors in host memory and decompose them there while training goes on.

    One thread adds pushed factors to :func:`jaxkfac.update_average`'s running average, in the
    order of the pushes; workers decompose snapshots of it. Which bases a step gets depends only on
    step numbers, never on how fast anything ran, so a run is bitwise reproducible:

    - The first step pushed is a *refresh*. The next refresh is the first step pushed at least
      ``refresh_every`` steps later, and so on. A refresh at step $s$ includes every push of a step
      $\le s$; it begins once the step grows, because until then more pushes may come.
    - Its bases are used from step $s$ + ``lag`` on. A step that requests them then waits if
      they are not ready; no other step waits.
    - Before the first hand-over, :meth:`bases` waits for the first refresh, of everything pushed
      by then; or it returns identities, with ``initial="identity"``.

    A contribution that is not finite is left out of the average, with its count
    (``left_out``). If its sum with the average is not finite, it is left out too, and that average
    starts again from zero. A factor keeps its previous basis if its decomposition is not finite, or
    if nothing has been added to it since its last refresh for these reasons. It does so for
    at most ``keep_previous`` refreshes, with a ``RuntimeWarning`` each time; then
    :meth:`bases` raises. An exception in a thread is raised by the next call. A forked process has
    none of the threads, so every call there raises at once.

    Factors may lie on the devices of several processes (``jax.distributed``). Each process builds a
    service with the same arguments and makes the same calls in the same order. Each averages all
    factors, decomposes its share of the matrices, and receives the results of the others at the
    hand-over.

    Args:
        decay: $\beta \in [0, 1)$ of the average, applied once for each step that is pushed.
        refresh_every: Steps between two refreshes.
        lag: Steps from a refresh to its use, at most ``refresh_every / stagger``.
        max_condition: Clipping when read, as in :func:`jaxkfac.eigendecompose`.
        floor: Clipping when read.
        placement: Where matrices are decomposed: ``"host"``; ``"device"``, falling back to the host
            if it lacks memory; or ``"auto"``: on an accelerator the faster of the two for each
            size, measured once, and the host if the workspace does not fit in half of the free
            memory. The measured choice may differ from run to run; a saved service keeps it.
        initial: ``"wait"`` or ``"identity"``, which needs ``like``.
        like: Factors or ``stats.factor_shapes(params, batch)``. With it, other factors and a
            budget that is too small are refused before the first push. The bases have its
            ``origin``; without it, that of the first push.
        stagger: Number of groups into which layers are divided. One group is refreshed every
            ``refresh_every / stagger`` steps, in turn. The first refresh covers all groups.
        keep_previous: See above.
        reuse_tolerance: $\tau$: old eigenvectors are kept, with new eigenvalues, if the
            off-diagonal part of $Q^\top M Q$ is at most $\tau \lVert M \rVert_F$; ``None``
            always decomposes.
        storage: ``"bfloat16"`` stores averages in half of the bytes, with arithmetic in the
            dtype of the factors; each element is then off by at most $2^{-8} / (1 - \beta)$
            of the largest sum.
        bases_in: ``"host"`` keeps eigenvectors in host memory, as NumPy arrays.
            :func:`jaxkfac.natural_gradient` and :func:`jaxkfac.scale_by_bases`, called outside
            ``jit``, then send those of one layer at a time to the device, and those of a scanned
            layer one iteration at a time. All of them cross at every step. As arguments of a
            jitted function they all go to the device at once.
        vectors_dtype: ``"bfloat16"`` keeps eigenvectors in half of the bytes. Each element is
            off by at most $2^{-9}$ of itself, and the arithmetic stays in the factors' dtype. The
            natural gradient is off by more, because the vectors are no longer quite orthogonal
            and it divides by small eigenvalues: 2 % in a small net with a damping of 1e-2.
        rank: Keep the eigenvectors of this many largest eigenvalues of each factor, and use
            the mean of the other eigenvalues for all other directions; ``rank_errors`` gives the
            error. Measured eigenvalues (:func:`jaxkfac.correct_eigenvalues`) need all
            eigenvectors, and capacity metrics are those of the spectrum with that mean.
        dtype: The dtype in which the host decomposes, as in :func:`jaxkfac.eigendecompose`; the
            bases have the dtype of the factors.
        workers: Threads that decompose. More than one need ``OPENBLAS_NUM_THREADS=1``.
        in_flight_bytes: Bytes of factors pushed and not yet in the average, a number or
            ``"1GiB"``; :meth:`push` waits until there is room. A larger factor goes alone.
        host_bytes: Host memory, a number or text, for averages, snapshots, bases that wait for
            their hand-over, workspace and copies in flight; ``None`` is no limit. It must hold the
            first refresh, which covers all layers whatever ``stagger`` is.
        disk: Folder of memory-mapped files for arrays beyond ``host_bytes``.
        timeout: Seconds after which any wait gives up.

    Raises:
        ValueError: an argument is out of range, or ``host_bytes`` is too small for ``like``.

    Memory:
        On the host, with $F$ the bytes of the folded factors (half of the unfolded ones):
        $2 F$ for average and snapshot ($3 F$ once an average holds more than 256 pushes, of
        one step or with a decay near 1: it moves to float64, so that 200,000 keep 1e-5);
        bases in use (on the CPU) and bases in work; ``workers * 36 n**2`` bytes (``16 n**2`` with
        ``dtype="float32"``); and the bytes in flight. With ``bases_in="host"`` the eigenvectors in
        use are on the host too, and the device holds those of two blocks of one layer. Bases in
        work are ``1 / stagger`` of all, except in the first refresh, which covers all; no bases are
        in use then, unless there are identities. With ``reuse_tolerance`` on an accelerator, a
        host copy of the old eigenvectors that are compared, one stack at a time. On the device:
        the bases, and at a hand-over those of one factor more, unless the caller still holds the
        old bases (``del bases`` first). Equal bits in two runs need the same
        ``OPENBLAS_NUM_THREADS``.

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
            ActiveBases(options, store),
            Decomposer(options.placement, options.reuse_tolerance, options.dtype),
        )
        if like is not None:
            self._state.use_layout(layout_of(like.layers, like.bias), double=is_double(like))
            self._state.complete = True
            self._state.origin = None if like.origin is None else like.origin.of_average()
        self._push: Push | None = None  # the last push, until its call returns
        self._lock = threading.RLock()  # one call at a time, from any thread
        self._monitor = monitor
        limit = options.in_flight_bytes
        self._averaging = Workers("jaxkfac-average", 1, monitor, limit)  # in order, so one
        self._workers = Workers("jaxkfac-eigh", options.workers, monitor)
        # The threads do not reference this object, so it can be collected while they run.
        weakref.finalize(self, monitor.close)

    @contextlib.contextmanager
    def _one_call(self, doing: str) -> Iterator[None]:
        # First: another thread may have held the lock when this process was forked.
        self._monitor.check_process(doing)
        with self._lock:
            self._monitor.check(doing)
            if self._push is not None:
                self._push.send()  # complete a push that an exception interrupted
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
        """Add factors to the average; return as soon as their copies have been dispatched.

        A push counts completely or not at all, whatever exception ends it, including
        ``KeyboardInterrupt``; pushing the same arrays at the same step again counts them once. If
        the exception came after the factors had been accepted, the next call to the service
        completes the push. The step counts as seen either way. If copying fails for factors larger
        than ``in_flight_bytes``, some of which are averaged by then, the service ends with
        that error instead.

        Several pushes of one step are added up by count: micro-batches, or parts of one batch.
        A part is ``Factors`` of some of the layers, or ``Factors`` whose dictionaries hold some of
        the arrays, each with its own count; a stacked array may hold
        only the iterations from ``first_iteration`` on. Until the first refresh, and without
        ``like``, a part may bring layers that no earlier push had.

        Args:
            factors: Arrays of JAX, or of NumPy (copied if they are writable).
            step: A step number; it may stay or grow, never shrink. The average decays once
                for each different step that is pushed.
            first_iteration: First iteration of arrays with fewer iterations than their stack.
            donate: Delete the JAX arrays of sums as soon as they have been averaged. By default
                only references are dropped; the buffers are freed when the caller's are.

        Raises:
            ValueError: factors of other layers or shapes; traced or deleted arrays; a step
                that is smaller than one seen before.
            RuntimeError: the service is closed, or was made before this process was forked.
            TimeoutError: there was no room for longer than ``timeout``.
            TypeError: ``factors`` is not ``Factors``.
        """
        if not isinstance(factors, Factors):
            raise TypeError(
                f"push takes the Factors that value_grad_and_factors returned, got "
                f"{type(factors).__name__}"
            )
        if factors.turn is not None:
            raise ValueError(
                f"push: the factors come in turns (collect={factors.turn.of}), and HostCurvature "
                "averages parts of the factors of one step: leave collect= out, or take "
                "max_factor_bytes= and sink="
            )
        step = as_step(step)
        with self._one_call("push"):
            sent = self._push is not None and self._push.is_of(factors, step, first_iteration)
            if not sent:  # otherwise the previous call was interrupted, and this completed it
                self._new_push(factors, step, first_iteration, donate)
            mine = self._push
        # Last, so that no interrupt can come between this and the return: from here on the same
        # push is a new one. Another thread may have begun a push of its own, which must stay.
        if self._push is mine:
            self._push = None

    def _new_push(self, factors: Factors, step: int, first_iteration: int, donate: bool) -> None:
        state = self._state
        # A refresh that is due takes the average without the factors of this step, so its snapshot
        # is queued before the push.
        due = state.schedule.due(step)
        push = Push(state, self._averaging, factors, step, first_iteration, donate)
        try:
            push.prepare()
            for action in due:
                self._do(action)
            push.after(state.schedule)
            self._push = push  # the commit: before this line nothing counts, after it all does
        except BaseException:
            if self._push is not push:
                push.withdraw()
            raise
        # Outside the `try`: from here on an exception leaves a push that the next call completes.
        push.send()

    @contextlib.contextmanager
    def room(self, factors: Factors | ByteSize) -> Iterator[None]:
        """Reserve bytes in flight before factors are dispatched, not only when they are pushed.

        JAX allocates an output when its computation is enqueued, so a loop that runs ahead
        holds the factors of several steps. ``with service.room(like): ...`` enters the block
        when the factors fit in ``in_flight_bytes``. Pushes in the block, from this thread,
        use the reserved bytes; unused ones are released at its end.

        Args:
            factors: Factors, their shapes, or a number of bytes.
        """
        if isinstance(factors, Factors):
            # Counts are left out: they are scalars, or one for each entry of a stack.
            arrays = [side.data for side in factors.sides.values()]
            factors = sum(x.size * x.dtype.itemsize for x in arrays)
        # A forked process has no threads that could free bytes, and would wait to the end of the
        # time limit.
        self._monitor.check_process("room")
        with self._averaging.room(parse_bytes(factors, name="factors")):
            yield

    def flush(self) -> None:
        """Wait until everything pushed is in the average and its arrays are released."""
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
            ValueError: nothing has been pushed, a layer has never been pushed, or the step goes
                backwards.
            NonFiniteFactorError: naming the layer; see the class.
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
        # An action may have been done before, if an exception kept the schedule from moving on.
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
            # Alone, the error is raised at once. With other processes it is exchanged first: they
            # wait for this one, and would run into their time limit.
            if not work.shares:
                raise
            error = failure
        if work.shares:
            exchange = functools.partial(work.exchange, what, self._state.about(pending), error)
            call_in_time(exchange, self._monitor.timeout, f"the other processes, after {what}")

    def average(self) -> Factors:
        """The running average as :class:`Factors` of NumPy arrays, unfolded.

        Its means are those that a refresh would decompose now. ``terms`` is the largest number of
        loss terms of a layer. Sums over fewer terms, because contributions were left out or lacked
        the layer, are scaled to it.

        Raises:
            ValueError: nothing has been pushed, or nothing finite for a layer, which is named.
        """
        with self._one_call("average"):
            self.flush()
            if self._state.averages is None or not self._state.averages.running:
                raise ValueError("average: no factors have been pushed")
            average = self._state.averages.factors(self._state.schedule.age)
            return with_origin(average, self._state.origin)

    @property
    def left_out(self) -> dict[str, int]:
        """``{factor: number of contributions left out}``, not finite or overflowing the sum."""
        averages: Averages | None = self._state.averages
        return {} if averages is None else dict(averages.left_out)

    @property
    def kept(self) -> dict[str, int]:
        """``{factor: number of refreshes in a row for which its previous basis was kept}``."""
        return dict(self._state.active.kept)

    @property
    def rank_errors(self) -> dict[str, float]:
        r"""``{factor: error of rank}``, $\lVert M - M_r \rVert_F / \lVert M \rVert_F$."""
        return dict(self._state.active.rank_errors)

    @property
    def placements(self) -> dict[str, str]:
        """``{"size/dtype": "device" or "host"}``, the choices of ``placement="auto"``."""
        return dict(self._state.decomposer.chosen)

    # ------------------------------------------------------------ saving, ending

    def save(self, path: str | Path) -> None:
        """Write the complete state to one file; a run that continues from it is bitwise the same.

        It waits for pushes in flight and for a decomposition in work. If several processes share
        factors, each calls this, and the files are equal. The file is written under
        another name first, so that it is complete or absent, and contains a checksum of every array
        and of itself.

        Raises:
            OSError: the disk is full (with the bytes that are needed), or ``path`` cannot be
                written to; an older file is unchanged.
        """
        with self._one_call("save"):
            self.flush()
            self._finish_work()
            save_state(self._state, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, *, like: Factors | None = None, **machine: Any
    ) -> "HostCurvature":
        """A service that continues where the saved one was.

        Args:
            path: A file that :meth:`save` wrote.
            like: Factors or their shapes, to refuse a service of another model at once.
            machine: ``workers``, ``in_flight_bytes``, ``host_bytes``, ``disk``, ``timeout``,
                which are not saved. All other arguments are.

        Raises:
            DamagedFileError: a byte of the file has changed; the array is named.
            ValueError: the file is no saved service, or the budget is too small for it.
            CheckpointMismatchError: it has other layers than ``like``.
            TypeError: another argument is given.
        """
        unknown = sorted(set(machine) - set(MACHINE))
        if unknown:
            raise TypeError(f"load takes {', '.join(MACHINE)}, got {', '.join(unknown)}")
        if machine.get("disk") is not None:
            machine["disk"] = Path(machine["disk"])
        machine |= _sizes(**{name: machine[name] for name in _SIZES if name in machine})
        with Archive(Path(path), FORM, "saved service") as saved:
            # Files from before ``dtype`` was an option continue in float32.
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
                check_same_layers(like, layout.like)
            except ValueError as error:
                raise CheckpointMismatchError(
                    f"{path} belongs to another model: {error}"
                ) from error

    def close(self) -> None:
        """End the threads and drop pending decompositions. May be called twice.

        Raises:
            TimeoutError: a thread did not end within ``timeout``.
            BaseException: the error of a thread, if no call has raised it yet.
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
        with contextlib.suppress(Exception):  # the error being raised says more
            self.close()


def _sizes(**sizes: ByteSize | None) -> dict[str, Any]:
    """Parse arguments that are sizes into bytes."""
    return {k: None if size is None else parse_bytes(size, name=k) for k, size in sizes.items()}
