"""Networks differentiated by their inputs, and every row of every layer of one, by brute force.

A program for one point is traced, every product with a parameter in it gets a zero added to its
result, and the outputs are differentiated with respect to these. Nothing of it is the library's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests._oracle import Block
from tests._programs import normal, tree

D, HIDDEN = 2, 4


def net(p, x, activation=jnp.tanh):
    """One point, one output."""
    h = activation(x @ p["w1"] + p["b1"])
    h = activation(h @ p["w2"] + p["b2"])
    return (h @ p["w3"] + p["b3"])[0]


def net_params(outputs=1):
    sizes = {"w1": (D, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,)}
    return tree(3, **sizes, w3=(HIDDEN, outputs), b3=(outputs,))


def direction(i):
    return jnp.eye(D)[i]


def along(f, v):
    """The derivative of a function along a constant direction, forward."""
    return lambda x: jax.jvp(f, (x,), (v,))[1]


def by_hessian(f, x):
    return jnp.trace(jax.hessian(f)(x))


def forward_over_forward(f, x):
    return sum(along(along(f, direction(i)), direction(i))(x) for i in range(D))


def forward_over_reverse(f, x):
    return sum(along(jax.grad(f), direction(i))(x)[i] for i in range(D))


def reverse_over_reverse(f, x):
    return sum(jax.grad(lambda x, i=i: jax.grad(f)(x)[i])(x)[i] for i in range(D))


def reverse_over_forward(f, x):
    return sum(jax.grad(along(f, direction(i)))(x)[i] for i in range(D))


def burgers(f, x):
    slopes = jax.grad(f)(x)
    return slopes[0] + f(x) * slopes[1] - 0.1 * jax.hessian(f)(x)[1, 1]


def by_grad(f, x):
    return jax.grad(f)(x).sum()


def by_jvp(f, x):
    return along(f, direction(0))(x)


def by_jacfwd(f, x):
    return jax.jacfwd(f)(x).sum()


def by_vjp(f, x):
    return jax.vjp(f, x)[1](jnp.ones(()))[0][1]


FORMS = {
    "hessian": by_hessian,
    "forward over forward": forward_over_forward,
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": reverse_over_forward,
    "Burgers": burgers,
    "grad": by_grad,
    "jvp": by_jvp,
    "jacfwd": by_jacfwd,
    "vjp": by_vjp,
}


def points():
    """Five inside, three on the boundary."""
    return normal(1, 5, D), normal(2, 3, D)


class ProductRows(NamedTuple):
    """One product of one point: its input rows, and what its output rows do to the outputs."""

    name: str
    x: np.ndarray  # (rows, in)
    jacobian: np.ndarray  # (outputs, rows, out)


def rows_of(fn: Any, params: Any, x: Any) -> tuple[np.ndarray, list[ProductRows]]:
    """The outputs at one point, and the rows of every product with a parameter."""
    closed = jax.make_jaxpr(fn)(params, x)
    names = dict(zip(closed.jaxpr.invars, sorted(params), strict=False))
    found: list[tuple[str, Any, int]] = []

    def run(zeros, *args):
        env = dict(zip(closed.jaxpr.invars, args, strict=True))
        env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        read = lambda v: v.val if isinstance(v, jax.extend.core.Literal) else env[v]
        inputs = []
        for eqn in closed.jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            out = eqn.primitive.bind(*values, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
            held = [k for k, v in enumerate(eqn.invars) if type(v).__name__ == "Var" and v in names]
            if eqn.primitive.name == "dot_general" and len(held) == 1:
                (k,) = held
                contract, batch = eqn.params["dimension_numbers"]
                assert batch == ((), ()) and len(contract[k]) == 1
                rows = jnp.moveaxis(values[1 - k], contract[1 - k][0], -1)
                inputs.append(rows.reshape(-1, rows.shape[-1]))
                if zeros is None:
                    path = names[eqn.invars[k]]
                    turned = contract[k] == (1,)
                    found.append((path + "@transposed" * turned, out[0].shape, k))
                else:
                    out = [out[0] + zeros[len(inputs) - 1]]
            env.update(zip(eqn.outvars, out, strict=True))
        return read(closed.jaxpr.outvars[0]), inputs

    args = [*jax.tree.leaves(params), x]
    jax.eval_shape(lambda *args: run(None, *args)[0], *args)
    zeros = [jnp.zeros(shape) for _, shape, _ in found]
    outputs, inputs = run(zeros, *args)
    jacobians = jax.jacrev(lambda zeros: run(zeros, *args)[0].reshape(-1))(zeros)
    uses = []
    for (name, shape, k), rows, j in zip(found, inputs, jacobians, strict=True):
        j = j.reshape(-1, *shape)
        j = jnp.moveaxis(j, 1, -1) if k == 0 and len(shape) > 1 else j  # outputs come first there
        j = np.asarray(j.reshape(len(j), len(rows), -1))
        if np.abs(j).max(initial=0) > 0:  # else it leads nowhere
            uses.append(ProductRows(name, np.asarray(rows), j))
    return np.atleast_1d(np.asarray(outputs)), uses


def blocks_of(parts: Any, params: Any, bias: dict[str, bool]) -> dict[str, Block]:
    """A and G of a loss with several Gaussian marks.

    Args:
        parts: For each mark its function of one point, the points, the weight, and the cotangents
            of the outputs, (pulls, points, outputs).
        params: The parameters.
        bias: Whether the ones of a bias are beside the rows of a layer.
    """
    a: dict[str, Any] = {}
    rows: dict[str, float] = {}
    g: dict[str, Any] = {}
    for fn, xs, weight, pulls in parts:
        share = weight / len(xs)
        for n, x in enumerate(xs):
            for use in rows_of(fn, params, x)[1]:
                own = use.x
                if bias.get(use.name):
                    own = np.concatenate([own, np.ones((len(own), 1))], 1)
                a[use.name] = a.get(use.name, 0) + share * own.T @ own
                rows[use.name] = rows.get(use.name, 0) + share * len(own)
                for pull in np.asarray(pulls):
                    back = np.einsum("c,cro->ro", pull[n], use.jacobian)
                    g[use.name] = g.get(use.name, 0) + share * back.T @ back
    return {name: Block("dense", a[name] / rows[name], g[name], None) for name in a}
