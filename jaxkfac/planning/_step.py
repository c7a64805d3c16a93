"""What a step runs beside the gradient: the update, alone or in one program with the gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import optax

from jaxkfac._errors import CompilerError, JaxkfacError
from jaxkfac.curvature import Eigenbases, natural_gradient
from jaxkfac.optim import AdaptationState, KfacState, KfeAdamState, ScaleByBasesState
from jaxkfac.planning._program import ExtraInputs, TrainingProgram
from jaxkfac.planning._shapes import nodes_of
from jaxkfac.planning._temporaries import Needs

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
