"""Traces of a function, cached by the structure and types of its arguments."""

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex

from jaxkfac._arguments import ArrayTree

# ---------------- Python's limit of frames, and how deep functions may be nested


@contextmanager
def depth_explained() -> Iterator[None]:
    """A context in which a user's function is traced.

    Raises:
        RecursionError: the function needs more frames than Python allows; the message says what to
            do.
    """
    try:
        yield
    except RecursionError as error:
        limit = sys.getrecursionlimit()
        raise RecursionError(
            f"the function nests calls deeper than Python's limit of {limit} frames allows; in "
            "1,000 frames JAX traces a function in about 120 nested jits, and jax.grad takes about "
            "95. Leave out the inner jax.jit, which changes no result, write repeated blocks as "
            "jax.lax.scan, or raise the limit with sys.setrecursionlimit before this call"
        ) from error


# ---------------- the cache


@runtime_checkable
class Closed(Protocol):
    """A trace, with the constants that the function closed over."""

    @property
    def closed(self) -> jex.ClosedJaxpr: ...


Trace = TypeVar("Trace", bound=Closed)


class TraceCache(Generic[Trace]):
    """Traces by the structure and types of arguments, and by the settings that tracing reads.

    A trace that closed over tracers is not cached: these tracers end with the trace around it.
    """

    def __init__(self) -> None:
        self._traces: dict[Hashable, Trace] = {}

    def get(self, args: ArrayTree, make: Callable[[], Trace], *, static: Hashable = None) -> Trace:
        """The trace for these arguments; ``make`` is called if it is not cached.

        Args:
            args: Arrays, or their shapes.
            make: Traces the function.
            static: Anything else on which the trace depends.
        """
        leaves, tree = jax.tree.flatten(args)
        settings = (
            jax.sharding.get_abstract_mesh(),
            jnp.result_type(float),
            jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.jax_default_prng_impl,  # pyright: ignore[reportAttributeAccessIssue]
        )
        key = (static, tree, tuple(map(jax.typeof, leaves)), settings)
        if key in self._traces:
            return self._traces[key]
        trace = make()
        if not any(isinstance(x, Tracer) for x in trace.closed.consts):
            self._traces[key] = trace
        return trace


class Staged(NamedTuple):
    """A function staged out to a jaxpr: a call runs its equations, and no Python of the function.

    Attributes:
        closed: The jaxpr.
        out_tree: Structure of the result.
    """

    closed: jex.ClosedJaxpr
    out_tree: Any

    @property
    def types(self) -> ArrayTree:
        """The result's tree of types."""
        return jax.tree.unflatten(self.out_tree, self.closed.out_avals)

    @classmethod
    def of(cls, fn: Callable[..., ArrayTree], *args: ArrayTree) -> "Staged":
        """Stage a function out for arguments of these types; nothing is computed."""
        with depth_explained():
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return cls(closed, jax.tree.structure(shapes))

    def __call__(self, *args: ArrayTree) -> ArrayTree:
        leaves = jex.jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        # A result that is known at trace time is a literal, which is no jax.Array.
        return jax.tree.unflatten(self.out_tree, map(jnp.asarray, leaves))
