"""Temporaries of a program: counted from its equations, or reported by a compiler."""

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkfac._errors import CompilerError
from jaxkfac.memory import divided_shardings
from jaxkfac.planning._compilers import TargetName, collective_bytes, compiled_bytes, target_of
from jaxkfac.planning._equations import DEAR, FUSES, WRITES_OVER, Equation, EquationList, Value
from jaxkfac.planning._shapes import mesh_here, mesh_of, on_devices

# ---------------- counting temporaries from the equations, without compiling
#
# A value takes memory from the equation that makes it to the last one that reads it, unless a
# compiler would compute it inside its readers:
#
# - Elementwise results, casts, broadcasts and slices are *fused* into their readers. They take
#   memory if a product, a convolution, a sort or a loop reads them, or if several equations do and
#   recomputing them would be expensive or keep their operands alive.
# - A fused result overwrites an operand that is not read afterwards, unless a library made it.
# - A value uses the memory of a later result, if its last reader comes before that result.
# - A scan holds its stacked results from its first iteration on, and one iteration's own values.


def live_bytes(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: Sequence[int] = (),
    platform: str = "cuda",
    in_turn: bool = False,
    traced: Any = None,
    only: int | None = None,
) -> int:
    """Peak bytes beside arguments and results.

    Args:
        fn: A function for ``jax.jit``.
        args: Arrays or shapes.
        donate_argnums: Arguments that results may overwrite.
        platform: The platform that ``jax.lax.platform_dependent`` selects for.
        in_turn: Whether results are computed one after the other, each with everything it needs, as
            a compiler does if they have little in common; otherwise in the order of the trace.
        traced: The ``ClosedJaxpr`` of ``fn`` on ``args``, if available.
        only: Count the program that returns only the first ``only`` results.

    Returns:
        Bytes. A compiler that fuses less, such as XLA for a CPU, allocates more. Scratch that
        libraries allocate themselves is not included.
    """
    traced = jax.make_jaxpr(fn)(*args) if traced is None else traced
    program, jaxpr = EquationList(platform), traced.jaxpr
    results = program.run(jaxpr, traced.consts, [Value() for _ in jaxpr.invars])[:only]
    donated = [x for i in donate_argnums for x in jax.tree.leaves(args[i])]
    kinds = [(x.shape, x.dtype) for x in donated]
    places = []  # results that do not overwrite an argument
    for value, var in zip(results, jaxpr.outvars[:only], strict=True):
        kind = (var.aval.shape, getattr(var.aval, "dtype", None))
        if kind in kinds:
            kinds.remove(kind)
        else:
            places.append(value)
    equations = program.ordered(results, depth_first=in_turn)
    return _Lives(equations, results, platform=platform).peak(places)


_NBYTES = operator.attrgetter("nbytes")


