"""What a training needs, and what to change so that it fits."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxkfac import lslora
from jaxkfac._checks import at_least_one, one_of
from jaxkfac.memory import MemoryBudgetError, bytes_text
from jaxkfac.optim._accumulators import MemoryKind, check_memory_kind, checked_dtype
from jaxkfac.planning._levers import LEVERS, Lever, UnavailableError, needed
from jaxkfac.planning._optimizer import optimizer_state
from jaxkfac.planning._rows import Accumulation, Curvature
from jaxkfac.planning._search import Need, Search
from jaxkfac.planning._shapes import shapes_of
from jaxkfac.planning._table import need_words, plan_text
from jaxkfac.planning._variant import Variants


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Bytes by row, as it stands and with each lever; ``print(plan)`` is the table.

    Attributes:
        now: What the training needs as it stands.
        alone: ``{lever: need}`` with this lever alone; ``"nf4"`` with the adapters it needs,
            ``"accumulator"`` with the accumulation.
        unavailable: ``{lever: reason}``.
        smallest: The smallest set of levers that fits; ``None`` if none does.
        best: Of the sets that were tried, the one with the fewest bytes on the device.
        device_bytes: What there is.
        host_bytes: Likewise in main memory; ``None`` is no limit.
        compiled_for: Platform of the compiler that the activations come from.
    """

    now: Need
    alone: Mapping[Lever, Need]
    unavailable: Mapping[Lever, str]
    smallest: Need | None
    best: Need
    device_bytes: float | int
    host_bytes: float | int | None
    compiled_for: str

    @property
    def accumulation_steps(self) -> int:
        """The number of micro-batches a step that the smallest set has.

        Raises:
            MemoryBudgetError: nothing fits.
        """
        return self.chosen().steps

    def fits(self, need: Need | None = None) -> bool:
        """Whether a need is met; by default that of the training as it stands."""
        need = self.now if need is None else need
        host = self.host_bytes is None or need.host_total <= self.host_bytes
        return host and need.device_total <= self.device_bytes

    def chosen(self) -> Need:
        """The smallest set of levers that fits.

        Raises:
            MemoryBudgetError: nothing fits, with the best set and its largest row.
        """
        if self.smallest is None:
            raise MemoryBudgetError(self.why_not())
        return self.smallest

    def why_not(self) -> str:
        """What stands in the way of the best set."""
        best, host = self.best, ""
        row = best.largest
        if self.host_bytes is not None and best.host_total > self.host_bytes:
            host = (
                f" and {bytes_text(best.host_total)} of {bytes_text(self.host_bytes)} on the host"
            )
        return (
            f"nothing fits {bytes_text(self.device_bytes)}: the best set, {need_words(best)}, "
            f"needs {bytes_text(best.device_total)}{host}; its largest row is {row!r} "
            f"with {bytes_text(best.device[row])}: use a larger device, shard it, or shrink the "
            "model or the batch"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for JSON."""
        plain = {
            "now": _plain(self.now),
            "alone": {lever: _plain(need) for lever, need in self.alone.items()},
            "unavailable": dict(self.unavailable),
            "smallest": None if self.smallest is None else _plain(self.smallest),
            "best": _plain(self.best),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "compiled_for": self.compiled_for,
        }
        return plain

    def __str__(self) -> str:
        return plan_text(self)


def plan_memory(
    objective: Callable[..., Any],
    params: PyTree,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    device_bytes: float | int,
    host_bytes: float | int | None = None,
    curvature: bool = True,
    vectors: bool = True,
    max_factor_bytes: int | None = None,
    in_flight_bytes: int = 1 << 30,
    adapter_rank: int = 8,
    accumulation_steps: int = 1,
    accumulator_dtype: DTypeLike | None = None,
    accumulator_memory_kind: MemoryKind = "device",
    levers: Sequence[str] = LEVERS,
    **options: Any,
) -> MemoryPlan:
    r"""Plan the memory of a training from shapes alone: nothing is allocated or run.

    Rows are added up as if all were alive at once, which is what a step with donated
    parameters and optimizer state comes to at its end. Parameters, gradients, optimizer,
    factors and bases are exact. Activations are the temporaries of the program of value,
    gradient and factors as compiled here, an estimate for another device; workspace is the
    $3 n^2$ elements that syevd takes for the largest side $n$, or, for an optimizer that
    decomposes inside its update (:func:`jaxkfac.kfac`), for all matrices of one size, and new
    bases beside the old.

    The levers, from the cheapest to the dearest, each also a column of the table:

    - ``"accumulation"``: :func:`jaxkfac.multi_steps` over equal parts of the batch, the fewest
      that fit.
    - ``"host"``: :class:`jaxkfac.HostCurvature` averages and decomposes; on the device remain
      a step's factors, those in flight, and the bases.
    - ``"accumulator"``: with accumulation, ``accumulator_dtype`` is bfloat16.
    - ``"remat"``: ``jax.checkpoint`` around the body of every scan that has none.
    - ``"bf16"``: parameters, gradients, optimizer state and floating inputs in bfloat16.
    - ``"budget"``: ``max_factor_bytes``, what is left over if none is given; the factors of
      all passes together are on the host.
    - ``"adapters"``: LS-LoRA adapters of all dense layers are trained, the rest is frozen.
    - ``"nf4"``: with adapters, the frozen dense kernels in 4 bits, doubly quantised.

    Args:
        objective: A ``jk.Objective``, or a scalar loss ``fn(params, batch)``.
        params: Parameters; arrays or ``jax.ShapeDtypeStruct``.
        batch: One step's batch, likewise; examples first.
        optimizer: An optax transformation; its state is what ``init`` would allocate.
        device_bytes: What the device's allocator can hand out, in bytes.
        host_bytes: Main memory for curvature, in bytes; ``None`` is no limit.
        curvature: Whether factors are gathered.
        vectors: Whether eigenvectors come back to the device, to precondition with; ``False``
            is an analysis, with eigenvalues only.
        max_factor_bytes: Of the lever ``"budget"``.
        in_flight_bytes: Of ``HostCurvature``.
        adapter_rank: Of the adapters.
        accumulation_steps: Micro-batches a step, of which ``batch`` is one; the lever
            ``"accumulation"`` cuts them further. An ``optimizer`` that accumulates by itself
            has a row of its own accumulators, on the device wherever it keeps them.
        accumulator_dtype: Of :func:`jaxkfac.multi_steps`, with every accumulation.
        accumulator_memory_kind: Likewise; with ``"pinned_host"`` the row is on the host. An
            update takes it through the device, where the activations were.
        levers: Which may be pulled. Each of ``"bf16"``, ``"remat"``, ``"adapters"`` and each
            number of micro-batches is a compilation.
        **options: Of :func:`jaxkfac.value_grad_and_factors`: ``fisher``, ``max_dense``, ...

    Returns:
        The plan; ``plan.chosen()`` is the smallest set of levers that fits.

    Raises:
        ValueError: a size that is not positive, an unknown lever, dtype or memory, or
            ``accumulation_steps`` beside an optimizer that accumulates.
        UncoveredParameterError: a parameter is in no layer: see ``uncovered``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxkfac as jk
        >>> from jaxkfac.planning import plan_memory
        >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> plan = plan_memory(
        ...     objective, {"kernel": shape(100, 50)}, (shape(8, 100), shape(8, 50)),
        ...     optimizer=optax.adam(1e-3), device_bytes=300e3, levers=("accumulation", "host"))
        >>> plan.now.device["optimizer"], plan.now.device["factors"], plan.fits()
        (40004, 50008, False)
        >>> plan.smallest.levers
        ('host',)
    """
    _check_sizes(device_bytes=device_bytes, host_bytes=host_bytes)
    for name in levers:
        one_of("levers", name, LEVERS)
    pulled: list[Lever] = [lever for lever in LEVERS if lever in levers]
    at_least_one(
        adapter_rank=adapter_rank,
        in_flight_bytes=in_flight_bytes,
        accumulation_steps=accumulation_steps,
    )
    check_memory_kind(accumulator_memory_kind)
    accumulation = Accumulation(
        accumulation_steps, checked_dtype(accumulator_dtype), accumulator_memory_kind
    )
    if max_factor_bytes is not None:
        at_least_one(max_factor_bytes=max_factor_bytes)
    params, batch = shapes_of(params), shapes_of(batch)
    config = lslora.Config(rank=adapter_rank)
    search = Search(
        Variants(objective, params, batch, config, options),
        batch,
        optimizer,
        Curvature(vectors, in_flight_bytes) if curvature else None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        max_factor_bytes=max_factor_bytes,
        levers=pulled,
        accumulation=accumulation,
    )
    if accumulation_steps > 1 and optimizer_state(optimizer, params).accumulators:
        raise ValueError(
            f"accumulation_steps={accumulation_steps}: the optimizer accumulates by itself"
        )
    now = search.need(())
    alone: dict[Lever, Need] = {}
    unavailable: dict[Lever, str] = {}
    for lever in pulled:
        try:
            alone[lever] = search.need(tuple({needed(lever, accumulation_steps), lever}))
        except UnavailableError as reason:
            unavailable[lever] = str(reason)
    smallest = search.smallest()
    return MemoryPlan(
        now=now,
        alone=alone,
        unavailable=unavailable,
        smallest=smallest,
        best=search.best() if smallest is None else smallest,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        compiled_for=jax.default_backend(),
    )


def _check_sizes(**sizes: float | int | None) -> None:
    for name, size in sizes.items():
        if size is not None and not (math.isfinite(size) and size > 0):
            raise ValueError(f"{name}={size}: expected a positive number of bytes, as 80e9")


def _plain(need: Need) -> dict[str, Any]:
    plain = {field.name: getattr(need, field.name) for field in dataclasses.fields(need)}
    found = {name: dict(x) if isinstance(x, Mapping) else x for name, x in plain.items()}
    totals = {"device_total": need.device_total, "host_total": need.host_total}
    return {**found, "levers": list(need.levers), **totals}
