"""The floor of four passes on the transformer: ``python -m benchmarks._uses.floor PROBLEM OUTPUT``.

Covariances, eigenvalues, pairwise and self scores each need a backward pass of every batch and some
matrix products, and a program that is compiled. Its stages are these alone, as plain JAX, and no
library: the gradient compiled, once through all batches, the backward pass without gradients of
parameters, and the products on rows of the layers' sizes. With the setting ``alone`` it ends after
the gradient, whose memory no pass can do without.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxkfac as jk
from benchmarks._uses.models import Given, transformer


def main() -> None:
    given = Given()
    settings, params = given.settings, given.params
    batches = list(given.batches())
    gradient = jax.jit(jax.value_and_grad(given.objective)).lower(params, batches[0]).compile()
    given.stage("compile", ())
    given.stage("gradient", [gradient(params, batch)[0] for batch in batches])
    if settings["alone"]:
        given.finish({})
        return

    def loss(places: Any, batch: Any) -> Any:
        model = transformer(settings["heads"], given.fixed | {"places": places})
        return jk.Objective(model, jk.Categorical())(params, batch)

    pull = jax.jit(jax.grad(loss))
    backward = pull.lower(given.fixed["places"], batches[0]).compile()
    given.stage("compile backward", ())
    given.stage("backward", [backward(given.fixed["places"], batch) for batch in batches])

    numbers = settings["batch_size"], settings["length"], settings["queries"]
    sides = [x.shape for name, x in params.items() if name.endswith(".w")]
    layers = [_Layer(i, *numbers, *shape) for i, shape in enumerate(sides)]
    given.stage("arrays", [layer.arrays for layer in layers])
    for name in ("covariances", "rotated", "scored"):
        run = jax.jit(lambda arrays, name=name: [getattr(x, name)() for x in arrays])
        program = run.lower(layers).compile()
        given.stage(f"compile {name}", ())
        given.stage(name, [program(layers) for _ in batches])
    given.finish({})


@jax.tree_util.register_pytree_node_class
class _Layer:
    """Rows of a layer, its bases and its part of the queries."""

    def __init__(self, seed: int, examples: int, rows: int, queries: int, n_in: int, n_out: int):
        keys = iter(jax.random.split(jax.random.key(seed), 5))
        shapes = (
            (examples, rows, n_in), (examples, rows, n_out), (n_in, n_in), (n_out, n_out),
            (queries, n_in, n_out),
        )  # fmt: skip
        self.arrays = tuple(jax.random.normal(next(keys), shape) for shape in shapes)

    def tree_flatten(self) -> Any:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Any) -> "_Layer":
        made = object.__new__(cls)
        made.arrays = tuple(arrays)
        return made

    def covariances(self) -> Any:
        x, g, *_ = self.arrays
        return [jnp.einsum("nsi,nsj->ij", y, y) for y in (x, g)]

    def rotated(self) -> Any:
        """Gradients of examples in the bases, squared: for the eigenvalues, and for self scores.

        One example after the other: all gradients at once take 2.2 times as long on a CPU.
        """
        x, g, u, v, _ = self.arrays

        def add(total: Any, rows: Any) -> Any:
            return total + jnp.square(rows[0].T @ rows[1]), None

        return jax.lax.scan(add, jnp.zeros((x.shape[-1], g.shape[-1])), (x @ u, g @ v))[0]

    def scored(self) -> Any:
        x, g, _, _, queries = self.arrays
        return jnp.einsum("nio,qio->qn", jnp.einsum("nsi,nso->nio", x, g), queries)


if __name__ == "__main__":
    main()
