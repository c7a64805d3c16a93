"""Memory that a device's compiler allocates for a program, found without the device."""

import base64
import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import export

from jaxkfac._errors import CompilerError, CompilerNotFoundError, one_of
from jaxkfac.curvature import solver_scratch
from jaxkfac.planning._compile_child import installed
from jaxkfac.planning._shapes import mesh_of

# ---------------- library calls and communication in the text of a compiled program


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"c128": 16, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "f32": 4, "s32": 4, "u32": 4}
_BYTES |= {"bf16": 2, "f16": 2, "s16": 2, "u16": 2}  # all others: 1
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
# An asynchronous collective is a pair; its second half has the shapes of the result.
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start|-done)?\(")
_SOLVE = re.compile(r" = (.*?) custom-call\(.*custom_call_target=\"[^\"]*(syev|potrf|cholesky)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Solve(NamedTuple):
    """Matrices of one size that one call solves."""

    kind: str  # "eigh" or "cholesky"
    batch: int
    n: int
    itemsize: int

    @property
    def scratch(self) -> int:
        """Scratch bytes by cuSOLVER's formula; a Cholesky factorization needs none in LAPACK."""
        if self.kind == "cholesky":
            return 0
        return solver_scratch(self.n, self.batch, self.itemsize)


class Work(NamedTuple):
    """The work of one device in one run.

    Attributes:
        solves: Number of times each call is made.
        calls: Number of collectives by kind; those in a loop count once per iteration.
        bytes: Bytes of their results, counted in the same way.
        libraries: Number of calls to cuDNN.
    """

    solves: Counter[Solve]
    calls: Counter[str]
    bytes: Counter[str]
    libraries: int

    def plus(self, added: "Work", times: int = 1) -> "Work":
        """The sum of this work and ``times`` the other."""
        counters: list[Any] = [
            mine + Counter({key: times * count for key, count in theirs.items()})
            for mine, theirs in zip(self[:3], added[:3], strict=True)
        ]
        solves, calls, nbytes = counters
        return Work(solves, calls, nbytes, self.libraries + times * added.libraries)

    @property
    def cubes(self) -> int:
        """Sum of the cubes of the sizes of all matrices solved."""
        return sum(times * solve.batch * solve.n**3 for solve, times in self.solves.items())


NOTHING = Work(Counter(), Counter(), Counter(), 0)


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes that collectives return on each device, by kind; see :func:`program_work`."""
    return {kind: totals["bytes"] for kind, totals in program_work(text)["collectives"].items()}


def program_work(text: str) -> dict[str, Any]:
    """Count a program's library calls and communication, on one device.

    For a conditional, the branch with the most solving counts; if each device takes its own branch,
    the result is that of the busiest device. A loop counts once per iteration, if the compiler
    knows their number. Solves run one after the other, so only the largest scratch counts.
    """
    bodies, entry = _computations(text)
    work = _work(entry, bodies, {})
    matrices: Counter[tuple[str, int]] = Counter()
    for solve, times in work.solves.items():
        matrices[solve.kind, solve.n] += times * solve.batch
    sizes = sorted(matrices.items(), key=lambda item: (item[0][0] != "eigh", -item[0][1]))
    return {
        "scratch": max((solve.scratch for solve in work.solves), default=0),
        "solves": [
            f"{count} x {n}" if kind == "eigh" else f"{kind} {count} x {n}"
            for (kind, n), count in sizes
        ],
        "cubes": work.cubes,
        "cudnn_calls": work.libraries,
        "collectives": {
            kind: {"count": work.calls[kind], "bytes": work.bytes[kind]}
            for kind in COLLECTIVES
            if work.calls[kind]
        },
    }


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := _HEAD.match(line):
            lines = bodies[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _work(name: str, bodies: Mapping[str, list[str]], cache: dict[str, Work]) -> Work:
    if name not in cache:
        total = NOTHING
        for line in bodies.get(name, ()):
            total = total.plus(_of_line(line))
            turns = int(trips[1]) if (trips := _TRIPS.search(line)) else 1
            for called in [] if "-done(" in line else _CALLED.findall(line):
                total = total.plus(_work(called, bodies, cache), turns)
            several = _BRANCHES.search(line)
            branches = several[1].replace("%", "").split(", ") if several else []
            ways = [_work(way, bodies, cache) for way in branches or _TWO_BRANCHES.findall(line)]
            if ways:
                total = total.plus(max(ways, key=lambda w: (w.cubes, sum(w.bytes.values()))))
        cache[name] = total
    return cache[name]


def _of_line(line: str) -> Work:
    match = _COLLECTIVE.search(line)
    if match and match[3] != "-start":
        return NOTHING._replace(
            calls=Counter([match[2]]), bytes=Counter({match[2]: _size(match[1])})
        )
    if match := _SOLVE.search(line):
        (dtype, shape), kind = _SHAPE.findall(match[1])[0], match[2]
        *batch, n, _ = map(int, shape.split(","))
        solve = Solve("eigh" if kind == "syev" else "cholesky", math.prod(batch), n, _BYTES[dtype])
        return NOTHING._replace(solves=Counter([solve]))
    return NOTHING._replace(libraries="custom-call" in line and "__cudnn" in line)


def _size(types: str) -> int:
    """Bytes of the arrays in a type, which may be a tuple."""
    return sum(
        _BYTES.get(dtype, 1) * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape in _SHAPE.findall(types)
    )


# ---------------- asking a compiler


TargetName = Literal["cpu", "h100", "v5e"]


@dataclasses.dataclass(frozen=True)
class CompilerTarget:
    """A device to compile programs for.

    Attributes:
        title: Description.
        platform: JAX's name for its platform.
        module: A module that is importable where its compiler is installed.
        install: Command that installs the compiler.
        environment: Environment variables for the compiling process, set before JAX is imported.
        topology: Arguments of ``jax.experimental.topologies.get_topology_desc``; ``None`` for
            the CPU, which needs none.
    """

    title: str
    platform: str
    module: str
    install: str
    environment: Mapping[str, str]
    topology: Mapping[str, str] | None

    def of(self, count: int) -> "CompilerTarget":
        """This target with ``count`` devices in a single process.

        Raises:
            CompilerError: the topology does not have a GPU's form, so its devices are fixed.
        """
        if count == 1:
            return self
        if self.topology is None:
            return dataclasses.replace(
                self, environment={**self.environment, "JAX_NUM_CPU_DEVICES": str(count)}
            )
        if "topology" not in self.topology:
            raise CompilerError(
                f"compiling for {count} devices of {self.title}: its topology describes no such "
                'number; "h100" and "cpu" can be any'
            )
        return dataclasses.replace(self, topology={**self.topology, "topology": f"1x1x{count}"})


class CompiledBytes(NamedTuple):
    """Memory of one program in bytes on one device, as its compiler reports it.

    Attributes:
        temporaries: Bytes beside arguments and results, without scratch that a library
            (cuSOLVER, cuDNN) allocates at run time.
        arguments: Bytes of all arguments, donated or not.
        outputs: Bytes of all results; results that reuse a donated argument are counted in both.
        donated: Bytes of results that reuse arguments.
        cpu_seconds: Processor time of the compilation.
        collectives: Bytes that collectives return, by kind (``"all-gather"``, ...); those in a
            loop count once per iteration. Empty for one device.
    """

    temporaries: int
    arguments: int
    outputs: int
    donated: int
    cpu_seconds: float
    collectives: Mapping[str, int] = MappingProxyType({})

    @property
    def peak(self) -> int:
        """Peak bytes of all of the above, with reused memory counted once."""
        return self.temporaries + self.arguments + self.outputs - self.donated


def _h100() -> dict[str, str]:
    text = Path(__file__).with_name("h100.txtpb").read_text()
    return {"platform": "cuda", "target_config": text, "topology": "1x1x1"}


TARGETS: Mapping[TargetName, CompilerTarget] = {
    "cpu": CompilerTarget("this CPU", "cpu", "jax", "jax", {"JAX_PLATFORMS": "cpu"}, None),
    "h100": CompilerTarget(
        title="NVIDIA H100 SXM5 80 GB",
        platform="cuda",
        module="jax_plugins.xla_cuda12",
        install=(
            f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
            f"jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12"
        ),
        environment={
            "JAX_PLATFORMS": "",  # the plugin must be allowed to register
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs no CUDA libraries
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # there is no device to time on
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # keeps an existing GPU free
        },
        topology=_h100(),
    ),
    "v5e": CompilerTarget(
        title="TPU v5e",
        platform="tpu",
        module="libtpu",
        install="pip install libtpu",
        environment={
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",  # skips the metadata server
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
        },
        topology={"platform": "tpu", "topology_name": "v5e:2x2"},
    ),
}


def target_of(name: str) -> CompilerTarget:
    """The target with a name.

    Raises:
        ValueError: there is no such target; lists those that exist.
    """
    one_of("target", name, get_args(TargetName))
    return TARGETS[name]  # pyright: ignore[reportArgumentType]


def is_installed(target: str) -> bool:
    """Whether this interpreter has a target's compiler."""
    return installed(target_of(target).module)


def compiled_bytes(
    fn: Callable[..., Any],
    *args: Any,
    target: str | CompilerTarget,
    donate_argnums: int | Sequence[int] = (),
    out_shardings: Any = None,
    python: str | Path = sys.executable,
    timeout: float | None = None,
) -> CompiledBytes:
    """Compile a function for devices that need not exist here, and return its memory.

    The function is lowered in this process for the target's platform, and its StableHLO is compiled
    in a child process. This process may therefore use any backend, and only the child needs the
    compiler. The bytes equal those of ``jax.jit(fn).lower(*args).compile()`` on the target.

    Args:
        fn: A function for ``jax.jit``, or its result.
        args: Arrays or shapes (``jax.ShapeDtypeStruct``) on one device; or only shapes on one mesh
            (a ``jax.sharding.AbstractMesh`` suffices), for as many devices.
        target: Name of a target, ``"cpu"``, ``"h100"`` or ``"v5e"``, or your own.
        donate_argnums: Arguments that the results may reuse.
        out_shardings: On a mesh, a sharding for each result; by default the compiler chooses.
        python: An interpreter with jax and the target's compiler; it does not need jaxkfac.
        timeout: Time limit for the child, seconds.

    Raises:
        ValueError: the target is unknown.
        CompilerNotFoundError: ``python`` does not have the target's compiler; the message says
            what to install.
        CompilerError: the compiler fails or exceeds the time limit.

    Memory:
        The compiler's own memory, in the child; no argument is allocated.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxkfac.planning import compiled_bytes
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> compiled_bytes(lambda x: x @ x, x, target="cpu").outputs
        262144
    """
    mesh = mesh_of(args, all_or_none=True)
    to = target_of(target) if isinstance(target, str) else target
    to = to if mesh is None else to.of(mesh.size)
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    donated = {range(len(args))[number] for number in numbers}  # those below 0 count from the end
    shapes = jax.eval_shape(lambda *xs: xs, *args) if mesh is None else args
    places = None if out_shardings is None else jax.tree.leaves(out_shardings)
    # As a list: JAX would fill registered result classes with shardings, and with placeholders.
    flat = lambda *args: jax.tree.leaves(fn(*args))
    traced = jax.jit(flat, keep_unused=True, out_shardings=places)
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        lowered = export.export(traced, platforms=[to.platform])(*shapes)
    owners = [number for number, arg in enumerate(shapes) for _ in jax.tree.leaves(arg)]
    request = {
        "module": to.module,
        "platform": to.platform,
        "topology": None if to.topology is None else dict(to.topology),
        "inputs": list(map(_described, lowered.in_avals)),
        "outputs": list(map(_described, lowered.out_avals)),
        "donated": [leaf for leaf, number in enumerate(owners) if number in donated],
        "program": base64.b64encode(lowered.mlir_module_serialized).decode(),
        "mesh": None,
    }
    if mesh is not None:
        request["mesh"] = [mesh.axis_names, mesh.axis_sizes]
        request["input_specs"] = [tuple(x.sharding.spec) for x in jax.tree.leaves(args)]
        request["output_specs"] = places and [tuple(sharding.spec) for sharding in places]
    answer = _ask(request, to, python, timeout)
    sent = collective_bytes(answer.pop("text"))
    return CompiledBytes(**answer, collectives=sent)


def _described(aval: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an argument or result as in the lowered program."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval.shape, "bool" if aval.dtype == jax.dtypes.float0 else aval.dtype.name


def _ask(
    request: dict[str, Any], to: CompilerTarget, python: str | Path, timeout: float | None
) -> dict[str, Any]:
    """Run the child and return its answer."""
    child = Path(__file__).with_name("_compile_child.py")
    try:
        done = subprocess.run(
            [str(python), "-P", str(child)],  # -P: do not import from the child's folder
            input=json.dumps(request),
            env={**os.environ, **to.environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except OSError as error:
        raise CompilerNotFoundError(
            f"{python} does not start ({error.strerror}): name the Python of an environment that "
            f"compiles for {to.title}; install what it takes with: {to.install}"
        ) from None
    except subprocess.TimeoutExpired:
        raise CompilerError(
            f"compiling for {to.title}: no result after {timeout:g} s; raise timeout="
        ) from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise CompilerError(
            f"compiling for {to.title} ended with status {done.returncode}: {' '.join(last)}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    if "missing" in answer:
        raise CompilerNotFoundError(
            f"{python} cannot compile for {to.title}: it has no `{answer['missing']}`; "
            f"install it with: {to.install}"
        )
    return answer
