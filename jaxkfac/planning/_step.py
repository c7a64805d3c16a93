"""What a step holds and runs beside the gradient: the update, its state, exchanges."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxkfac._errors import CompilerError, JaxkfacError
from jaxkfac.curvature import Eigenbases, Inverses, natural_gradient
from jaxkfac.factors import Factors, exchanged_bytes
from jaxkfac.interception import body_of, call_kind, open_jaxpr, partition
from jaxkfac.optim import AdaptationState, KfacState, KfeAdamState, ScaleByBasesState
from jaxkfac.planning._program import ExtraInputs, TrainingProgram
from jaxkfac.planning._shapes import nbytes, nodes_of
from jaxkfac.planning._temporaries import Needs

# ---------------- what an optimizer would hold, from the shapes of what it trains


class Optimizer(NamedTuple):
    """What an optimizer holds.

    Attributes:
        state: Shapes of what ``init`` would allocate.
        nbytes: Without factors, bases and accumulators.
        averages: How many sets of factors it holds.
        bases: Bytes of its eigenbases, or inverses of factors; where it holds any, it decomposes
            inside its update.
        accumulators: Bytes of what it accumulates over micro-batches, 0 if it does not.
    """

    state: PyTree
    nbytes: int
    averages: int
    bases: int
    accumulators: int


def optimizer_state(
    tx: optax.GradientTransformation | None,
    params: PyTree,
    nbytes: Callable[[PyTree], int] = nbytes,
) -> Optimizer:
    """What ``tx.init`` would allocate, in bytes as ``nbytes`` counts them."""
    if tx is None:
        return Optimizer((), 0, 0, 0, 0)
    whole = state = jax.eval_shape(tx.init, params)
    multi = optax.MultiStepsState  # jk.multi_steps holds one, too
    accumulators = nbytes([x.acc_grads for x in nodes_of(state, multi)])
    state = jax.tree.map(
        lambda x: x._replace(acc_grads=None) if isinstance(x, multi) else x,
        state,
        is_leaf=lambda x: isinstance(x, multi),
    )
    kept = (Factors, Eigenbases, Inverses)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kept))
    return Optimizer(
        whole,
        nbytes([x for x in leaves if not isinstance(x, kept)]),
        sum(isinstance(x, Factors) for x in leaves),
        nbytes([x for x in leaves if isinstance(x, Eigenbases | Inverses)]),
        accumulators,
    )


# ---------------- bytes that devices exchange in a step of a data-parallel training


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


# ---------------- what a step runs beside the gradient: the update, alone or in one program with
# the gradient


Found = TypeVar("Found")

# What a transformation raises that needs more than a plan has: a line search needs the value.
_NOT_TRACED = (TypeError, ValueError, KeyError, AttributeError, JaxkfacError)


class Step(NamedTuple):
    """Gradient and update in one program.

    Attributes:
        fn: ``fn(trained, state, batch, inputs)``.
        args: Shapes.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def step_of(
    program: TrainingProgram,
    tx: optax.GradientTransformation,
    state: Any,
    *,
    factors: bool,
    accumulates: bool = False,
) -> Step:
    """Gradient and update in one program.

    Args:
        program: The program.
        tx: The optimizer.
        state: Shapes of its state.
        factors: Whether factors are gathered and handed to the optimizer.
        accumulates: Whether the optimizer is told the number of loss terms, to weigh sums by.
    """
    update = optax.with_extra_args_support(tx).update
    adapts, none_come = bool(nodes_of(state, AdaptationState)), _no_factors(state)

    def step(trained: Any, state: Any, batch: Any, inputs: ExtraInputs) -> Any:
        extra: dict[str, Any] = {"terms": jnp.float32(1)} if accumulates else {}
        if factors:
            value, grads, found = program.collect(trained, batch, inputs)
            extra["factors"] = found
            if adapts:
                of_state = {"state": inputs.state}
                extra |= program.collector.adaptation(trained, batch, inputs.key, **of_state)
        else:
            value, grads = program.gradient(trained, batch, inputs)
            extra |= none_come
        updates, state = update(grads, state, trained, **extra)
        return optax.apply_updates(trained, updates), state, value

    trained, batch, extra = program.arguments
    return Step(step, (trained, program.divided(state), batch, extra))


def _no_factors(state: Any) -> dict[str, None]:
    """What says that none come, to an optimizer that requires to be told."""
    requires = nodes_of(state, (KfacState, KfeAdamState))
    return {"factors": None} if requires else {}


def step_needs(program: TrainingProgram, step: Step, *, donate: bool) -> Needs | str:
    """What gradient and update need in one program; gradients are among it.

    Args:
        program: The program.
        step: Of it.
        donate: Whether parameters and state are written over.

    Returns:
        That, or why the update cannot be traced here.
    """
    donated = (0, 1) * donate
    return traced(lambda: program.temporaries(step.fn, *step.args, donate_argnums=donated))


def update_alone(
    program: TrainingProgram,
    tx: optax.GradientTransformation | None,
    state: Any,
    *,
    bases: Eigenbases | None,
    donate: bool,
) -> Needs | str:
    """What the update needs, given gradients and perhaps bases to precondition them with.

    Or why the update cannot be traced here.
    """
    if tx is None and bases is None:
        return Needs(0)
    update = optax.with_extra_args_support(tx or optax.identity()).update
    reads_bases = bool(nodes_of(state, ScaleByBasesState))

    def run(trained: Any, state: Any, grads: Any, bases: Any) -> Any:
        if bases is not None and not reads_bases:
            grads = natural_gradient(grads, bases, damping=1.0, missing="identity")
        extra: dict[str, Any] = {"bases": bases} if reads_bases else {}
        extra |= _no_factors(state)
        updates, state = update(grads, state, trained, **extra)
        return optax.apply_updates(trained, updates), state

    args = program.divided((program.trained, state, program.trained, bases))
    how = {"donate_argnums": (0, 1) * donate, "in_turn": True}
    return traced(lambda: program.temporaries(run, *args, **how))


def traced(measure: Callable[[], Found]) -> Found | str:
    """What is measured of an update, or why it cannot be traced."""
    try:
        return measure()
    except CompilerError:
        raise
    except _NOT_TRACED as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
