"""Compile one StableHLO program for a target, in a process of its own; see ``_compilers``.

Run by path with any Python that has jax and the target's compiler: nothing of this library is
imported. The request comes on standard input, the answer leaves as the last line of standard
output, both as JSON.
"""

import base64
import dataclasses
import importlib.util
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp


def main() -> None:
    request = json.load(sys.stdin)
    if not installed(request["module"]):
        print(json.dumps({"missing": request["module"]}))
        return
    jax.config.update("jax_enable_x64", True)  # the program's dtypes are fixed, whatever they are
    print(json.dumps(compile_bytes(request)))


def installed(module: str) -> bool:
    """Whether a module can be imported; a package around it may be missing, too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def compile_bytes(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the program and read XLA's own account of its memory."""
    device = target_device(request["topology"])
    there = jax.sharding.SingleDeviceSharding(device)
    inputs = [jax.ShapeDtypeStruct(*_aval(a), sharding=there) for a in request["inputs"]]
    outputs = [jax.ShapeDtypeStruct(*_aval(a)) for a in request["outputs"]]

    def like(*args: Any) -> list[Any]:
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    # Exported.serialize needs flatbuffers. A program of these types whose module is replaced
    # needs nothing: the module itself is StableHLO's portable form.
    template = jax.export.export(jax.jit(like, keep_unused=True), platforms=[request["platform"]])
    exported = dataclasses.replace(
        template(*inputs), mlir_module_serialized=base64.b64decode(request["program"])
    )
    step = jax.jit(lambda *args: exported.call(*args), donate_argnums=tuple(request["donated"]))
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
    }


def target_device(topology: dict[str, Any] | None) -> Any:
    """A device to compile for, described by a topology; without one, the CPU itself."""
    if topology is None:
        return jax.devices("cpu")[0]
    from jax.experimental import topologies  # noqa: TID251 (the only way to compile for no device)

    return topologies.get_topology_desc(**topology).devices[0]


def _aval(described: list[Any]) -> tuple[tuple[int, ...], Any]:
    shape, dtype = described
    return tuple(shape), jnp.dtype(dtype)


if __name__ == "__main__":
    main()
