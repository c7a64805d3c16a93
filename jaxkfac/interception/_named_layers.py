"""Functions that a user names as one layer, for a kind of layer that reads calls of that name.

A call is an equation of a primitive of its own, ``layer:NAME``, whose parameter is the function's
program. It is a primitive and no ``jit`` with a name, because ``vmap`` of a ``jit`` moves the axes
of its operands, and the kind has to know which axis is whose. Under a derivative the call becomes
the equations of the function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxkfac._arguments import check_function
from jaxkfac._jaxpr_compat import LAYER, ClosedJaxpr, Eqn, open_jaxpr, without_constants

Layered = TypeVar("Layered", bound=Callable[..., jax.Array])


def layer(name: str, fn: Layered) -> Layered:
    """Name a function as one layer, so that a kind of layer may read calls of it as a whole.

    The result computes what ``fn`` computes, and may be called under ``jit``, ``scan``,
    ``checkpoint``, ``vmap`` and ``grad``. Where jaxkfac looks for layers, it asks the kind that
    reads the primitive ``"layer:" + name`` (``jaxkfac.kinds.NamedLayer``), and does not look inside
    ``fn``. A call that reads no parameter, or no data, is followed like any function.

    Args:
        name: The name of the layer.
        fn: A function of arrays, or of trees of arrays, that returns one array. The parameters must
            be arguments: a kind counts the leaves of all arguments in order. Bind what is no array
            beforehand, as in ``functools.partial(fn, modes=8)``.

    Returns:
        A function like ``fn``, of positional arguments.

    Raises:
        TypeError: ``fn`` is no function, or returns anything but one array.
        ValueError: ``name`` is empty, or ``fn`` has side effects.
        UnknownLayerError: where jaxkfac looks for layers, if no registered kind reads the name.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> mixed = jk.layer("mixed", lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x) * w, x.shape[-1]))
        >>> mixed(jnp.ones(3), jnp.ones((2, 4))).shape
        (2, 4)
        >>> jk.find_layers(mixed, jnp.ones(3), jnp.ones((2, 4)))
        Traceback (most recent call last):
        ...
        jaxkfac._errors.UnknownLayerError: no kind of layer reads `layer:mixed`, ...
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"layer: name={name!r}: expected a name, as in jk.layer('fourier', fn)")
    check_function("layer", fn, "fn(weights, data)")

    @functools.wraps(fn)
    def call(*args: Any) -> jax.Array:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        if not isinstance(shape, jax.ShapeDtypeStruct):
            raise TypeError(
                f"layer {name!r}: its function returns {jax.tree.structure(shape)}, expected one "
                "array: return the others from a function of its own"
            )
        if closed.effects:
            raise ValueError(
                f"layer {name!r}: its function has side effects ({closed.effects}), and is run as "
                "often as a derivative needs it: print and write outside of it"
            )
        # Values that the function closes over come last, so that the arguments keep their numbers.
        leaves = jax.tree.leaves(args)
        return _primitive(name).bind(
            *leaves,
            *closed.consts,
            jaxpr=without_constants(closed),
            arguments=len(leaves),
            mapped=(),
        )

    # A jit around it: called outside of a trace, it is traced and compiled once for each shape.
    return jax.jit(call)  # type: ignore[return-value]


def layer_name(eqn: Eqn) -> str:
    """The name that the user gave to the layer."""
    return eqn.primitive.name.removeprefix(LAYER)


@functools.cache
def _primitive(name: str) -> Primitive:
    """The primitive of all calls of layers of one name.

    Its parameters are ``jaxpr``, a function of the operands with one result; ``arguments``, the
    number of operands that the function takes (it closes over the others); and ``mapped``: for each
    ``vmap`` around the call, outermost first, which operands have its axis. It is their first axis
    behind those of the ``vmap`` outside of it, and the result has all of these axes.
    """
    primitive = Primitive(LAYER + name)
    primitive.def_impl(lambda *xs, jaxpr, **_: jax.jit(_function(jaxpr))(*xs))
    primitive.def_abstract_eval(lambda *avals, jaxpr, **_: open_jaxpr(jaxpr)[0].outvars[0].aval)

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, **_: Any
    ) -> tuple[Any, Any]:
        moving = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*xs: Any) -> Any:
            at = dict(zip(moving, xs, strict=True))
            return _function(jaxpr)(*[at.get(k, x) for k, x in enumerate(primals)])

        return jax.jvp(of_moving, [primals[k] for k in moving], [tangents[k] for k in moving])

    def batch(
        operands: Sequence[Any], axes: Sequence[Any], *, jaxpr: Any, arguments: int, mapped: Any
    ) -> tuple[Any, int]:
        operands = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(operands, axes, strict=True)
        ]
        here = tuple(axis is not None for axis in axes)
        run = jax.vmap(_function(jaxpr), [0 if has_axis else None for has_axis in here])
        closed = jax.make_jaxpr(run)(*operands)
        levels = tuple((*level, *(False for _ in closed.consts)) for level in (here, *mapped))
        program = without_constants(closed)
        out = primitive.bind(
            *operands, *closed.consts, jaxpr=program, arguments=arguments, mapped=levels
        )
        return out, 0

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    lowered = mlir.lower_fun(lambda *xs, jaxpr, **_: _function(jaxpr)(*xs), multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    return primitive


def _function(jaxpr: ClosedJaxpr) -> Callable[..., Any]:
    return lambda *operands: jex.jaxpr_as_fun(jaxpr)(*operands)[0]