class _Lives:
    """The lifetimes of values in memory.

    Args:
        equations: The equations in the order in which they run.
        results: The values they return.
        stacked: For an iteration: values copied into stacked arrays as soon as they are computed;
            ``results`` then go to the next iteration.
        platform: Platform whose compiler is imitated.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        results: Sequence[Value],
        stacked: Sequence[Value] | None = None,
        *,
        platform: str,
    ) -> None:
        self._equations, self._results, self._stacked = equations, results, stacked
        self._platform = platform
        self._readers: dict[Value, set[int]] = {}
        self._names_of_readers: dict[Value, set[str]] = {}
        for k, equation in enumerate(equations):
            for v in equation.reads:
                self._readers.setdefault(v, set()).add(k)
                self._names_of_readers.setdefault(v, set()).add(equation.name)
        returned = {*results, *(stacked or ())}
        self._in_memory = {
            v for e in equations for v in e.makes if v in returned or self._takes_room(v)
        }
        self._follow()
        # On an H100, compiled bodies of loops keep such values; on a CPU, all programs do.
        if stacked is None and platform != "cpu":
            self._in_memory -= {v for v in self._in_memory - returned if self._is_computed_again(v)}
            self._follow()

    def _follow(self) -> None:
        """Find the last reader of every value."""
        self._cached_sources: dict[Value, list[Value]] = {}
        self._last: dict[Value, int] = {}
        for k, equation in enumerate(self._equations):
            if not self._in_memory.isdisjoint(equation.makes):
                self._last.update(dict.fromkeys(self._sources(equation.reads), k))
        self._last |= dict.fromkeys(self._sources(self._results), len(self._equations))
        for v in self._stacked or ():
            self._last.setdefault(v, v.maker)

    def _is_computed_again(self, value: Value) -> bool:
        """Whether its operands live at least as long, so that keeping it gains nothing."""
        if not self._is_fused(value):
            return False
        end, reads = self._last.get(value, value.maker), self._equations[value.maker].reads
        return all(self._last[source] >= end for source in self._sources(reads))

    def peak(self, places: Sequence[Value] = ()) -> int:
        """Peak bytes beside inputs and returned values.

        Args:
            places: Results with their own memory.
        """
        inside = self._inside_results(places)
        alive = {v for v in self._in_memory if v in self._last and v not in inside}
        beginning: dict[int, list[Value]] = {}
        ending: dict[int, list[Value]] = {}
        for v in alive:
            beginning.setdefault(v.maker, []).append(v)
            ending.setdefault(self._last[v], []).append(v)
        peak = live = 0
        for k, equation in enumerate(self._equations):
            sizes = list(map(_NBYTES, beginning.get(k, ())))
            made, ended = sum(sizes), sum(map(_NBYTES, ending.get(k, ())))
            if equation.name in WRITES_OVER:
                for v in ending.get(k, ()):
                    if v.maker < k and v.nbytes in sizes and not self._is_of_library(v):
                        sizes.remove(v.nbytes)
                        live, ended = live - v.nbytes, ended - v.nbytes
            live += made
            inner = self._inner_peak(equation) if equation.bodies else 0
            peak = max(peak, live + inner + equation.copies)
            live -= ended
        return peak

    def _is_of_library(self, value: Value) -> bool:
        """Whether it is a cuDNN convolution, whose result cannot be overwritten.

        The result is part of a tuple with the library's scratch.
        """
        primitive = self._equations[value.maker].name
        return primitive == "conv_general_dilated" and self._platform != "cpu"

    def _inner_peak(self, equation: Equation) -> int:
        """Peak bytes of one iteration, or of the most expensive branch."""
        peaks = []
        for body in equation.bodies:
            order = body.program.ordered([*body.results, *body.stacked], depth_first=False)
            stacked = body.stacked if equation.is_scan else None
            lives = _Lives(order, body.results, stacked, platform=self._platform)
            peaks.append(lives.peak(() if equation.is_scan else body.results))
        return max(peaks)

    def _is_fused(self, value: Value) -> bool:
        """Whether all its readers compute it by fusion; a product reads a transpose directly."""
        if not value.fused:
            return False
        names = self._names_of_readers.get(value, set())
        if self._equations[value.maker].name == "transpose":
            names = names - {"dot_general"}
        return names <= FUSES

    def _takes_room(self, value: Value) -> bool:
        if not self._is_fused(value):
            return True
        is_shared = len(self._readers.get(value, ())) > 1
        return is_shared and not _is_cheap(self._equations[value.maker])

    def _sources(self, values: Iterable[Value]) -> list[Value]:
        """The values in memory that are read, once fused ones are computed inside their readers."""
        sources: dict[Value, None] = {}
        for v in values:
            if v in self._in_memory:
                sources[v] = None
            elif v.maker >= 0:
                if v not in self._cached_sources:
                    self._cached_sources[v] = self._sources(self._equations[v.maker].reads)
                sources |= dict.fromkeys(self._cached_sources[v])
        return list(sources)

    def _inside_results(self, places: Sequence[Value]) -> set[Value]:
        """Values without memory of their own, because they use that of a later result."""
        if self._stacked is not None:  # fused values are written to the stacked arrays directly
            return {v for v in self._stacked if v.fused} - set(self._results)
        inside, reusable = set(self._results), set(places)
        for k in reversed(range(len(self._equations))):
            equation = self._equations[k]
            for v in reusable.intersection(equation.makes) if equation.name in WRITES_OVER else ():
                for source in self._sources(equation.reads):
                    over = source.nbytes == v.nbytes and self._last[source] == k
                    if over and source not in inside and not self._is_of_library(source):
                        inside.add(source)
                        reusable.add(source)
                        break
        return inside | self._before_results(inside, places)

    def _before_results(self, inside: set[Value], places: Sequence[Value]) -> set[Value]:
        """Place values, the largest first, into the first free slot, as XLA's buffer assignment."""
        end = len(self._equations)
        lives = {v: [(v.maker, end)] for v in places if v.maker >= 0}
        placed: set[Value] = set()
        # Most slots are too small or start too early; NumPy filters these without a Python loop.
        order, sizes = list(lives), np.array([v.nbytes for v in lives], np.int64)
        makers = np.array([v.maker for v in lives], np.int64)
        remaining = [
            v for e in self._equations for v in e.makes if v in self._in_memory and v not in inside
        ]
        for v in sorted(remaining, key=_NBYTES, reverse=True):
            start, stop = v.maker, self._last.get(v, v.maker)
            for i in np.flatnonzero((sizes >= v.nbytes) & (makers > stop)):
                for first, last in lives[order[i]]:
                    if first <= stop and start <= last:
                        break
                else:
                    lives[order[i]].append((start, stop))
                    placed.add(v)
                    break
        return placed


def _is_cheap(equation: Equation) -> bool:
    """Whether a fused result is recomputed for each of its readers."""
    operands = [v for v in equation.reads if v.maker >= 0]
    largest = max(v.nbytes for v in equation.makes)
    fewer = len(operands) <= 1 or sum(v.nbytes for v in operands) < largest
    return equation.name not in DEAR and fewer


# ---------------- counting or compiling


_FAST: Any = {"xla_backend_optimization_level": 0}  # of LLVM, which does not affect allocations


