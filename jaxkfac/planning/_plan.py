"""The memory of a training, and options by which it fits."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import optax
from jax.typing import DTypeLike

from jaxkfac import lslora
from jaxkfac._arguments import ArrayTree, check_arrays, check_function
from jaxkfac._errors import CompilerError, CompilerNotFoundError, at_least_one, one_of
from jaxkfac.blocks import check_decay
from jaxkfac.curvature.host import HostOptions
from jaxkfac.memory import ByteSize, parse_bytes
from jaxkfac.optim import MemoryKind, check_memory_kind, checked_accumulator_dtype
from jaxkfac.planning._compilers import TargetName
from jaxkfac.planning._memory_plan import MemoryPlan
from jaxkfac.planning._options import OPTION_NAMES, OPTIONS
from jaxkfac.planning._program_bytes import CurvatureChoice, MicroBatches
from jaxkfac.planning._search import MemoryEstimate, Search
from jaxkfac.planning._setting import TrainingPrograms
from jaxkfac.planning._shapes import UnavailableError, placement, shapes_of
from jaxkfac.planning._step import optimizer_state
from jaxkfac.planning._temporaries import Temporaries, within

CompiledSets = Literal["chosen", "all", "none"]


def plan_memory(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: Any,
    *,
    state: ArrayTree | None = None,
    frozen: ArrayTree | None = None,
    optimizer: optax.GradientTransformation | None = None,
    device_bytes: ByteSize,
    host_bytes: ByteSize | None = None,
    headroom: float = 0.1,
    donate: bool = True,
    max_gradients: float | None = None,
    curvature: bool = True,
    vectors: bool = True,
    max_factor_bytes: ByteSize | None = None,
    in_flight_bytes: ByteSize = HostOptions.in_flight_bytes,
    decay: float = HostOptions.decay,
    adapter_rank: int = 8,
    basis_rank: int = 512,
    accumulation_steps: int = 1,
    accumulator_dtype: DTypeLike | None = None,
    accumulator_memory_kind: MemoryKind = "device",
    devices: int | None = None,
    fully_sharded: bool = False,
    options: Sequence[str] = OPTION_NAMES,
    compiler: TargetName | None = None,
    compiled: CompiledSets = "chosen",
    compiler_python: str | Path = sys.executable,
    compiler_timeout: float = 300.0,
    progress: Callable[[str], None] | None = None,
    **collection: Any,
) -> MemoryPlan:
    r"""Plan the memory of a training from shapes alone; nothing is allocated or run.

    Parameters, optimizer, factors and bases are exact. Three rows are never in memory at the same
    time, so only the largest counts in the total: *activations*, the temporaries of the program of
    value, gradient and factors; *workspace*, the matrix that a decomposition overwrites; and
    *update*, the temporaries of preconditioning and of the optimizer. Gradient and update form
    one program if nothing happens between them: without curvature, or with
    :func:`jaxkfac.kfac`, which decomposes inside its update. The temporaries of this program
    are gradients, factors, and the larger of activations and update. Only activations become
    fewer with recomputation.

    For the training as it stands and for the chosen set, temporaries are those that the compiler
    allocates. For other sets they are estimates: counted from the equations and scaled by the ratio
    of compiled to counted bytes of the training as it stands. The table says which applies to each
    column, and how large the error of estimates has been (``benchmarks/results/plan.md``).

    Memory that libraries allocate themselves has separate rows, computed by formulas: eigh scratch
    is $2 n^2 + 6 n + 1$ elements for the largest side $n$ (inside an update for all matrices of one
    size, limited to as many as fit 2 GiB), conv scratch the patches of the largest convolution.

    The options, from the cheapest to the most expensive, each also a column of the table:

    - ``"accumulation"``: :func:`jaxkfac.multi_steps` over equal parts of the batch, with the fewest
      parts that fit.
    - ``"host"``: :class:`jaxkfac.HostCurvature` averages and decomposes; the device keeps a step's
      factors, those in flight, and the bases.
    - ``"accumulator"``: with accumulation, ``accumulator_dtype`` is bfloat16.
    - ``"remat"``: ``jax.checkpoint`` around the body of every scan that has none.
    - ``"half_bases"``: with host, ``vectors_dtype="bfloat16"``.
    - ``"bf16"``: parameters, gradients, optimizer state and floating inputs in bfloat16.
    - ``"host_bases"``: with host, ``bases_in="host"``: one block's eigenvectors on the device at
      a time.
    - ``"low_rank"``: with host, ``rank=basis_rank``.
    - ``"budget"``: ``max_factor_bytes``, by default what is left over; the factors of all passes
      together are on the host.
    - ``"adapters"``: train LS-LoRA adapters of all dense layers and freeze the rest.
    - ``"nf4"``: with adapters, the frozen dense kernels in 4 bits, with quantized scales.

    Args:
        objective: A ``jk.Objective``, or a scalar loss ``fn(params, batch)``.
        params: Parameters, as arrays or ``jax.ShapeDtypeStruct``.
        batch: One step's batch, as arrays or shapes, with examples on the first axis.
        state: State that a call changes (batch statistics), as arrays or shapes, for an objective
            that takes it.
        frozen: Arrays or shapes inside ``batch`` that are parameters no step changes, such as the
            base beside adapters: they are counted as parameters. The options that divide or
            replace the batch are then not available.
        optimizer: An optax transformation; its state is what ``init`` would allocate.
        device_bytes: Bytes that the device's allocator can hand out: a number, ``"80GB"`` or
            ``"74.5GiB"``.
        host_bytes: Bytes of main memory for curvature; ``None`` means no limit.
        headroom: Fraction of ``device_bytes`` to keep free, in [0, 1): for fragmentation, the
            libraries' contexts, and the error of the plan.
        donate: Whether a step donates its parameters and optimizer state; otherwise the new ones
            are in memory beside the old.
        max_gradients: Largest cost of a step, in gradients of the training as it stands
            (remat is 4/3, each further pass of a budget about one); ``None`` means no limit.
        curvature: Whether factors are gathered.
        vectors: Whether eigenvectors return to the device for preconditioning; ``False`` is an
            analysis, with eigenvalues only.
        max_factor_bytes: Budget of the option ``"budget"``.
        in_flight_bytes: As for ``HostCurvature``.
        decay: As for ``HostCurvature``: averages over more than 256 effective pushes are in
            float64.
        adapter_rank: Rank of the adapters.
        basis_rank: Eigenvectors of each factor with ``"low_rank"``.
        accumulation_steps: Micro-batches per step, of which ``batch`` is one; the option
            ``"accumulation"`` divides them further. An ``optimizer`` that accumulates itself
            has a row for its accumulators, counted on the device wherever it keeps them.
        accumulator_dtype: As for :func:`jaxkfac.multi_steps`, with every accumulation.
        accumulator_memory_kind: As for :func:`jaxkfac.multi_steps`; with ``"pinned_host"`` the row
            is on the host. An update moves it through the device in place of the activations.
        devices: Number of devices that train together, each with a batch of this size and with all
            parameters; the plan then counts the bytes that they exchange. ``None`` is the size of
            the mesh that ``jax.set_mesh`` has set, or 1.
        fully_sharded: Whether parameters, optimizer state, factors and bases are sharded over these
            devices, as by :func:`jaxkfac.memory.divided_shardings`; the rows then are those of one
            device. The compiler decides what is gathered and when, so exchanged bytes are counted
            for compiled sets only, and the options ``"host"``, ``"budget"`` and ``"adapters"``, and
            those that need them, are not planned.
        options: Options that may be used.
        compiler: ``"cpu"``, ``"h100"`` or ``"v5e"``: target of the programs, whose compiler is
            used. The device need not exist here: another platform's compiler runs in a child
            process. ``None`` is this process's device.
        compiled: ``"chosen"``, as above; ``"all"`` sets, where each of ``"bf16"``, ``"remat"``,
            ``"adapters"`` and each number of micro-batches takes a compilation; or ``"none"``, the
            fastest, where all temporaries are counted.
        compiler_python: An interpreter in which that compiler is installed.
        compiler_timeout: Time limit for a compilation in a child process, seconds. A set that
            exceeds it is estimated.
        progress: Function called with a description of the options that are estimated next.
        **collection: Arguments of :func:`jaxkfac.value_grad_and_factors`: ``fisher``,
            ``max_dense``, ...

    Returns:
        The plan; ``plan.chosen()`` is the smallest set of options that fits.

    Raises:
        ValueError: a size is invalid, an option, compiler, dtype or memory kind is unknown, a
            number is out of range, or ``accumulation_steps`` is given beside an optimizer that
            accumulates.
        CompilerNotFoundError: ``compiler`` is not installed; the message says what to install. With
            ``compiled="none"`` it is not needed.
        CompilerError: it fails for fully sharded training, which cannot be counted from equations.
        UncoveredParameterError: a parameter is in no layer; see ``uncovered``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxkfac as jk
        >>> from jaxkfac.planning import plan_memory
        >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> plan = plan_memory(
        ...     objective, {"kernel": shape(100, 50)}, (shape(8, 100), shape(8, 50)),
        ...     optimizer=optax.adam(1e-3), device_bytes="330kB", options=("accumulation", "host"))
        >>> plan.now.compiled, plan.smallest.compiled, plan.alone["accumulation"].compiled
        (True, True, False)
        >>> plan.now.device["optimizer"], plan.now.device["factors"], plan.fits()
        (40004, 50008, False)
        >>> plan.smallest.options
        ('host',)
    """
    device_bytes = parse_bytes(device_bytes, name="device_bytes")
    in_flight_bytes = parse_bytes(in_flight_bytes, name="in_flight_bytes")
    if host_bytes is not None:
        host_bytes = parse_bytes(host_bytes, name="host_bytes")
    if max_factor_bytes is not None:
        max_factor_bytes = parse_bytes(max_factor_bytes, name="max_factor_bytes")
    _check_choices(headroom, max_gradients, options)
    requested = [name for name in OPTIONS if name in options]
    at_least_one(
        adapter_rank=adapter_rank, basis_rank=basis_rank, accumulation_steps=accumulation_steps
    )
    num_devices = _devices_of_mesh() if devices is None else devices
    at_least_one(devices=num_devices)
    mesh = jax.sharding.get_abstract_mesh()
    placed = placement(mesh, num_devices, sharded=fully_sharded)
    check_memory_kind(accumulator_memory_kind)
    dtype = checked_accumulator_dtype(accumulator_dtype)
    _check_compiled(compiled, fully_sharded=fully_sharded)
    unavailable = {
        name: "it is not planned for fully sharded training"
        for name in requested
        if fully_sharded and not OPTIONS[name].sharded
    }
    requested = [name for name in requested if name not in unavailable]
    check_function("objective", objective, "loss(params, batch), or a jk.Objective")
    check_arrays("params", params)
    check_arrays("batch", batch)
    params, batch, state = shapes_of(params), shapes_of(batch), shapes_of(state)
    frozen = shapes_of(frozen)
    check_decay(decay)
    config = lslora.Config(rank=adapter_rank)
    micro_batches = MicroBatches(accumulation_steps, dtype, accumulator_memory_kind)

    def search_with(temporaries: Temporaries, **more: Any) -> Search:
        return Search(
            TrainingPrograms(
                *(objective, params, batch, config, collection, temporaries, state, placed),
                frozen=frozen,
            ),
            batch,
            optimizer,
            CurvatureChoice(vectors, in_flight_bytes, basis_rank, decay) if curvature else None,
            device_bytes=(1 - headroom) * device_bytes,
            host_bytes=host_bytes,
            max_factor_bytes=max_factor_bytes,
            options=requested,
            micro_batches=micro_batches,
            donate=donate,
            max_gradients=max_gradients,
            progress=progress,
            devices=num_devices,
            **more,
        )

    temporaries = Temporaries(compiler, compiler_python, timeout=compiler_timeout)
    if accumulation_steps > 1 and optimizer_state(optimizer, params).accumulators:
        raise ValueError(
            f"accumulation_steps={accumulation_steps}: the optimizer accumulates by itself"
        )
    search, now, not_compiled = _searches(search_with, temporaries, compiled, sharded=fully_sharded)
    alone: dict[str, MemoryEstimate] = {}
    for name in requested:
        try:
            alone[name] = search.estimate([x for x in (search.needed(name), name) if x])
        except UnavailableError as reason:
            unavailable[name] = str(reason)
    smallest = search.smallest()
    if smallest is not None:
        alone |= {name: smallest for name, x in alone.items() if _is_same(x, smallest)}
    return MemoryPlan(
        now=now,
        alone=alone,
        unavailable=unavailable,
        smallest=smallest,
        best=search.best() if smallest is None else smallest,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        headroom=headroom,
        max_gradients=max_gradients,
        compiled_for=temporaries.title,
        not_traced=search.not_traced,
        not_compiled=not_compiled or search.not_compiled,
        within=search.within,
        devices=num_devices,
        fully_sharded=fully_sharded,
    )


def _check_choices(headroom: float, max_gradients: float | None, options: Sequence[str]) -> None:
    """Refuse limits out of range and unknown options."""
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom}: expected a share in [0, 1), as 0.1")
    if max_gradients is not None and not max_gradients >= 1:
        raise ValueError(f"max_gradients={max_gradients}: expected at least 1, the gradient's own")
    for name in options:
        one_of("options", name, tuple(OPTIONS))


def _check_compiled(compiled: str, *, fully_sharded: bool) -> None:
    """Refuse an unknown choice of what is compiled, and none where only a compiler can tell."""
    one_of("compiled", compiled, get_args(CompiledSets))
    if fully_sharded and compiled == "none":
        raise ValueError(
            'fully_sharded=True with compiled="none": what is gathered is the compiler\'s choice; '
            'take compiled="chosen"'
        )


def _devices_of_mesh() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.axis_sizes)


def _searches(
    search_with: Callable[..., Search],
    temporaries: Temporaries,
    compiled: CompiledSets,
    *,
    sharded: bool,
) -> tuple[Search, MemoryEstimate, str]:
    """The search, the estimate of the training as it stands, and why no compiler was used."""
    counting = functools.partial(dataclasses.replace, temporaries)
    alone = search_with(counting(), within=within(temporaries.platform, calibrated=False))
    if compiled == "none":
        return alone, alone.estimate(()), ""
    asking = search_with(counting(compiled=True))
    try:
        now = asking.estimate(())
    except CompilerNotFoundError:
        raise
    except CompilerError as error:
        if sharded:  # what is gathered does not follow from the equations
            raise
        return alone, alone.estimate(()), str(error)
    if compiled == "all":
        return asking, now, ""
    factor = asking.main_temporaries / max(alone.main_temporaries, 1)
    search = search_with(
        counting(factor=factor if alone.main_temporaries else 1.0),
        compiled=asking,
        within=within(temporaries.platform, calibrated=True),
    )
    return search, now, ""


def _is_same(first: MemoryEstimate, second: MemoryEstimate | None) -> bool:
    return second is not None and (first.options, first.steps) == (second.options, second.steps)
