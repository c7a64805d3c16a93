"""What a program holds beside its arguments and results, from its equations: none is compiled.

A value takes room from the equation that makes it to the last one that reads it, unless a compiler
would compute it where it is read:

- Elementwise results, casts, broadcasts and slices are *fused* into what reads them. They take
  room where a product, a convolution, a sort or a loop reads them, and where several equations
  do, and computing them again would be dear or keep their operands alive.
- A fused result is written over an operand that nobody reads afterwards, unless a library made it.
- A value lies where a result will, if it is not read any more once that is made.
- A scan holds its stacked results from its first iteration on, and one iteration's own values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkfac.planning._equations import DEAR, Equation, EquationList, Value


def live_bytes(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: Sequence[int] = (),
    platform: str = "cuda",
    in_turn: bool = False,
    traced: Any = None,
    only: int | None = None,
) -> int:
    """Most bytes at once beside arguments and results.

    Args:
        fn: Any function that ``jax.jit`` takes.
        args: Arrays or shapes.
        donate_argnums: Arguments that results are written over.
        platform: Of what ``jax.lax.platform_dependent`` chooses.
        in_turn: Whether results are made one after the other, each with all that it needs, as
            a compiler does where they have little in common; else in the order of the trace.
        traced: The ``ClosedJaxpr`` of ``fn`` on ``args``, where it is known.
        only: Of the program that returns the first so many results alone.

    Returns:
        Bytes. A compiler that fuses less, as XLA does for a CPU, allocates more. Scratch that
        libraries allocate by themselves is not among them.
    """
    traced = jax.make_jaxpr(fn)(*args) if traced is None else traced
    program, jaxpr = EquationList(platform), traced.jaxpr
    results = program.expand(jaxpr, [Value() for _ in jaxpr.invars])[:only]
    donated = [x for i in donate_argnums for x in jax.tree.leaves(args[i])]
    kinds = [(x.shape, x.dtype) for x in donated]
    places = []  # of results that are not written over an argument
    for value, var in zip(results, jaxpr.outvars[:only], strict=True):
        kind = (var.aval.shape, getattr(var.aval, "dtype", None))
        if kind in kinds:
            kinds.remove(kind)
        else:
            places.append(value)
    equations = program.ordered(results, depth_first=in_turn)
    return _Lives(equations, results, platform=platform).peak(places)


class _Lives:
    """From when to when values take room.

    Args:
        equations: In the order in which they run.
        results: What they return.
        stacked: Of an iteration, what is copied into stacked arrays as soon as it is made; then
            ``results`` are what the next iteration takes.
        platform: Whose compiler is imitated.
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
        for k, equation in enumerate(equations):
            for v in equation.reads:
                self._readers.setdefault(v, set()).add(k)
        returned = {*results, *(stacked or ())}
        self._held = {
            v for e in equations for v in e.makes if v in returned or self._takes_room(e, v)
        }
        self._follow()
        # Compiled for an H100, the bodies of loops do keep such values; for a CPU, all do.
        if stacked is None and platform != "cpu":
            self._held -= {v for v in self._held - returned if self._is_computed_again(v)}
            self._follow()

    def _follow(self) -> None:
        """Find the last reader of every value."""
        self._known: dict[Value, list[Value]] = {}
        self._last: dict[Value, int] = {}
        for k, equation in enumerate(self._equations):
            if any(v in self._held for v in equation.makes):
                self._last.update(dict.fromkeys(self._sources(equation.reads), k))
        self._last |= dict.fromkeys(self._sources(self._results), len(self._equations))
        for v in self._stacked or ():
            self._last.setdefault(v, v.maker)

    def _is_computed_again(self, value: Value) -> bool:
        """Whether its operands are kept at least as long, so that nothing is gained by it."""
        maker = self._equations[value.maker]
        readers = [self._equations[k] for k in self._readers.get(value, ())]
        if not value.fused or not all(_computes(reader, maker) for reader in readers):
            return False
        end = self._last.get(value, value.maker)
        return all(self._last[source] >= end for source in self._sources(maker.reads))

    def peak(self, places: Sequence[Value] = ()) -> int:
        """Most bytes at once beside what is given and what is returned.

        Args:
            places: Results that have a place of their own.
        """
        inside = self._inside_results(places)
        alive = {v for v in self._held if v in self._last and v not in inside}
        ending: dict[int, list[Value]] = {}
        for v in alive:
            ending.setdefault(self._last[v], []).append(v)
        peak = live = 0
        for k, equation in enumerate(self._equations):
            made = [v for v in equation.makes if v in alive]
            ended = sum(v.nbytes for v in ending.get(k, ()))
            if equation.writes_over:
                sizes = [v.nbytes for v in made]
                for v in ending.get(k, ()):
                    if v.maker < k and v.nbytes in sizes and not self._is_of_library(v):
                        sizes.remove(v.nbytes)
                        live, ended = live - v.nbytes, ended - v.nbytes
            live += sum(v.nbytes for v in made)
            peak = max(peak, live + self._inner_peak(equation))
            live -= ended
        return peak

    def _is_of_library(self, value: Value) -> bool:
        """Whether it is a convolution of cuDNN, which nothing is written over.

        It comes beside the library's scratch, as one part of a result.
        """
        made = self._equations[value.maker].name
        return made == "conv_general_dilated" and self._platform != "cpu"

    def _inner_peak(self, equation: Equation) -> int:
        """Most bytes at once of one iteration, or of the dearest branch, and copies of operands."""
        peaks = []
        for body in equation.bodies:
            order = body.program.ordered([*body.results, *body.stacked], depth_first=False)
            is_scan = equation.name == "scan"
            stacked = body.stacked if is_scan else None
            lives = _Lives(order, body.results, stacked, platform=self._platform)
            peaks.append(lives.peak(() if is_scan else body.results))
        return max(peaks, default=0) + equation.copies

    def _takes_room(self, equation: Equation, value: Value) -> bool:
        readers = [self._equations[k] for k in self._readers.get(value, ())]
        if not value.fused or not all(_computes(reader, equation) for reader in readers):
            return True
        return len(readers) > 1 and not _is_cheap(equation)

    def _sources(self, values: Iterable[Value]) -> list[Value]:
        """What is read for values, once the fused ones are computed where they are read."""
        return list(dict.fromkeys(s for v in values for s in self._sources_of(v)))

    def _sources_of(self, value: Value) -> list[Value]:
        if value.maker < 0 or value in self._held:
            return [value] if value.maker >= 0 else []
        if value not in self._known:
            self._known[value] = self._sources(self._equations[value.maker].reads)
        return self._known[value]

    def _inside_results(self, places: Sequence[Value]) -> set[Value]:
        """Values that take no room of their own, because they lie where a result will."""
        if self._stacked is not None:  # what is fused is written there at once
            return {v for v in self._stacked if v.fused} - set(self._results)
        inside, own = set(self._results), set(places)
        for k in reversed(range(len(self._equations))):
            equation = self._equations[k]
            for v in own.intersection(equation.makes) if equation.writes_over else ():
                for source in self._sources(equation.reads):
                    over = source.nbytes == v.nbytes and self._last[source] == k
                    if over and source not in inside and not self._is_of_library(source):
                        inside.add(source)
                        own.add(source)
                        break
        return inside | self._before_results(inside, places)

    def _before_results(self, inside: set[Value], places: Sequence[Value]) -> set[Value]:
        """The largest first, each in the first place with room: XLA's buffer assignment."""
        end = len(self._equations)
        lives = {v: [(v.maker, end)] for v in places if v.maker >= 0}
        found: set[Value] = set()
        # Most places are too small or made too early; without Python's loop over them.
        order, sizes = list(lives), np.array([v.nbytes for v in lives], np.int64)
        makers = np.array([v.maker for v in lives], np.int64)
        rest = [v for e in self._equations for v in e.makes if v in self._held and v not in inside]
        for v in sorted(rest, key=lambda v: -v.nbytes):
            start, stop = v.maker, self._last.get(v, v.maker)
            for i in np.flatnonzero((sizes >= v.nbytes) & (makers > stop)):
                taken = lives[order[i]]
                if all(stop < a or b < start for a, b in taken):
                    taken.append((start, stop))
                    found.add(v)
                    break
        return found


def _computes(reader: Equation, maker: Equation) -> bool:
    """Whether a reader computes what it reads: a product reads a transposed operand as it is."""
    return reader.fuses or (maker.name == "transpose" and reader.name == "dot_general")


def _is_cheap(equation: Equation) -> bool:
    """Whether a fused result is computed again for each of its readers."""
    made = [v for v in equation.reads if v.maker >= 0]
    largest = max(v.nbytes for v in equation.makes)
    fewer = len(made) <= 1 or sum(v.nbytes for v in made) < largest
    return equation.name not in DEAR and fewer
