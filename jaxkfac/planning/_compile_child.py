"""Compile one StableHLO program for a target in a separate process; see ``_compilers``.

It runs by path under any Python that has jax and the target's compiler, so it imports nothing of
this library. It reads a request from standard input and writes the answer as the last line of
standard output, both as JSON.
"""

import base64
import dataclasses
import importlib.util
import json
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    request = json.load(sys.stdin)
    if not installed(request["module"]):
        print(json.dumps({"missing": request["module"]}))
        return
    jax.config.update("jax_enable_x64", True)  # the program fixes its dtypes itself
    print(json.dumps(compile_bytes(request)))


def installed(module: str) -> bool:
    """Whether a module can be imported; the package around it may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def compile_bytes(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the program and read XLA's memory analysis of it."""
    places = shardings(request)
    inputs = [
        jax.ShapeDtypeStruct(*_aval(a), sharding=sharding)
        for a, sharding in zip(request["inputs"], places["input_specs"], strict=True)
    ]
    outputs = [jax.ShapeDtypeStruct(*_aval(a)) for a in request["outputs"]]
    how = {"keep_unused": True, "out_shardings": places["output_specs"]}

    def like(*args: Any) -> list[Any]:
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    # Exported.serialize needs flatbuffers. Replacing the module of a program with the same types
    # needs nothing, because the module itself is StableHLO's portable form.
    template = jax.export.export(jax.jit(like, **how), platforms=[request["platform"]])
    exported = dataclasses.replace(
        template(*inputs), mlir_module_serialized=base64.b64decode(request["program"])
    )
    donated = tuple(request["donated"])
    step = jax.jit(lambda *args: exported.call(*args), donate_argnums=donated, **how)
    lowered = step.lower(*inputs)
    start = time.process_time()
    compiled = lowered.compile()
    cpu_seconds = time.process_time() - start
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotImplementedError("this compiler does not say what a program allocates")
    return {
        "temporaries": analysis.temp_size_in_bytes,
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "donated": analysis.alias_size_in_bytes,
        "cpu_seconds": cpu_seconds,
        "text": compiled.as_text() if request["mesh"] else "",
    }


def shardings(request: dict[str, Any]) -> dict[str, Any]:
    """Shardings of arguments and results; ``None`` lets the compiler choose those of results."""
    devices = target_devices(request["topology"])
    if request["mesh"] is None:
        alone = jax.sharding.SingleDeviceSharding(devices[0])
        return {"input_specs": [alone] * len(request["inputs"]), "output_specs": None}
    names, sizes = request["mesh"]
    device_grid = np.asarray(devices[: math.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(device_grid, tuple(names))

    def places(specs: list[Any] | None) -> Any:
        of = jax.sharding.PartitionSpec
        return specs and [jax.sharding.NamedSharding(mesh, of(*spec)) for spec in specs]

    return {key: places(request[key]) for key in ("input_specs", "output_specs")}


def target_devices(topology: dict[str, Any] | None) -> Any:
    """Devices described by a topology, for compilation; without one, those of the CPU."""
    if topology is None:
        return jax.devices("cpu")
    from jax.experimental import topologies  # noqa: TID251 (the only way to compile for no device)

    return topologies.get_topology_desc(**topology).devices


def _aval(described: list[Any]) -> tuple[tuple[int, ...], Any]:
    shape, dtype = described
    return tuple(shape), jnp.dtype(dtype)


if __name__ == "__main__":
    main()
