"""One call for many layers of the same shape, where stacking them is cheap."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

PyTree = Any
Name = TypeVar("Name", bound=Hashable)

# Stacking copies the eigenvectors, n^2 elements a side. Measured for 48 layers on two CPU cores,
# stacked against one by one: under jit 1.0 ms against 1.7 at side 16, 3.3 against 3.5 at side 64,
# 29 against 25 at side 128; outside jit 58 ms against 126 at side 16. Under jit the CPU compiles
# 30 ms longer for each layer, because every way out of the stack is a kernel of its own.
LARGEST_STACKED_SIDE = 64


def is_small(*sides: int) -> bool:
    """Whether matrices of these sizes are worth stacking."""
    return max(sides) <= LARGEST_STACKED_SIDE


def map_in_batches(
    function: Callable[[Any, PyTree], PyTree], problems: Mapping[Name, tuple[Any, PyTree]]
) -> dict[Name, PyTree]:
    """``{name: function(static, arrays)}``, one call for all problems that look alike.

    Problems look alike where their static parts are equal, and their arrays agree in
    structure, shape, dtype, sharding and device. Linear in the number of problems.

    Args:
        function: Called with arrays that have one more leading axis where several problems
            were stacked, and must treat leading axes as a batch.
        problems: ``{name: (static, arrays)}``.

    Returns:
        The results by name.
    """
    alike: dict[Hashable, list[Name]] = defaultdict(list)
    for name, (static, arrays) in problems.items():
        leaves, structure = jax.tree.flatten(arrays)
        alike[static, structure, *map(_looks, leaves)].append(name)
    results: dict[Name, PyTree] = {}
    for names in alike.values():
        static = problems[names[0]][0]
        arrays = [problems[name][1] for name in names]
        if len(names) == 1:
            results[names[0]] = function(static, arrays[0])
            continue
        together = function(static, jax.tree.map(lambda *xs: jnp.stack(xs), *arrays))
        for i, name in enumerate(names):
            results[name] = jax.tree.map(lambda x, i=i: x[i], together)
    return results


def _looks(x: Any) -> Hashable:
    # The type of a tracer carries its sharding and, inside shard_map, its varying axes.
    kind = jax.typeof(x)
    return (kind, None) if isinstance(x, Tracer) else (kind, frozenset(x.sharding.device_set))
