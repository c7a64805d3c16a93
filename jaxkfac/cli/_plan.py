"""`jaxkfac plan`: what a known layout needs, and what to change so that it fits."""

import dataclasses
import json
from typing import Any, Literal

from jaxkfac.planning import OPTION_NAMES, OptionName


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Plan the memory of a training from shapes: nothing is allocated, no device is asked.

    Rows for parameters, gradients, optimizer, activations, factors, bases and workspace; a
    column for the training as it stands and one for each option; the smallest set of options that
    fits, and its number of accumulation steps. Exit code 2 says that nothing fits.

    For example, full training of a 7B decoder with Adam, and curvature, on 80 GB:
    `jaxkfac plan --preset llama-7b --device-bytes 80e9 --batch 4 --tokens 2048`
    """

    device_bytes: float
    """What the device's allocator can hand out."""
    preset: str = "llama-7b"
    """Layout: llama-7b, phi-3-mini or t5-xl."""
    host_bytes: float | None = None
    """Main memory for curvature; no limit by default."""
    batch: int = 1
    """Examples per step, or per micro-batch with --gradient-accumulation-steps."""
    tokens: int = 2048
    """Of an example; of its source and of its target for t5-xl."""
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
    max_factor_bytes: float | None = None
    """Budget of factors on the device; by default what is left over."""
    adapter_rank: int = 8
    """Of the adapters."""
    options: tuple[OptionName, ...] = OPTION_NAMES
    """Which may be used."""
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
    from rich.console import Console

    from jaxkfac._checks import at_least_one
    from jaxkfac.planning import plan_memory, preset

    at_least_one(batch=arguments.batch, tokens=arguments.tokens, max_dense=arguments.max_dense)
    training = preset(
        arguments.preset,
        examples=arguments.batch,
        tokens=arguments.tokens,
        dtype=jnp.dtype(arguments.dtype),
    )
    budget = arguments.max_factor_bytes
    with Console(stderr=True).status("compiling what the plan asks for, a minute or two for 7B"):
        plan = plan_memory(
            *training,
            optimizer=_optimizer(arguments, *training),
            device_bytes=arguments.device_bytes,
            host_bytes=arguments.host_bytes,
            curvature=arguments.curvature != "none",
            vectors=arguments.curvature == "precondition",
            max_factor_bytes=None if budget is None else int(budget),
            adapter_rank=arguments.adapter_rank,
            accumulation_steps=arguments.gradient_accumulation_steps,
            accumulator_dtype=arguments.accumulator_dtype,
            accumulator_memory_kind=arguments.accumulator_memory_kind,
            options=arguments.options,
            max_dense=arguments.max_dense,
        )
    print(json.dumps(plan.to_dict(), allow_nan=False) if arguments.json else plan)
    plan.chosen()


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
