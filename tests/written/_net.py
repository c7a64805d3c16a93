"""A small net with every form of block, and the numbers that its factors and bases show."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk

Readings = dict[str, np.ndarray]

RNG = np.random.default_rng(0)
WIDE = 63  # with the column of ones an input factor of size 64, from which matrices are packed


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape, scale=1 / np.sqrt(shape[-2] if len(shape) > 1 else 2)).astype(
        np.float32
    )


PARAMS: dict[str, Any] = {
    "wide": {"kernel": _normal(WIDE, 4), "bias": _normal(4)},
    "table": {"embedding": _normal(5, 4)},
    "left": {"kernel": _normal(4, 4), "bias": _normal(4)},
    "right": {"kernel": _normal(4, 4)},
    "scale": 1 + 0.1 * _normal(4),
    "blocks": {"kernel": _normal(2, 4, 4), "bias": _normal(2, 4)},
    "head": {"kernel": _normal(4, 3)},
}
BATCHES = [
    (RNG.normal(size=(6, WIDE)).astype(np.float32), np.arange(i, i + 6) % 3) for i in range(4)
]


def apply_fn(params: Any, x: jax.Array) -> jax.Array:
    """A packed factor, a lookup, two readers of one input, a scale, a stack, and a head."""
    ids = jnp.clip(jnp.floor(x[:, 0] + 2), 0, 4).astype(jnp.int32)
    h = jnp.tanh(x @ params["wide"]["kernel"] + params["wide"]["bias"])
    h = h + params["table"]["embedding"][ids]
    left = h @ params["left"]["kernel"] + params["left"]["bias"]
    h = jnp.tanh(left) * (h @ params["right"]["kernel"]) * params["scale"]

    def block(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ p["kernel"] + p["bias"]), None

    h, _ = jax.lax.scan(block, h, params["blocks"])
    return h @ params["head"]["kernel"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS: Any = jk.value_grad_and_factors(OBJECTIVE, fisher="exact")
_COMPILED = jax.jit(STATS)


def statistics(number: int) -> Any:
    """Loss, gradient and factors of a batch at the first parameters."""
    return _COMPILED(params(), batch(number))


def params() -> Any:
    return jax.tree.map(jnp.asarray, PARAMS)


def batch(number: int) -> Any:
    return jax.tree.map(jnp.asarray, BATCHES[number])


def of_tree(tree: Any, name: str) -> Readings:
    """Every array of a tree of parameters, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _of_fields(item: Any, name: str) -> Readings:
    """The arrays of the tuple that ``factors[layer]`` or ``bases[layer]`` gives."""
    found: Readings = {}
    for field, value in item._asdict().items():
        if isinstance(value, tuple):
            found |= _of_fields(value, f"{name}.{field}")
        elif value is not None:
            found[f"{name}.{field}"] = np.asarray(value)
    return found


def of_factors(factors: jk.Factors) -> Readings:
    """Means of every layer, and the number of loss terms."""
    found = {"terms": np.asarray(factors.terms)}
    for name in factors:
        found |= _of_fields(factors[name], name)
    return found


def of_bases(bases: jk.Eigenbases) -> Readings:
    """Values, clipped and as decomposed, and vectors of every layer."""
    found: Readings = {"max_condition": np.asarray(bases.max_condition, np.float64)}
    for name in bases:
        found |= _of_fields(bases[name], name)
    return found


def under(name: str, readings: Readings) -> Readings:
    return {f"{name}/{key}": value for key, value in readings.items()}
