"""SOAP (Vyas et al., 2024): Adam in the eigenvectors of Shampoo's matrices.

The first step only fills the matrices. Every ``frequency`` steps the eigenvectors take one step of
orthogonal iteration, sorted by eigenvalue. Arrays of one axis and axes over ``largest`` are Adam's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SoapState(NamedTuple):
    """For each leaf Adam's moments, and Shampoo's matrices and their eigenvectors by axis."""

    step: jax.Array
    first: Any
    second: Any
    matrices: Any
    vectors: Any


def _product(g: jax.Array, axis: int) -> jax.Array:
    others = [i for i in range(g.ndim) if i != axis]
    return jnp.tensordot(g, g, (others, others))


def _rotated(x: jax.Array, vectors: dict[int, jax.Array], *, back: bool = False) -> jax.Array:
    for axis, q in vectors.items():
        x = jnp.moveaxis(jnp.tensordot(x, q, (axis, int(back))), -1, axis)
    return x


def soap(
    learning_rate: float, *, b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8,
    weight_decay: float = 0.01, frequency: int = 10, largest: int = 10_000,
) -> optax.GradientTransformation:  # fmt: skip
    """With the authors' defaults; ``b2`` is also the decay of Shampoo's matrices."""

    def init(params: Any) -> SoapState:
        leaves = jax.tree.leaves(params)
        square = [
            {i: jnp.zeros((n, n)) for i, n in enumerate(x.shape) if x.ndim > 1 and n <= largest}
            for x in leaves
        ]
        zeros = [jnp.zeros_like(x) for x in leaves]
        return SoapState(jnp.int32(0), zeros, *jax.tree.map(jnp.copy, (zeros, square, square)))

    def leaf(g: Any, p: Any, m: Any, v: Any, matrices: Any, vectors: Any, step: Any) -> Any:
        moves, t = step > 0, jnp.maximum(step, 1)
        m = jnp.where(moves, b1 * m + (1 - b1) * g, m)
        v = jnp.where(moves, b2 * v + (1 - b2) * _rotated(g, vectors) ** 2, v)
        down = _rotated(_rotated(m, vectors) / (jnp.sqrt(v) + eps), vectors, back=True)
        down = down * jnp.sqrt(1 - b2**t) / (1 - b1**t)
        update = jnp.where(moves, -learning_rate * (down + weight_decay * p), 0.0)
        matrices = {i: b2 * x + (1 - b2) * _product(g, i) for i, x in matrices.items()}

        def begin() -> Any:
            return {i: jnp.linalg.eigh(x)[1][:, ::-1] for i, x in matrices.items()}, v

        def iterate() -> Any:
            found, second = {}, v
            for i, q in vectors.items():
                product = matrices[i] @ q
                order = jnp.argsort(-jnp.sum(q * product, 0))
                found[i], second = jnp.linalg.qr(product[:, order])[0], jnp.take(second, order, i)
            return found, second

        which = jnp.where(moves, jnp.where(step % frequency == 0, 2, 0), 1)
        return update, m, *jax.lax.switch(which, [lambda: (vectors, v), begin, iterate]), matrices

    def update(grads: Any, state: SoapState, params: Any = None) -> Any:
        leaves, form = jax.tree.flatten(grads)
        parts = zip(leaves, jax.tree.leaves(params), *state[1:], strict=True)
        found = [leaf(*part, state.step) for part in parts]
        updates, first, vectors, second, matrices = map(list, zip(*found, strict=True))
        return form.unflatten(updates), SoapState(state.step + 1, first, second, matrices, vectors)

    return optax.GradientTransformation(init, update)
