"""One step compiled for a target: its bytes, and what its text says of libraries and devices."""

import re
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies  # noqa: TID251 (the only way to compile for no device)
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkfac.planning import TARGETS

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_CALL = re.compile(r'= \(?(\w+)\[([\d,]*)\].* custom-call\(.*custom_call_target="([^"]+)"')


def devices(target: str, count: int) -> Any:
    """Devices to compile for."""
    how = dict(TARGETS[target].topology)
    if target == "h100":
        how["topology"] = f"1x1x{count}"
    return topologies.get_topology_desc(**how).devices[:count]


def compile_step(
    fn: Any, args: tuple[Any, ...], target: str, layout: str = "one device"
) -> dict[str, Any]:
    """Compile a step and describe the result.

    Args:
        fn: The step.
        args: Shapes.
        target: Its name.
        layout: ``"one device"``, or ``"data parallel"`` or ``"fully sharded"`` over eight.
    """
    args = _placed(args, target, layout)
    start = time.process_time()
    lowered = jax.jit(fn).lower(*args)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "trace_cpu_s": round(traced - start, 2),
        "compile_cpu_s": round(done - traced, 2),
        **described(text),
    }


def described(text: str) -> dict[str, Any]:
    """What a compiled program's text says; figures are of one device.

    ``scratch`` is what LAPACK's ``syevd`` takes beside matrix and eigenvalues when it wants
    vectors: at least 1 + 6 n + 2 n^2 elements ("lwork" of ssyevd, LAPACK Users' Guide).
    cuSOLVER's has the same interface, and says at run time how much it takes. Calls follow
    one another, so the largest counts.
    """
    collectives = dict.fromkeys(COLLECTIVES, 0)
    for found in _COLLECTIVE.finditer(text):
        collectives[found[1]] += 1
    solves, scratch, dnn = [], 0, 0
    for dtype, shape, name in _CALL.findall(text):
        dnn += "cudnn" in name
        if "syev" in name:
            *batch, n, _ = map(int, shape.split(","))
            solves.append(f"{int(np.prod(batch, dtype=int))} x {n}")
            scratch = max(
                scratch, (1 + 6 * n + 2 * n * n) * np.dtype(dtype.replace("f", "float")).itemsize
            )
    return {
        "scratch": scratch,
        "solves": sorted(solves, key=lambda s: -int(s.split()[-1])),
        "cudnn_calls": dnn,
        "collectives": {name: count for name, count in collectives.items() if count},
    }


def _placed(args: tuple[Any, ...], target: str, layout: str) -> tuple[Any, ...]:
    """The shapes with shardings."""
    if layout == "one device":
        there = SingleDeviceSharding(devices(target, 1)[0])
        return jax.tree.map(lambda x: _with(x, there), args)
    mesh = Mesh(np.array(devices(target, 8)), ("data",))

    def sharded(x: Any) -> Any:
        """Token ids by sequence; state along the last axis that eight devices divide, or whole."""
        axes: list[Any] = [None] * x.ndim
        if x.dtype == np.int32 and x.ndim == 2:
            axes[0] = "data"
        elif layout == "fully sharded" and (d := [d for d, n in enumerate(x.shape) if n % 8 == 0]):
            axes[d[-1]] = "data"
        return _with(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(sharded, args)


def _with(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
