"""`jaxkfac plan`: the memory that a known layout needs, and options by which it fits."""

import contextlib
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from jaxkfac.jobs.cli._paths import MODEL_NAMES, PLANNED_NAMES, check_program, kind_of

# jaxkfac.planning has these names too; importing it imports JAX, for which help must not wait.
OptionName = Literal[
    "accumulation",
    "host",
    "accumulator",
    "remat",
    "half_bases",
    "bf16",
    "host_bases",
    "low_rank",
    "budget",
    "adapters",
    "nf4",
]

_QUIET = 2.0  # seconds


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Plan the memory of a training from shapes: nothing is allocated, no device is asked.

    The table has rows for parameters, gradients, optimizer, activations, factors, bases and
    workspace, and a column for the training as it stands and for each option. The smallest set
    of options that fits is printed below, with its number of accumulation steps. Exit code 2
    means that nothing fits. A T5 and every adapter are planned as `jaxkfac finetune --plan`
    plans them, with the same bytes; full training of a decoder is planned for a common layout.

    Example: full training of a 7B decoder with Adam, and curvature, on 80 GB:
    `jaxkfac plan --preset llama-7b --device-bytes 80GB --batch 4 --tokens 2048`
    """

    device_bytes: str | float
    """Bytes that the device's allocator can hand out: a number, or 80GB, or 74.5GiB."""
    preset: str = "llama-7b"
    """Layout: llama-1b, llama-7b, phi-3-mini, t5-xl or flan-t5-xl."""
    host_bytes: str | float | None = None
    """Bytes of main memory for curvature, in the same forms; no limit by default."""
    headroom: float = 0.1
    """Fraction of the device's bytes to keep free."""
    donate: bool = True
    """Whether a step donates its parameters and its optimizer state."""
    max_gradients: float | None = None
    """Largest cost of a step, in gradients; no limit by default."""
    batch: int = 1
    """Examples per step, or per micro-batch with --gradient-accumulation-steps."""
    tokens: int = 2048
    """Tokens per example; for an encoder-decoder per source and per target."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per step, each of --batch examples."""
    accumulator_dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the accumulated gradients and factors; by default the dtype in which they are
    added."""
    accumulator_memory_kind: Literal["device", "pinned_host"] = "device"
    """Memory that holds the accumulators between micro-batches."""
    train: Literal["all", "adapter"] = "all"
    """Train all parameters, or an adapter beside a frozen base as `jaxkfac finetune` does."""
    remat: bool = False
    """Recompute each block's activations in the backward pass of the training as it stands."""
    optimizer: Literal["none", "sgd", "adam", "adamw", "adafactor", "kfac"] = "adam"
    """Optimizer whose state counts; sgd has momentum, kfac averages and decomposes on the
    device, adamw and adafactor are those of `jaxkfac finetune`."""
    curvature: Literal["precondition", "analyze", "none"] = "precondition"
    """Factors with eigenvectors on the device, with eigenvalues only, or no factors."""
    damping_mode: Literal["exact", "pi", "factored"] = "exact"
    """How kfac damps: exact keeps eigenvectors, the others keep inverses."""
    packed: bool = False
    """Whether factors are one triangle of each matrix, and what kfac keeps of them too."""
    collect: int = 1
    """Groups in which kfac's factors come in turns, one at each step."""
    max_dense: int = 16384
    """Largest side of a layer with a full factor; a larger side has a diagonal."""
    max_factor_bytes: str | float | None = None
    """Bytes of factors on the device; by default what is left over."""
    decay: float = 0.95
    """Decay of averages on the host; near 1 they are in float64."""
    adapter_rank: int = 8
    """Rank of the adapters."""
    basis_rank: int = 512
    """Eigenvectors of each factor with the option low_rank."""
    devices: int = 1
    """Number of devices that train together, each on such a batch; counts what they exchange."""
    fully_sharded: bool = False
    """Whether parameters, optimizer and factors are sharded over the devices; needs a compiler."""
    options: tuple[OptionName, ...] = get_args(OptionName)
    """Options that the plan may use."""
    compiler: Literal["cpu", "h100", "v5e"] | None = None
    """Target of the compiled programs; by default an H100, if its compiler is installed."""
    compiled: Literal["chosen", "all", "none"] = "chosen"
    """Sets of options whose temporaries the compiler counts: the training as it stands and the
    chosen set, all sets, or none; without a compiler they are estimated."""
    compiler_python: str | None = None
    """Python interpreter where that compiler is installed; by default this one."""
    json: bool = False
    """Print bytes and words as JSON instead of the table."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse an interpreter that does not exist, and models that another command plans."""
        is_planned_elsewhere = self.preset in {*MODEL_NAMES} - {*PLANNED_NAMES}
        is_layout = self.preset in {*PLANNED_NAMES, "t5-xl"}
        if is_planned_elsewhere or (Path(self.preset).exists() and not is_layout):
            kind = None if is_planned_elsewhere else kind_of(Path(self.preset))
            raise ValueError(
                f"--preset {self.preset} is {kind or 'no layout of this command'}; `jaxkfac "
                "finetune --plan --model` plans the training of a model that it can name or read"
            )
        if self.compiler_python is not None:
            check_program("--compiler-python", self.compiler_python)


