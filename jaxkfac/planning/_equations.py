"""The equations of a program as one flat list, with calls expanded and equal ones merged."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxkfac._interpreter import Interpreter
from jaxkfac._jaxpr_compat import bodies_of, body_of, call_kind, is_call, is_loop, scan_counts

# Computed once even with several readers, because recomputing them would cost time.
DEAR = frozenset(
    "exp exp2 log log1p expm1 tanh logistic erf erf_inv erfc sin cos tan pow sqrt rsqrt cbrt div "
    "rem atan2 digamma lgamma random_bits threefry2x32".split()
)
# Operations that a compiler fuses elementwise into their readers.
_FUSED = DEAR | frozenset(
    "add add_any sub mul neg abs sign max min and or xor not eq ne lt le gt ge select_n clamp "
    "convert_element_type broadcast_in_dim iota integer_pow is_finite round floor ceil square copy "
    "tile shift_left shift_right_logical shift_right_arithmetic slice pad concatenate rev real "
    "imag transpose reduce_precision dynamic_slice nextafter".split()
)
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split()
)
# Operations that can compute their operands by fusion.
FUSES = _FUSED | _REDUCTIONS
# Operations that may write over an operand after its last use.
WRITES_OVER = FUSES | frozenset(
    "dynamic_update_slice scatter scatter-add scatter-mul eigh cholesky".split()
)
_VIEWS = frozenset("reshape squeeze stop_gradient sharding_constraint".split())


@dataclasses.dataclass(eq=False)
class Value:
    """A result of an equation, or an input.

    Attributes:
        nbytes: Size in bytes.
        maker: Index of its equation; -1 for an input.
        fused: Whether a compiler would compute it inside its readers.
        branch: For the index of a choice by platform, the branch that is taken.
    """

    nbytes: int = 0
    maker: int = -1
    fused: bool = False
    branch: int | None = None


_MAKER = operator.attrgetter("maker")


@dataclasses.dataclass(eq=False)
class Body:
    """The body of a loop or a conditional.

    Attributes:
        program: Its equations.
        results: Values passed to the next iteration, or to the program around it.
        stacked: Values copied into stacked arrays as soon as they are computed.
        inputs: For a scan: the values that stand for the operands it reads.
        carried: For a scan: the values that stand for ``results`` of the previous iteration.
    """

    program: "EquationList"
    results: Sequence[Value]
    stacked: Sequence[Value] = ()
    inputs: Sequence[Value] = ()
    carried: Sequence[Value] = ()


@dataclasses.dataclass(eq=False)
class Equation:
    """An equation of the flat list.

    Attributes:
        name: Name of its primitive.
        reads: Its operands.
        makes: Its results.
        bodies: Its bodies, for a loop or a conditional.
        copies: Bytes of operands that are copied for it.
    """

    name: str
    reads: Sequence[Value]
    makes: Sequence[Value]
    bodies: Sequence[Body] = ()
    copies: int = 0

    @property
    def is_scan(self) -> bool:
        return self.name == "scan"

    def drop_unread(self, read: set[Value]) -> None:
        """For a scan, drop the results that are not in ``read``, and what only they need."""
        (body,), number = self.bodies, len(self.bodies[0].results)
        stacked = [
            v for v, result in zip(body.stacked, self.makes[number:], strict=True) if result in read
        ]
        kept_carries = {k for k, result in enumerate(self.makes[:number]) if result in read}
        while True:
            needed = body.program.needed([*(body.results[k] for k in kept_carries), *stacked])
            more = {k for k, v in enumerate(body.carried) if v in needed}
            if more <= kept_carries:
                break
            kept_carries |= more
        inputs = list(zip(self.reads, body.inputs, strict=True))
        self.reads = [v for v, inner in inputs if inner in needed]
        inner_inputs = [inner for _, inner in inputs if inner in needed]
        results, carried = (
            [of[k] for k in sorted(kept_carries)] for of in (body.results, body.carried)
        )
        self.bodies = [Body(body.program, results, stacked, inner_inputs, carried)]
        read_stacked = [v for v in self.makes[number:] if v in read]
        self.makes = [*(self.makes[k] for k in sorted(kept_carries)), *read_stacked]


class EquationList(Interpreter[Value]):
    """Equations in the order of the trace.

    Args:
        platform: The platform that ``jax.lax.platform_dependent`` selects for.
    """

    def __init__(self, platform: str) -> None:
        self.equations: list[Equation] = []
        self._platform = platform
        self._equal: dict[Any, Sequence[Value]] = {}

    def constant(self, operand: Any, value: Any) -> Value:
        return Value()

    def equation(self, eqn: Any, ins: list[Value], position: int, within: Any) -> Sequence[Value]:
        """Append an equation, or the equations of a call, and return its results."""
        name, kind, reads = eqn.primitive.name, call_kind(eqn), ins
        if is_call(eqn):
            return self.run(*body_of(eqn), reads)
        if name == "platform_index":
            return [Value(branch=_branch_of(self._platform, eqn.params["platforms"]))]
        if kind == "cond" and reads[0].branch is not None:
            return self.run(*bodies_of(eqn)[reads[0].branch], reads[1:])
        if name in _VIEWS:
            return reads[: len(eqn.outvars)]
        if name == "optimization_barrier":  # new values, so that later equations stay distinct
            return [self._append(name, [x], [x.nbytes], fused=True)[0] for x in reads]
        equal = _signature(eqn, kind, reads)
        if equal not in self._equal:
            if is_loop(eqn):
                read = self._without_constants(eqn, reads)
                bodies, reads = [self._iteration(eqn, read)], [reads[k] for k in read]
            else:
                bodies = [self._body(*body) for body in bodies_of(eqn)]
            sizes = list(map(self._nbytes, eqn.outvars))
            self._equal[equal] = self._append(name, reads, sizes, name in _FUSED, bodies)
            if name == "conv_general_dilated" and self._platform == "cpu":
                self.equations[-1].copies = _transposed_bytes(eqn)
        return self._equal[equal]

    def _append(
        self,
        name: str,
        reads: Sequence[Value],
        sizes: Sequence[int],
        fused: bool,
        bodies: Sequence[Body] = (),
    ) -> list[Value]:
        makes = [Value(size, len(self.equations), fused) for size in sizes]
        self.equations.append(Equation(name, reads, makes, bodies))
        return makes

    def _nbytes(self, var: Any) -> int:
        """Bytes of a variable; a CPU computes bfloat16 in float32 and keeps both.

        A gradient of 4 scanned blocks: 18.9 MB, where float32 takes 17.0 and float16 11.6.
        """
        shape, dtype = getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)
        if shape is None or dtype is None:
            return 0
        widened = self._platform == "cpu" and dtype == jnp.bfloat16
        return math.prod(shape) * (4 if widened else dtype.itemsize)

    def _body(self, jaxpr: Any, consts: Sequence[Any]) -> Body:
        program = EquationList(self._platform)
        return Body(program, program.run(jaxpr, consts, [Value() for _ in jaxpr.invars]))

    def _iteration(self, eqn: Any, read: Sequence[int]) -> Body:
        """One iteration of a scan: carries and constants are inputs, xs are fused slices."""
        inner, consts = body_of(eqn)
        num_consts, num_carry = scan_counts(eqn)
        program = EquationList(self._platform)
        inner_inputs = [Value() for _ in inner.invars[: num_consts + num_carry]]
        for var in inner.invars[num_consts + num_carry :]:
            inner_inputs += program._append("dynamic_slice", [], [self._nbytes(var)], fused=True)
        outs = program.run(inner, consts, inner_inputs)
        inputs, carried = (
            [inner_inputs[k] for k in read],
            inner_inputs[num_consts : num_consts + num_carry],
        )
        return Body(program, outs[:num_carry], outs[num_carry:], inputs, carried)

    def _without_constants(self, eqn: Any, reads: list[Value]) -> list[int]:
        """Indices of the operands a scan reads; constant arrays are never materialized."""
        num_consts, num_carry = scan_counts(eqn)
        carry = range(num_consts, num_consts + num_carry)
        return [i for i, v in enumerate(reads) if i in carry or not self._is_constant(v)]

    def _is_constant(self, value: Value) -> bool:
        if value.maker < 0:
            return True
        reads = self.equations[value.maker].reads
        return value.fused and all(self._is_constant(v) for v in reads if v.nbytes)

    def needed(self, values: Sequence[Value]) -> set[Value]:
        """All values from which ``values`` are computed, including themselves."""
        result: set[Value] = set()
        pending = list(values)
        while pending:
            if (v := pending.pop()) not in result:
                result.add(v)
                pending += self.equations[v.maker].reads if v.maker >= 0 else ()
        return result

    def _drop_unread(self, results: Sequence[Value]) -> None:
        """Drop scan results that nobody reads, as a compiler does."""
        read = set(results)
        for equation in reversed(self.equations):
            if read.isdisjoint(equation.makes):
                continue
            if equation.is_scan:
                equation.drop_unread(read)
            read.update(equation.reads)

    def ordered(self, results: Sequence[Value], *, depth_first: bool) -> list[Equation]:
        """The equations that the results need; values are renumbered accordingly.

        Args:
            results: The results to return.
            depth_first: Order by result, each with everything it needs; otherwise in the order of
                the trace.
        """
        self._drop_unread(results)
        order: list[int] = []
        visited: set[int] = set()
        for result in results:
            stack = [(result.maker, False)]
            while stack:
                k, ready = stack.pop()
                if ready:
                    order.append(k)
                elif k >= 0 and k not in visited:
                    visited.add(k)
                    stack.append((k, True))
                    stack += [(v.maker, False) for v in reversed(self.equations[k].reads)]
        self.equations = [self.equations[k] for k in (order if depth_first else sorted(order))]
        for k, equation in enumerate(self.equations):
            for v in equation.makes:
                v.maker = k
        return self.equations


def _signature(eqn: Any, kind: str | None, reads: Sequence[Value]) -> Any:
    """A key that is equal for equations with the same computation on the same operands."""
    if eqn.effects or kind or -1 in map(_MAKER, reads):
        return object()
    return eqn.primitive.name, tuple(map(id, reads)), repr(eqn.params)


def _transposed_bytes(eqn: Any) -> int:
    """Bytes of a convolution's operands whose layout differs from that of a CPU's kernels.

    In the derivative with respect to the kernel, the examples take the place of the features.
    """
    signal, kernel = (x.aval for x in eqn.invars)
    numbers, last = eqn.params["dimension_numbers"], len(signal.shape) - 1
    spatial = tuple(range(1, last))
    kernel_specs = ((0, last, *spatial), (last, last - 1, *(d - 1 for d in spatial)))
    specs = zip((signal, kernel), (numbers.lhs_spec, numbers.rhs_spec), kernel_specs, strict=True)
    return sum(
        math.prod(x.shape) * x.dtype.itemsize for x, spec, mine in specs if tuple(spec) != mine
    )


def _branch_of(platform: str, choices: Sequence[Sequence[str] | None]) -> int:
    """Index of the branch for a platform; ``None`` stands for all other platforms."""
    return next(i for i, names in enumerate(choices) if names is None or platform in names)
