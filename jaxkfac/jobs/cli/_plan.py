"""`jaxkfac plan`: what a known layout needs, and what to change so that it fits."""

import contextlib
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jaxkfac.planning import OPTION_NAMES, OptionName

_QUIET = 2.0  # seconds


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Plan the memory of a training from shapes: nothing is allocated, no device is asked.

    Rows for parameters, gradients, optimizer, activations, factors, bases and workspace; a
    column for the training as it stands and one for each option; the smallest set of options that
    fits, and its number of accumulation steps. Exit code 2 says that nothing fits.

    For example, full training of a 7B decoder with Adam, and curvature, on 80 GB:
    `jaxkfac plan --preset llama-7b --device-bytes 80GB --batch 4 --tokens 2048`
    """

    device_bytes: str | float
    """What the device's allocator can hand out: bytes, or 80GB, or 74.5GiB."""
    preset: str = "llama-7b"
    """Layout: llama-7b, phi-3-mini, t5-xl or flan-t5-xl."""
    host_bytes: str | float | None = None
    """Main memory for curvature, likewise; no limit by default."""
    headroom: float = 0.1
    """Share of the device's bytes that stays free."""
    donate: bool = True
    """Whether a step writes over its parameters and its optimizer's state."""
    max_gradients: float | None = None
    """Most that a step may cost, in gradients; no limit by default."""
    batch: int = 1
    """Examples per step, or per micro-batch with --gradient-accumulation-steps."""
    tokens: int = 2048
    """Of an example; of its source and of its target for an encoder-decoder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters."""
    gradient_accumulation_steps: int = 1
    """Micro-batches a step, each of --batch examples."""
    accumulator_dtype: Literal["bfloat16", "float32"] | None = None
    """Of the accumulated gradients and factors; by default as wide as they are added."""
    accumulator_memory_kind: Literal["device", "pinned_host"] = "device"
    """Memory that holds them between micro-batches."""
    optimizer: Literal["none", "sgd", "adam", "kfac"] = "adam"
    """Whose state is counted; sgd has momentum, kfac averages and decomposes on the device."""
    curvature: Literal["precondition", "analyze", "none"] = "precondition"
    """Factors with eigenvectors on the device, with eigenvalues only, or no factors."""
    max_dense: int = 16384
    """A larger side of a factor is kept as a diagonal."""
    max_factor_bytes: str | float | None = None
    """Budget of factors on the device; by default what is left over."""
    decay: float = 0.95
    """Of averages on the host: near 1 they are in float64."""
    adapter_rank: int = 8
    """Of the adapters."""
    basis_rank: int = 512
    """Eigenvectors of each factor with low_rank."""
    devices: int = 1
    """That train together, each on such a batch: what they exchange is counted."""
    fully_sharded: bool = False
    """Whether parameters, optimizer and factors are divided over them; needs a compiler."""
    options: tuple[OptionName, ...] = OPTION_NAMES
    """Which may be used."""
    compiler: Literal["cpu", "h100", "v5e"] | None = None
    """For which programs are; by default for an H100, whose compiler is asked if it is here."""
    compiled: Literal["chosen", "all", "none"] = "chosen"
    """Sets whose temporaries the compiler is asked for: the training as it stands and the chosen
    one, all, or none; without a compiler they are estimated."""
    compiler_python: str | None = None
    """An interpreter where that compiler is installed; by default this one."""
    json: bool = False
    """Print bytes and words as JSON instead of the table."""
    debug: bool = False
    """Show the full traceback of an error."""


def run_plan(arguments: PlanArguments) -> None:
    """Print the plan.

    Raises:
        MemoryBudgetError: nothing fits; the plan has been printed.
        ValueError: an unknown preset, or a number out of range.
    """
    import jax.numpy as jnp

    from jaxkfac._errors import at_least_one
    from jaxkfac.planning import is_installed, plan_memory, preset

    at_least_one(batch=arguments.batch, tokens=arguments.tokens, max_dense=arguments.max_dense)
    training = preset(
        arguments.preset,
        examples=arguments.batch,
        tokens=arguments.tokens,
        dtype=jnp.dtype(arguments.dtype),
    )
    compiler = arguments.compiler or "h100"
    asked = arguments.compiler or arguments.compiler_python or is_installed(compiler)
    asked = asked or arguments.fully_sharded  # which nothing but a compiler knows
    with _progress() as told, _no_collection():
        plan = plan_memory(
            *training,
            optimizer=_optimizer(arguments, *training),
            device_bytes=arguments.device_bytes,
            host_bytes=arguments.host_bytes,
            headroom=arguments.headroom,
            donate=arguments.donate,
            max_gradients=arguments.max_gradients,
            curvature=arguments.curvature != "none",
            vectors=arguments.curvature == "precondition",
            max_factor_bytes=arguments.max_factor_bytes,
            decay=arguments.decay,
            adapter_rank=arguments.adapter_rank,
            basis_rank=arguments.basis_rank,
            accumulation_steps=arguments.gradient_accumulation_steps,
            accumulator_dtype=arguments.accumulator_dtype,
            accumulator_memory_kind=arguments.accumulator_memory_kind,
            devices=arguments.devices,
            fully_sharded=arguments.fully_sharded,
            options=arguments.options,
            compiler=compiler,
            compiled=arguments.compiled if asked else "none",
            compiler_python=arguments.compiler_python or sys.executable,
            progress=told,
            max_dense=arguments.max_dense,
        )
    print(json.dumps(plan.to_dict(), allow_nan=False) if arguments.json else plan)
    plan.chosen()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A plan keeps its traces: looking through them took a fifth of its time, and freed 4 MB."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is estimated, on standard error: from two seconds on, since most plans are quicker."""
    from rich.console import Console

    console, start, quiet = Console(stderr=True), time.monotonic(), [True]
    now, lock = ["planning"], threading.Lock()

    def show() -> None:
        quiet[0] = False
        if console.is_terminal:
            status.update(now[0])
        else:
            console.print(now[0], highlight=False)

    def told(options: str) -> None:
        with lock:
            now[0] = f"planning: {options}"
            if not quiet[0] or _elapsed(start) >= _QUIET:
                show()

    def is_time() -> None:
        with lock:
            if quiet[0]:
                show()

    timer = threading.Timer(max(_QUIET - _elapsed(start), 0.0), is_time)
    with console.status(now[0]) as status:
        if _QUIET > 0:
            timer.start()
        try:
            yield told
        finally:
            timer.cancel()


def _elapsed(start: float) -> float:
    """Seconds of this process at the least: imports are a part of them."""
    return max(time.process_time(), time.monotonic() - start)


def _optimizer(arguments: PlanArguments, objective: Any, params: Any, batch: Any) -> Any:
    import optax

    from jaxkfac.factors import value_grad_and_factors
    from jaxkfac.optim import kfac

    match arguments.optimizer:
        case "none":
            return None
        case "sgd":
            return optax.sgd(1e-3, momentum=0.9)
        case "adam":
            return optax.adam(1e-3)
    if arguments.curvature != "precondition":
        raise ValueError(f'curvature={arguments.curvature!r}: kfac needs "precondition"')
    stats = value_grad_and_factors(objective, max_dense=arguments.max_dense)
    return kfac(1e-3, like=stats.factor_shapes(params, batch))
