"""The table of a model's layers, as collectors of factors see them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxkfac._arguments import ArrayTree
from jaxkfac.factors._model_call import ModelCall
from jaxkfac.factors._objective import Objective, arguments
from jaxkfac.factors._program import BEHIND_COMPUTED, Program
from jaxkfac.interception import LayerTable, trace_layers


def find_layers(
    fn: Callable[..., Any],
    params: ArrayTree,
    *args: Any,
    layers: str | None = None,
    max_dense: int = 16384,
    experts: str | None = None,
    **named: Any,
) -> LayerTable:
    """Find every place where a parameter meets data in a linear operation.

    Args:
        fn: A :class:`jaxkfac.Objective` or a scalar loss, with ``(params, batch)`` as in a call of
            :func:`jaxkfac.value_grad_and_factors`; or any function ``fn(params, *args)``, such as
            the apply function of a Flax, Haiku or Equinox model. Shapes suffice: nothing is
            computed.
        params: Parameters; arrays or ``jax.ShapeDtypeStruct``, or NF4 (``jk.nf4``).
        *args: The other arguments, as arrays or ``jax.ShapeDtypeStruct``. A single tuple is
            unpacked if the function takes that many, as an ``Objective`` unpacks its inputs.
        layers: Full-match pattern over layer names; ``None`` is all.
        max_dense: A side with more features is stored as a diagonal.
        experts: Full-match pattern over parameter paths. If a free axis of a parameter can be read
            as outputs or as a stack of experts (``bti,eio->ebto``), the parameters that match are
            read as a stack. Shared axes always are.
        **named: Arguments of ``fn`` by name, in the same forms: ``key=``, ``state=``.

    Returns:
        A ``LayerTable``; ``print`` it for the coverage report. For an objective or a loss, its
            ``problems`` are what :func:`jaxkfac.value_grad_and_factors` raises for.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> table = jk.find_layers(
        ...     lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        ...     {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((5, 3)))
        >>> table["w"].in_features, table["w"].bias.path
        (3, 'b')
    """
    finding: Any = {"layers": layers, "max_dense": max_dense, "experts": experts}
    if isinstance(fn, Objective):
        return _of_objective(fn, params, args, finding, **named)
    if len(args) == 1:
        _, *unpacked = arguments(fn, params, *args)
        args = tuple(unpacked)
    known_names = named.keys() <= {"key", "state"}
    if len(args) == 1 and known_names and (outputs := _scalar_loss(fn, params, args, named)):
        call = ModelCall(params, args[0], named.get("key"), named.get("state"))
        has_aux = len(outputs) > 1 + ("state" in named)
        program = Program(fn, finding, cover=False, second_pass=True, has_aux=has_aux)
        return program.traced(call).table
    table = trace_layers(fn, params, *args, **finding, **named)
    # An apply function: whether examples meet is asked of the leading axis of its outputs.
    met = table.meeting() if table.second_pass and table.meeting is not None else ""
    if not met:
        return table
    return table.without_second_pass(
        f"{BEHIND_COMPUTED} one of single examples' gradients, and {met}"
    )


def _of_objective(
    objective: Objective,
    params: ArrayTree,
    args: tuple[Any, ...],
    finding: dict[str, Any],
    key: Any = None,
    state: Any = None,
) -> LayerTable:
    if len(args) != 1:
        raise TypeError(
            f"find_layers: an Objective takes (params, batch), got {len(args)} arguments after "
            "params: give batch = (inputs, targets), or the apply function with its inputs"
        )
    batch = objective.batch(*args)
    program = Program(objective, finding, cover=False, second_pass=True)
    table = program.traced(ModelCall(params, batch, key, state)).table
    meeting = objective.meeting(params, batch, key, state)
    return dataclasses.replace(table, meeting=meeting)


def _scalar_loss(
    fn: Callable[..., Any], params: ArrayTree, args: tuple[Any, ...], named: dict[str, Any]
) -> list[Any]:
    """The outputs of a loss as a list, beginning with the scalar; empty for other functions."""
    out = jax.eval_shape(
        lambda params, args, named: fn(params, *args, **named), params, args, named
    )
    outputs = list(out) if isinstance(out, tuple) else [out]
    return outputs if getattr(outputs[0], "shape", None) == () else []