def run_plan(arguments: PlanArguments) -> None:
    """Print the plan.

    Raises:
        MemoryBudgetError: nothing fits; the plan has been printed.
        ValueError: an unknown preset, or a number out of range.
    """
    import jax.numpy as jnp

    from jaxkfac._errors import at_least_one
    from jaxkfac.jobs.cli.finetune._plan import plan_run, run_shapes
    from jaxkfac.planning import is_installed, plan_memory, preset

    at_least_one(
        batch=arguments.batch,
        tokens=arguments.tokens,
        max_dense=arguments.max_dense,
        collect=arguments.collect,
    )
    if arguments.collect > 1 and arguments.optimizer != "kfac":
        raise ValueError(
            f"--collect {arguments.collect}: only --optimizer kfac averages factors in turns"
        )
    if arguments.damping_mode != "exact" and arguments.optimizer != "kfac":
        raise ValueError(
            f"--damping-mode {arguments.damping_mode}: only --optimizer kfac has a damping"
        )
    training = preset(
        arguments.preset,
        examples=arguments.batch,
        tokens=arguments.tokens,
        dtype=jnp.dtype(arguments.dtype),
        remat=arguments.remat,
    )
    compiler = arguments.compiler or "h100"
    asks_compiler = arguments.compiler or arguments.compiler_python or is_installed(compiler)
    asks_compiler = asks_compiler or arguments.fully_sharded  # which nothing but a compiler knows
    options, is_run = arguments.options, _is_run(arguments)
    if arguments.train == "adapter":
        options = tuple(name for name in options if name not in _OF_ALL_PARAMETERS)
    with _progress() as told, _no_collection():
        choices = {name: getattr(arguments, name) for name in _AS_GIVEN} | {
            "curvature": arguments.curvature != "none",
            "vectors": arguments.curvature == "precondition",
            "accumulation_steps": arguments.gradient_accumulation_steps,
            "options": options,
            "compiler": compiler,
            "compiled": arguments.compiled if asks_compiler else "none",
            "compiler_python": arguments.compiler_python or sys.executable,
            "progress": told,
        }
        if is_run:
            others = arguments.packed, arguments.damping_mode != "exact", arguments.collect > 1
            if any(others):
                raise ValueError(
                    "--packed, --damping-mode and --collect: `jaxkfac finetune` has no such "
                    "options, and this is its training; plan all parameters of a decoder with them"
                )
            experiment = _experiment(arguments)
            if arguments.optimizer not in _OF_RUNS:  # else the run's own, and its kind of labels
                optimizer = _optimizer(arguments, *training)
                choices |= {"optimizer": optimizer, "fisher": "empirical"}
            plan = plan_run(experiment, run_shapes(experiment), **choices)
        else:
            optimizer = _optimizer(arguments, *training)
            choices |= {"packed": arguments.packed, "collect": arguments.collect}
            plan = plan_memory(*training, optimizer=optimizer, **choices)
    print(json.dumps(plan.to_dict(), allow_nan=False) if arguments.json else plan)
    if is_run and arguments.optimizer in _OF_RUNS and not arguments.json:
        print(f"the training as it stands: {_finetune_command(arguments)}")
    plan.chosen()


