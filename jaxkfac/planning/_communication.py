"""Bytes that devices exchange in a step of a data-parallel training."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.factors import exchanged_bytes
from jaxkfac.interception import body_of, call_kind, open_jaxpr, partition
from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._shapes import nbytes

# Primitives by which the devices of a mesh axis talk to each other, inside of ``jax.shard_map``.
_COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all "
    "ppermute".split()
)


def exchanged(
    program: TrainingProgram,
    statistics: Any,
    step: Any = None,
    *,
    micro_batches: int = 1,
    platform: str,
) -> Mapping[str, int]:
    """Bytes of what collectives return on each device, by what it is.

    Each device has some of the examples and all of the parameters. Gradients and statistics are
    then sums over devices: one all-reduce of each.

    Args:
        program: The program.
        statistics: Of its layers, ``None`` where no factors are gathered.
        step: The jaxpr of gradient and update, if they are one program: collectives that stand
            in it, as of decompositions that ``distribute=`` divides, are counted in a step in
            which all of them are due.
        micro_batches: Of a step; each is summed over devices by itself.
        platform: Whose products of rows are counted.
    """
    grads = nbytes(partition(program.trained)[0])
    value = sum(v.aval.size * v.aval.dtype.itemsize for v in program.value_jaxpr.jaxpr.outvars[:1])
    factors = 0 if statistics is None else exchanged_bytes(statistics, platform)
    rows = {
        "gradients": micro_batches * (grads + value),
        "factors": micro_batches * factors,
        "in the step": 0 if step is None else _collectives(step.jaxpr),
    }
    return {row: size for row, size in rows.items() if size}


def _collectives(jaxpr: Any) -> int:
    """Bytes of results of the collectives that stand in a program; of branches the dearest."""
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    if eqn.primitive.name in _COLLECTIVES:
        return sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    match call_kind(eqn):
        case "cond":
            return max(_collectives(open_jaxpr(x)[0]) for x in eqn.params["branches"])
        case "while":  # nobody knows how often it turns
            return _collectives(open_jaxpr(eqn.params["body_jaxpr"])[0])
        case "scan":
            return eqn.params["length"] * _collectives(body_of(eqn)[0])
        case None:
            return 0
        case _:
            return _collectives(body_of(eqn)[0])