class Needs(NamedTuple):
    """Memory needs of a program beside its arguments and results.

    Attributes:
        temporaries: Bytes of temporaries.
        collectives: Bytes that collectives return, by kind; empty unless it was compiled for
            several devices.
    """

    temporaries: int
    collectives: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Computes the memory needs of programs.

    Attributes:
        target: Target of the programs; ``None`` is this process's device.
        python: An interpreter that has the target's compiler.
        compiled: Whether to use the compiler; otherwise the bytes are counted from the equations.
        timeout: Time limit for a compiler in a child process, seconds.
        factor: Factor by which counted bytes are multiplied.
    """

    target: TargetName | None = None
    python: str | Path = sys.executable
    compiled: bool = False
    timeout: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.target is not None:
            target_of(self.target)

    @property
    def title(self) -> str:
        """Description of the device."""
        if self.target is not None:
            return target_of(self.target).title
        return "this CPU" if self.platform == "cpu" else jax.devices()[0].device_kind

    @property
    def platform(self) -> str:
        """JAX's name for the platform that is planned for."""
        return _own_platform() if self.target is None else target_of(self.target).platform

    def __call__(
        self,
        step: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        in_turn: bool = False,
        traced: Any = None,
        only: int | None = None,
    ) -> Needs:
        """The needs of ``step`` on these shapes; on a mesh, its results are sharded over it.

        The last three arguments are those of ``live_bytes`` and are not used when compiling.

        Raises:
            CompilerNotFoundError: the target's compiler is not installed; says what to install.
            CompilerError: the compiler fails or exceeds the time limit.
        """
        if not self.compiled:
            how = {"donate_argnums": donate_argnums, "in_turn": in_turn}
            how |= {"traced": traced, "only": only}
            counted = live_bytes(step, *args, platform=self.platform, **how)
            return Needs(round(self.factor * counted))
        return self._ask(step, *args, donate_argnums=donate_argnums)

    def _ask(self, step: Callable[..., Any], *args: Any, donate_argnums: Sequence[int]) -> Needs:
        mesh = mesh_of(args)
        if not self._is_here(1 if mesh is None else mesh.size):
            report = compiled_bytes(
                *(step, *args),
                donate_argnums=donate_argnums,
                out_shardings=_shardings_of_results(step, args),
                target=self.target or "cpu",
                python=self.python,
                timeout=self.timeout,
            )
            return Needs(report.temporaries, report.collectives)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh_here(mesh)):
            args = args if mesh is None else on_devices(args, mesh_here(mesh))
            # As a list: JAX would fill classes of results with shardings.
            places = jax.tree.leaves(_shardings_of_results(step, args)) or None
            flat = lambda *args: jax.tree.leaves(step(*args))
            run = jax.jit(flat, donate_argnums=donate_argnums, out_shardings=places)
            return self._compiled(run.lower(*args), several=mesh is not None)

    def _is_here(self, devices: int) -> bool:
        """Whether this process compiles for this many devices; otherwise a child process does.

        Raises:
            CompilerError: neither can.
        """
        is_own_platform = self.platform == _own_platform() and self.target in (None, "cpu")
        if is_own_platform and len(jax.devices()) < devices and self.platform != "cpu":
            raise CompilerError(
                f'this process has {len(jax.devices())} of {devices} devices: compiler="h100" '
                "compiles without any"
            )
        return is_own_platform and len(jax.devices()) >= devices

    def _compiled(self, lowered: Any, *, several: bool) -> Needs:
        options = _FAST if self.platform == "cpu" else None
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(f"compiling for {self.title}: {error}".splitlines()[0]) from error
        analysis = compiled.memory_analysis()
        assert analysis is not None  # compilers for CPUs, GPUs and TPUs provide one
        sent = collective_bytes(compiled.as_text()) if several else {}
        return Needs(int(analysis.temp_size_in_bytes), sent)


def _shardings_of_results(step: Callable[..., Any], args: Any) -> Any:
    """The planned shardings of the results; ``None`` on one device."""
    mesh = mesh_of(args)
    if mesh is None:
        return None
    with jax.sharding.use_abstract_mesh(mesh):
        results = jax.eval_shape(step, *args)
    first = jax.tree.leaves(args)[0].sharding.mesh
    return divided_shardings(results, first, first.axis_names)


# Largest relative errors of totals (without scratch) from counted temporaries, and from temporaries
# calibrated by compiling the training as it stands, in `python -m benchmarks.plan`. Equations do
# not show everything: on a CPU, kernels take constants as full arrays (44 of 142 MiB when training
# adapters); on a GPU, autotuning splits long products into partial sums, and values that a branch
# leaves unchanged are copied (30 % of a staggered K-FAC step).
_WITHIN = {"cpu": 0.35, "cuda": 0.31}
_CALIBRATED_WITHIN = {"cpu": 0.22, "cuda": 0.15}
_UNKNOWN = 0.5  # for a platform without measurements


def within(platform: str, *, calibrated: bool) -> float:
    """Largest relative error of an estimated total."""
    return (_CALIBRATED_WITHIN if calibrated else _WITHIN).get(platform, _UNKNOWN)


def _own_platform() -> str:
    backend = jax.default_backend()
    return backend if backend != "gpu" else "cuda"