# Options that are arguments of the plan under the same names.
_AS_GIVEN = (
    *("device_bytes", "host_bytes", "headroom", "donate", "max_gradients", "max_factor_bytes"),
    *("decay", "adapter_rank", "basis_rank", "accumulator_dtype", "accumulator_memory_kind"),
    *("devices", "fully_sharded", "max_dense"),
)
# Options that divide or replace the batch, or make adapters: not beside a frozen base.
_OF_ALL_PARAMETERS = ("accumulation", "adapters", "nf4")
_OF_RUNS = ("adamw", "adafactor", "kfac")  # optimizers of `jaxkfac finetune`
_OF_PAIRS = ("t5-xl", "flan-t5-xl")


def _is_run(arguments: PlanArguments) -> bool:
    """Whether `jaxkfac finetune` can run this training."""
    return arguments.train == "adapter" or arguments.preset in _OF_PAIRS


def _experiment(arguments: PlanArguments) -> Any:
    """The run of `jaxkfac finetune` with these sizes."""
    from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning

    kfac = dataclasses.replace(Finetuning().kfac, max_dense=arguments.max_dense)
    optimizer: Any = arguments.optimizer if arguments.optimizer in _OF_RUNS else "adamw"
    of_pairs: dict[str, Any] = (
        {"max_target_length": arguments.tokens} if arguments.preset in _OF_PAIRS else {}
    )
    return Finetuning(
        model="flan-t5-xl" if arguments.preset == "t5-xl" else arguments.preset,
        train=arguments.train,
        batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        accumulator_dtype=arguments.accumulator_dtype or "float32",
        max_length=arguments.tokens,
        dtype=arguments.dtype,
        remat=arguments.remat,
        optimizer=optimizer,
        adapter=AdapterOptions(rank=arguments.adapter_rank),
        kfac=kfac,
        **of_pairs,
    )


def _finetune_command(arguments: PlanArguments) -> str:
    """The command of `jaxkfac finetune` that counts the same training."""
    from jaxkfac.jobs.cli._out_of_memory import flags
    from jaxkfac.jobs.cli.finetune._options import FinetuneArguments

    default = FinetuneArguments()
    pairs = {"data": "wordnet"} if arguments.preset in _OF_PAIRS else {}
    experiment = dataclasses.replace(_experiment(arguments), **pairs)
    words = flags(default, dataclasses.replace(default, experiment=experiment))
    factors = (
        ""
        if arguments.curvature == "none" or arguments.optimizer == "kfac"
        else (", which counts no factors: those of --curvature are planned beside it")
    )
    room = f"--device-bytes {arguments.device_bytes}"
    return f"jaxkfac finetune --plan {room} {' '.join(words)}{factors}"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off: looking through the traces took a fifth of a plan's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Report each estimate on standard error, from two seconds on; most plans are faster."""
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
            with lock:  # if it runs already, it says nothing any more
                quiet[0] = False


def _elapsed(start: float) -> float:
    """Seconds since this process started, at least: importing counts too."""
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
        case "adamw" | "adafactor":
            from jaxkfac.jobs.cli.finetune._problem import one_step_optimizer

            experiment = _experiment(arguments)
            return one_step_optimizer(experiment, experiment.steps, like=lambda: None)
    if arguments.curvature != "precondition":
        raise ValueError(f'curvature={arguments.curvature!r}: kfac needs "precondition"')
    stats = value_grad_and_factors(
        objective,
        max_dense=arguments.max_dense,
        packed=arguments.packed,
        collect=arguments.collect,
    )
    like = stats.factor_shapes(params, batch)
    return kfac(1e-3, like=like, damping_mode=arguments.damping_mode, packed=arguments.packed)
