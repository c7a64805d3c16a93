"""The rest of a step beside the gradient: the update, optimizer state, exchanged bytes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxkfac._arguments import ArrayTree, partition
from jaxkfac._errors import CompilerError, JaxkfacError
from jaxkfac._jaxpr_compat import bodies_of, num_iterations
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, Inverses, natural_gradient
from jaxkfac.factors import exchanged_bytes
from jaxkfac.optim import AdaptationState, KfacState, KfeAdamState, ScaleByBasesState
from jaxkfac.planning._program import ExtraInputs, TrainingProgram
from jaxkfac.planning._shapes import nbytes, nodes_of
from jaxkfac.planning._temporaries import Needs

# ---------------- the optimizer's state, from shapes


class PlannedOptimizer(NamedTuple):
    """Memory of an optimizer.

    Attributes:
        state: Shapes of what ``init`` would allocate.
        nbytes: Bytes without factors, bases and accumulators.
        averages: Bytes of averages of factors in the state, which may be packed.
        bases: Bytes of its eigenbases or inverses of factors; if it has any, it decomposes inside
            its update.
        accumulators: Bytes of its sums over micro-batches; 0 if it does not accumulate.
    """

    state: ArrayTree
    nbytes: int
    averages: int
    bases: int
    accumulators: int


def optimizer_state(
    tx: optax.GradientTransformation | None,
    params: ArrayTree,
    nbytes: Callable[[ArrayTree], int] = nbytes,
) -> PlannedOptimizer:
    """The memory that ``tx.init`` would allocate, with bytes counted by ``nbytes``."""
    if tx is None:
        return PlannedOptimizer((), 0, 0, 0, 0)
    full_state = state = jax.eval_shape(tx.init, params)
    multi = optax.MultiStepsState  # jk.multi_steps contains one too
    accumulators = nbytes([x.acc_grads for x in nodes_of(state, multi)])
    state = jax.tree.map(
        lambda x: x._replace(acc_grads=None) if isinstance(x, multi) else x,
        state,
        is_leaf=lambda x: isinstance(x, multi),
    )
    counted_classes = (Factors, Eigenbases, Inverses)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, counted_classes))
    return PlannedOptimizer(
        full_state,
        nbytes([x for x in leaves if not isinstance(x, counted_classes)]),
        nbytes([x for x in leaves if isinstance(x, Factors)]),
        nbytes([x for x in leaves if isinstance(x, Eigenbases | Inverses)]),
        accumulators,
    )


# ---------------- exchanged bytes of a data-parallel step


# Primitives by which the devices of a mesh axis communicate inside ``jax.shard_map``.
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
    """Bytes that collectives return on each device, by purpose.

    Each device has some of the examples and all parameters. Gradients and statistics are then sums
    over devices, with one all-reduce for each.

    Args:
        program: The program.
        statistics: Statistics of its layers, ``None`` if no factors are gathered.
        step: The jaxpr of gradient and update, if they are one program. Its collectives, such as
            those of decompositions divided by ``distribute=``, are counted for a step in which all
            of them run.
        micro_batches: Micro-batches per step; each is summed over devices separately.
        platform: Platform whose products of rows are counted.
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
    """Bytes that the collectives in a program return.

    The most expensive branch of a ``cond`` counts, and one round of a ``while``.
    """
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    if eqn.primitive.name in _COLLECTIVES:
        return sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    bodies = [_collectives(body) for body, _ in bodies_of(eqn)]
    return num_iterations(eqn) * max(bodies, default=0)


# ---------------- the program of the update, alone or with the gradient


Found = TypeVar("Found")

# Errors of transformations that need more than a plan has, such as a line search.
_NOT_TRACED = (TypeError, ValueError, KeyError, AttributeError, JaxkfacError)


class Step(NamedTuple):
    """Gradient and update as one program, or the update alone.

    Attributes:
        fn: ``fn(trained, state, batch, inputs)``, for an update alone with ``grads, factors``.
        args: Shapes of the arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def with_gradient(update: Step, program: TrainingProgram, *, factors: bool) -> Step:
    """Gradient and update as one program, with the update from :func:`update_of`."""

    def step(trained: Any, state: Any, batch: Any, inputs: ExtraInputs) -> Any:
        if factors:
            value, grads, factors_of_step = program.collect(trained, batch, inputs)
        else:
            (value, grads), factors_of_step = program.gradient(trained, batch, inputs), None
        return *update.fn(trained, state, batch, inputs, grads, factors_of_step), value

    return Step(step, update.args[:4])


def update_of(
    program: TrainingProgram,
    tx: optax.GradientTransformation,
    state: Any,
    *,
    factors: bool,
    accumulates: bool = False,
) -> Step:
    """Build the update alone, ``fn(trained, state, batch, inputs, grads, factors)``.

    Args:
        program: The program.
        tx: The optimizer.
        state: Shapes of its state.
        factors: Whether factors are gathered and passed to the optimizer.
        accumulates: Whether to pass the number of loss terms, by which sums are weighted.
    """
    update = optax.with_extra_args_support(tx).update
    adapts, none_come = bool(nodes_of(state, AdaptationState)), _no_factors(state)

    def run(
        trained: Any, state: Any, batch: Any, inputs: ExtraInputs, grads: Any, collected: Any
    ) -> Any:
        extra: dict[str, Any] = {"terms": jnp.float32(1)} if accumulates else {}
        if factors:
            extra["factors"] = collected
            if adapts:
                of_state = {"state": inputs.state}
                extra |= program.collector.adaptation(trained, batch, inputs.key, **of_state)
        else:
            extra |= none_come
        updates, state = update(grads, state, trained, **extra)
        return optax.apply_updates(trained, updates), state

    trained, batch, extra = program.arguments
    collected = program.divided(program.factors) if factors else None
    args = trained, program.divided(state), batch, extra, trained, collected
    return Step(run, args)


def _no_factors(state: Any) -> dict[str, None]:
    """Arguments that declare the absence of factors, for optimizers that require them."""
    requires = nodes_of(state, (KfacState, KfeAdamState))
    return {"factors": None} if requires else {}


def step_needs(program: TrainingProgram, step: Step, *, donate: bool) -> Needs | str:
    """Memory needs of gradient and update in one program, including the gradients.

    Args:
        program: The program.
        step: Its step.
        donate: Whether parameters and state are donated.

    Returns:
        The needs, or why the update cannot be traced.
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
    """Memory needs of the update, given gradients and optionally bases for preconditioning.

    Returns an explanation instead if the update cannot be traced.
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
    """The result of a measurement of an update, or why it cannot be traced."""
    try:
        return measure()
    except CompilerError:
        raise
    except _NOT_TRACED as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
