"""What a training needs, and what to change so that it fits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxkfac import lslora
from jaxkfac._checks import at_least_one, one_of
from jaxkfac.curvature.host import HostOptions
from jaxkfac.optim import MemoryKind, check_memory_kind, checked_accumulator_dtype
from jaxkfac.planning._memory_plan import MemoryPlan
from jaxkfac.planning._optimizer import optimizer_state
from jaxkfac.planning._options import OPTION_NAMES, OPTIONS
from jaxkfac.planning._program_bytes import Curvature, MicroBatches
from jaxkfac.planning._search import MemoryEstimate, Search
from jaxkfac.planning._setting import TrainingPrograms
from jaxkfac.planning._shapes import UnavailableError, shapes_of


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
    in_flight_bytes: int = HostOptions.in_flight_bytes,
    adapter_rank: int = 8,
    accumulation_steps: int = 1,
    accumulator_dtype: DTypeLike | None = None,
    accumulator_memory_kind: MemoryKind = "device",
    options: Sequence[str] = OPTION_NAMES,
    **collection: Any,
) -> MemoryPlan:
    r"""Plan the memory of a training from shapes alone: nothing is allocated or run.

    Rows are added up as if all were alive at once, which is what a step with donated
    parameters and optimizer state comes to at its end. Parameters, gradients, optimizer,
    factors and bases are exact. Activations are the temporaries of the program of value,
    gradient and factors as compiled here, an estimate for another device; workspace is the
    $3 n^2$ elements that syevd takes for the largest side $n$, or, for an optimizer that
    decomposes inside its update (:func:`jaxkfac.kfac`), for all matrices of one size, and new
    bases beside the old.

    The options, from the cheapest to the dearest, each also a column of the table:

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
        max_factor_bytes: Of the option ``"budget"``.
        in_flight_bytes: Of ``HostCurvature``.
        adapter_rank: Of the adapters.
        accumulation_steps: Micro-batches a step, of which ``batch`` is one; the option
            ``"accumulation"`` cuts them further. An ``optimizer`` that accumulates by itself
            has a row of its own accumulators, on the device wherever it keeps them.
        accumulator_dtype: Of :func:`jaxkfac.multi_steps`, with every accumulation.
        accumulator_memory_kind: Likewise; with ``"pinned_host"`` the row is on the host. An
            update takes it through the device, where the activations were.
        options: Which may be used. Each of ``"bf16"``, ``"remat"``, ``"adapters"`` and each
            number of micro-batches is a compilation.
        **collection: Of :func:`jaxkfac.value_grad_and_factors`: ``fisher``, ``max_dense``, ...

    Returns:
        The plan; ``plan.chosen()`` is the smallest set of options that fits.

    Raises:
        ValueError: a size that is not positive, an unknown option, dtype or memory, or
            ``accumulation_steps`` beside an optimizer that accumulates.
        UncoveredParameterError: a parameter is in no layer: see ``uncovered``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxkfac as jk
        >>> from jaxkfac.planning import plan_memory
        >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> plan = plan_memory(
        ...     objective, {"kernel": shape(100, 50)}, (shape(8, 100), shape(8, 50)),
        ...     optimizer=optax.adam(1e-3), device_bytes=300e3, options=("accumulation", "host"))
        >>> plan.now.device["optimizer"], plan.now.device["factors"], plan.fits()
        (40004, 50008, False)
        >>> plan.smallest.options
        ('host',)
    """
    _check_sizes(device_bytes=device_bytes, host_bytes=host_bytes)
    for name in options:
        one_of("options", name, tuple(OPTIONS))
    asked = [name for name in OPTIONS if name in options]
    at_least_one(
        adapter_rank=adapter_rank,
        in_flight_bytes=in_flight_bytes,
        accumulation_steps=accumulation_steps,
    )
    check_memory_kind(accumulator_memory_kind)
    dtype = checked_accumulator_dtype(accumulator_dtype)
    if max_factor_bytes is not None:
        at_least_one(max_factor_bytes=max_factor_bytes)
    params, batch = shapes_of(params), shapes_of(batch)
    config = lslora.Config(rank=adapter_rank)
    search = Search(
        TrainingPrograms(objective, params, batch, config, collection),
        batch,
        optimizer,
        Curvature(vectors, in_flight_bytes) if curvature else None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        max_factor_bytes=max_factor_bytes,
        options=asked,
        micro_batches=MicroBatches(accumulation_steps, dtype, accumulator_memory_kind),
    )
    if accumulation_steps > 1 and optimizer_state(optimizer, params).accumulators:
        raise ValueError(
            f"accumulation_steps={accumulation_steps}: the optimizer accumulates by itself"
        )
    now = search.estimate(())
    alone: dict[str, MemoryEstimate] = {}
    unavailable: dict[str, str] = {}
    for name in asked:
        try:
            alone[name] = search.estimate([x for x in (search.needed(name), name) if x])
        except UnavailableError as reason:
            unavailable[name] = str(reason)
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
