"""One step compiled for a target: its bytes, its time, and what its text says."""

import functools
import hashlib
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies  # noqa: TID251 (the only way to compile for no device)
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkfac.memory import divided_shardings
from jaxkfac.planning import TARGETS, program_work


@functools.cache
def devices(target: str, count: int) -> Any:
    """Devices to compile for, and a compiler that has been used: its first product is slower."""
    how = dict(TARGETS[target].topology)
    if target == "h100":
        how["topology"] = f"1x1x{count}"
    found = topologies.get_topology_desc(**how).devices[:count]
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=SingleDeviceSharding(found[0]))
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(matrix).compile()
    return found


def lowered_step(
    fn: Any, args: tuple[Any, ...], donated: tuple[int, ...], target: str, layout: str
) -> tuple[Any, float]:
    """A step lowered for a target, and the CPU seconds of that.

    Args:
        fn: The step.
        args: Shapes.
        donated: Numbers of the arguments that are donated.
        target: Its name.
        layout: ``"one device"``, or ``"data parallel"`` or ``"fully sharded"`` over eight.
    """
    shapes, args = args, _placed(args, target, layout)
    places = None
    if layout == "fully sharded":  # as without it the compiler leaves results whole on each device
        results = jax.eval_shape(fn, *shapes)
        places = divided_shardings(results, _mesh(target), "data")
    start = time.process_time()
    jitted = jax.jit(fn, out_shardings=places, donate_argnums=donated)
    return jitted.lower(*args), time.process_time() - start


def fingerprint(lowered: Any, target: str) -> str:
    """Of the program and the description of the device: the same, compiled again, is the same."""
    described = repr(sorted(TARGETS[target].topology.items()))
    return hashlib.sha256((lowered.as_text() + described).encode()).hexdigest()[:16]


def compiled_step(lowered: Any) -> dict[str, Any]:
    """Compile a step and describe the result; see also ``program_work``."""
    start = _cpu_seconds()
    compiled = lowered.compile()
    seconds = _cpu_seconds() - start
    memory = compiled.memory_analysis()
    return {
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "compile_cpu_s": round(seconds, 2),
        **program_work(compiled.as_text()),
    }


def _cpu_seconds() -> float:
    """Of this process and of those it waited for: ptxas is one of its own."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _placed(args: tuple[Any, ...], target: str, layout: str) -> tuple[Any, ...]:
    """The shapes with shardings."""
    if layout == "one device":
        there = SingleDeviceSharding(devices(target, 1)[0])
        return jax.tree.map(lambda x: _with(x, there), args)
    mesh = _mesh(target)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), args)
    state = divided_shardings(args, mesh, "data") if layout == "fully sharded" else whole

    def sharded(x: Any, there: Any) -> Any:
        is_batch = x.dtype == np.int32 and x.ndim == 2  # token ids, by sequence
        return _with(x, NamedSharding(mesh, PartitionSpec("data")) if is_batch else there)

    return jax.tree.map(sharded, args, state)


def _mesh(target: str) -> Mesh:
    return Mesh(np.array(devices(target, 8)), ("data",))


def _with(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
