"""Programs in which the examples of a batch meet, and programs that look as if they did.

Each is ``program(params, x)`` of a batch ``(N, D)``, with the examples first in its result. What is
true of it is decided by ``truth``, from values and Jacobians alone.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl  # noqa: TID251
from jax.experimental import sparse  # noqa: TID251
from jax.experimental.pallas import tpu as pltpu  # noqa: TID251

from tests._programs import normal

N, D = 6, 4
PERMUTED = jnp.array([2, 0, 1, 5, 3, 4])
RING = np.roll(np.eye(N), 1, 1) + np.eye(N)
SPARSE_RING = sparse.BCOO.fromdense(jnp.asarray(RING))


class Truth(NamedTuple):
    """Whether an output of one example changes with the value of another, or has a derivative."""

    value: bool
    derivative: bool


def params():
    return {"w": normal(1, D, D), "u": normal(2, D, D), "b": normal(3, D)}


def batch(number=N):
    return normal(4, number, D)


def truth(program, p, x, *, draws=3):
    """What is so, by trial in float64: another value for each example, and all Jacobians.

    Programs are generic functions of generic values, so that what can change does. A program that
    JAX does not differentiate has the derivative that its values say.
    """
    value = derivative = False
    off = ~np.eye(len(x), dtype=bool)
    for draw in range(draws):
        q = jax.tree.map(lambda v, draw=draw: v + 0.1 * normal(50 + draw, *v.shape), p)
        y = x + 0.3 * normal(70 + draw, *x.shape)
        before = np.asarray(program(q, y))
        for j in range(len(x)):
            after = np.asarray(program(q, y.at[j].set(normal(90 + j, *x.shape[1:]))))
            changed = np.abs(after - before).reshape(len(x), -1).max(1) > 1e-9
            value |= bool(np.delete(changed, j).any())
        jacobian = _jacobian(program, q, y)
        if jacobian is None:
            derivative |= value
            continue
        jacobian = np.moveaxis(jacobian, before.ndim, 1).reshape(len(x), len(x), -1)
        derivative |= bool(np.abs(jacobian).max(-1)[off].max() > 1e-9)
    return Truth(value, derivative)


def _jacobian(program, p, x):
    for of in (jax.jacrev, jax.jacfwd):  # a rule that goes backward has the first word
        try:
            return np.asarray(of(program, 1)(p, x))
        except (TypeError, ValueError, NotImplementedError):
            continue
    return None


def hidden(p, x):
    return jnp.tanh(x @ p["w"])


def _bordered(h):
    return jnp.concatenate([h, h[:1]])


def _scan_rows(step):
    def run(p, x):
        return lax.scan(functools.partial(step, p), jnp.zeros(D), hidden(p, x))[1]

    return run


def _kernel(z):
    return jnp.exp(-0.5 * ((z[:, None] - z[None]) ** 2).sum(-1)) + 0.1 * jnp.eye(len(z))


@jax.custom_vjp
def swaps_forward(x):
    return x + 0.5 * jnp.roll(x, 1, 0)


swaps_forward.defvjp(
    lambda x: (swaps_forward(x), None), lambda _, g: (g + 0.5 * jnp.roll(g, -1, 0),)
)


@jax.custom_vjp
def swaps_backward(x):
    return 2 * x


swaps_backward.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g + jnp.roll(g, 1, 0),))


@jax.custom_jvp
def swaps_tangents(x):
    return 2 * x


swaps_tangents.defjvp(lambda x, t: (2 * x[0], 2 * t[0] + jnp.roll(t[0], 1, 0)))


@jax.custom_vjp
def quiet(x):
    return jnp.sin(x)


quiet.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (c * g,))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(4 * x) / 4


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


def _rows_kernel(x_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...])


def _whole_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...].sum(0, keepdims=True)


def _pallas(kernel, block, x):
    spec = pl.BlockSpec(block, lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(len(x) // block[0],),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x)


def _running_sum(x, *, in_scratch):
    """Memory that outlives a step of the grid: scratch, or a block that every step writes.

    JAX differentiates no such kernel, so it has a rule.
    """

    @jax.custom_jvp
    def summed(x):
        return _running_sum_kernel(x, in_scratch=in_scratch)

    @summed.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        return summed(x), jnp.cumsum((1 - jnp.tanh(x) ** 2) * dx, 0)

    return summed(x)


def _running_sum_kernel(x, *, in_scratch):

    def kernel(x_ref, *more):
        o_ref, sum_ref = more if in_scratch else more[::-1]

        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jnp.tanh(x_ref[...])
        o_ref[...] = sum_ref[...]

    row = pl.BlockSpec((1, D), lambda i: (i, 0))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    options = {"grid": (len(x),), "in_specs": [row], "interpret": True}
    if in_scratch:
        scratch = [pltpu.VMEM((1, D), x.dtype)]
        call = pl.pallas_call(
            kernel, **options, out_specs=row, out_shape=like, scratch_shapes=scratch
        )
        return call(x)
    total = pl.BlockSpec((1, D), lambda i: (0, 0)), jax.ShapeDtypeStruct((1, D), x.dtype)
    specs, likes = zip(total, (row, like), strict=True)
    return pl.pallas_call(kernel, **options, out_specs=specs, out_shape=likes)(x)[1]


def _stacked_by_no_iteration(x):
    _, rows = lax.scan(lambda h, t: (h - h.mean(0) * t, h), x, jnp.zeros(0))
    return rows.sum((0, 1))


def _in_pairs(h):
    pairs = h.reshape(N // 2, 2, D)
    return (pairs + pairs[:, ::-1]).reshape(N, D)


def _batch_norm(axis_name):
    def row(h):
        mean = lax.pmean(h, axis_name)
        var = lax.pmean((h - mean) ** 2, axis_name)
        return (h - mean) / jnp.sqrt(var + 1e-3)

    return row


def _written(h, at):
    def step(i, out):
        return lax.dynamic_update_slice(out, jnp.tanh(h[at(i)])[None], (i, 0))

    return lax.fori_loop(0, N, step, jnp.zeros_like(h))


def _time_major_across(p, x):
    """A recurrence whose batch lies where time should: an error people make."""
    sequences = jnp.stack([x, x * x, jnp.sin(x)], 1)  # (N, T, D)
    step = lambda c, r: ((c + jnp.tanh(r @ p["w"])), c)
    return lax.scan(step, jnp.zeros((3, D)), sequences)[1].sum(1)


def _normalized_features(h, stop):
    mean = h.mean(0, keepdims=True)
    return h - (lax.stop_gradient(mean) if stop else mean)


def _conv(h, window, dims):
    return lax.conv_general_dilated(
        h.T[None] if dims == "batch as space" else h[:, None],
        jnp.ones((D, D, window)) if dims == "batch as space" else jnp.ones((1, 1, window)),
        (1,),
        "SAME",
    )


def _each(f):
    """A function of one example's hidden units and its inputs, mapped over the batch."""
    return lambda p, x: jax.vmap(lambda r: f(hidden(p, r), r))(x)


def _matrix(h, r):
    return jnp.outer(h, r) + 3 * jnp.eye(D)


def _matrices(p, x):
    return jax.vmap(_matrix)(hidden(p, x), x)


def _log_determinant(h, r):
    return jnp.linalg.slogdet(_matrix(h, r))[1]


def _kinetic(p, r, laplacian):
    """The Laplacian of a determinant's logarithm, in one of the ways that codes compute it."""
    return laplacian(lambda r: _log_determinant(hidden(p, r), r), r)


def _forward_laplacian(f, r):
    """Value, gradient and Laplacian go forward together: second derivatives along each axis."""
    second = lambda v: jax.jvp(lambda r: jax.jvp(f, (r,), (v,))[1], (r,), (v,))[1]
    return jax.vmap(second)(jnp.eye(D)).sum()


def _looped_laplacian(f, r):
    _, along = jax.linearize(jax.grad(f), r)
    return lax.fori_loop(0, D, lambda i, total: total + along(jnp.eye(D)[i])[i], 0.0)


UPPER = np.triu_indices(D, 1)


MIXING = {
    "sum": lambda p, x: hidden(p, x) + hidden(p, x).sum(0),
    "mean": lambda p, x: hidden(p, x) - hidden(p, x).mean(0),
    "maximum": lambda p, x: hidden(p, x) - hidden(p, x).max(0),
    "softmax": lambda p, x: jax.nn.softmax(hidden(p, x), 0),
    "logsumexp": lambda p, x: hidden(p, x) - jax.nn.logsumexp(hidden(p, x), 0),
    "cumsum": lambda p, x: jnp.cumsum(hidden(p, x), 0),
    "cumulative maximum": lambda p, x: lax.cummax(hidden(p, x), 0),
    "roll": lambda p, x: jnp.roll(hidden(p, x), 1, 0),
    "reversed": lambda p, x: hidden(p, x)[::-1],
    "permuted": lambda p, x: hidden(p, x)[PERMUTED],
    "sorted": lambda p, x: jnp.sort(hidden(p, x), 0),
    "ranked": lambda p, x: hidden(p, x) * jnp.argsort(x[:, 0])[:, None],
    "segment sum": lambda p, x: jax.ops.segment_sum(
        hidden(p, x), jnp.array([0, 0, 1, 1, 2, 2]), num_segments=N
    ),
    "pairs": lambda p, x: hidden(p, x) @ hidden(p, x).T,
    "dense graph": lambda p, x: RING @ hidden(p, x),
    "attention across": lambda p, x: jax.nn.softmax(x @ p["u"] @ x.T, -1) @ hidden(p, x),
    "sparse graph": lambda p, x: SPARSE_RING @ hidden(p, x),
    "pmean under vmap": lambda p, x: jax.vmap(
        lambda r: lax.pmean(hidden(p, r), "batch") * r, axis_name="batch"
    )(x),
    "batch norm under vmap": lambda p, x: jax.vmap(_batch_norm("batch"), axis_name="batch")(
        hidden(p, x)
    ),
    "all_gather under vmap": lambda p, x: jax.vmap(
        lambda r: lax.all_gather(hidden(p, r), "batch").sum(0) - r, axis_name="batch"
    )(x),
    "ppermute under vmap": lambda p, x: jax.vmap(
        lambda r: lax.ppermute(hidden(p, r), "batch", [(i, (i + 1) % N) for i in range(N)]),
        axis_name="batch",
    )(x),
    "pmax under vmap": lambda p, x: jax.vmap(
        lambda r: hidden(p, r) - lax.pmax(hidden(p, r), "batch"), axis_name="batch"
    )(x),
    "running mean": _scan_rows(lambda p, c, r: (0.9 * c + 0.1 * r, r - c)),
    "recurrence along the batch": _scan_rows(
        lambda p, c, r: ((c := jnp.tanh(c @ p["u"] + r)), c)
    ),
    "recurrence, checkpointed": _scan_rows(
        jax.checkpoint(lambda p, c, r: ((c := jnp.tanh(c @ p["u"] + r)), c))
    ),
    "reversed recurrence": lambda p, x: lax.scan(
        lambda c, r: (c + r, c), jnp.zeros(D), hidden(p, x), reverse=True
    )[1],
    "time-major by mistake": _time_major_across,
    "associative scan": lambda p, x: lax.associative_scan(jnp.add, hidden(p, x)),
    "associative scan of pairs": lambda p, x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.cos(x), hidden(p, x))
    )[1],
    "solve": lambda p, x: jnp.linalg.solve(_kernel(x), hidden(p, x)),
    "cho_solve": lambda p, x: jax.scipy.linalg.cho_solve(
        jax.scipy.linalg.cho_factor(_kernel(x)), hidden(p, x)
    ),
    "whitening": lambda p, x: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(hidden(p, x).T @ hidden(p, x) + jnp.eye(D)), hidden(p, x).T, lower=True
    ).T,
    "qr": lambda p, x: jnp.linalg.qr(hidden(p, x))[0],
    "eigh": lambda p, x: jnp.linalg.eigh(_kernel(x))[1] ** 2 @ hidden(p, x),
    "svd": lambda p, x: jnp.linalg.svd(hidden(p, x), full_matrices=False)[0] ** 2,
    "conjugate gradients": lambda p, x: jax.scipy.sparse.linalg.cg(
        lambda v: _kernel(x) @ v, hidden(p, x), maxiter=3
    )[0],
    "custom_linear_solve": lambda p, x: lax.custom_linear_solve(
        lambda v: _kernel(x) @ v,
        hidden(p, x),
        lambda _, b: jnp.linalg.solve(_kernel(x), b),
        symmetric=True,
    ),
    "matrix exponential": lambda p, x: jax.scipy.linalg.expm(0.1 * _kernel(x)) @ hidden(p, x),
    "fft": lambda p, x: jnp.fft.fft(hidden(p, x), axis=0).real,
    "convolution along": lambda p, x: _conv(hidden(p, x), 3, "batch as space")[0].T,
    "window along": lambda p, x: lax.reduce_window(
        hidden(p, x), 0.0, lax.add, (3, 1), (1, 1), "SAME"
    ),
    "top_k along": lambda p, x: lax.top_k(hidden(p, x).T, N)[0].T,
    "two index arrays": lambda p, x: jnp.stack([hidden(p, x)[PERMUTED, k] for k in (0, 1)], 1)
    + hidden(p, x)[PERMUTED, jnp.arange(N) % D][:, None],
    "scatter with two index arrays": lambda p, x: jnp.zeros((N, D))
    .at[PERMUTED, jnp.arange(N) % D]
    .add(hidden(p, x)[:, 0]),
    "picked by value": lambda p, x: hidden(p, x)[(jnp.abs(x[:, 0]) * 7).astype(int) % N],
    "put by value": lambda p, x: jnp.zeros((N, D))
    .at[(jnp.abs(x[:, 0]) * 7).astype(int) % N]
    .add(hidden(p, x)),
    "a neighbor, by vmap": lambda p, x: jax.vmap(
        lambda i: hidden(p, x)[i] + hidden(p, x)[(i + 1) % N]
    )(jnp.arange(N)),
    "a neighbor, by map": lambda p, x: lax.map(
        lambda i: hidden(p, x)[i] + hidden(p, x)[(i + 1) % N], jnp.arange(N)
    ),
    "a neighbor, by fori_loop": lambda p, x: _written(hidden(p, x), lambda i: (i + 1) % N),
    "reshaped pairs": lambda p, x: _in_pairs(hidden(p, x)),
    "flattened, then a product": lambda p, x: (
        hidden(p, x).reshape(-1) @ jnp.ones((N * D, N * D)) * x.reshape(-1)
    ).reshape(N, D),
    "flattened across": lambda p, x: hidden(p, x).T.reshape(N, D),
    "custom_vjp forward": lambda p, x: swaps_forward(hidden(p, x)),
    "custom_vjp backward": lambda p, x: swaps_backward(hidden(p, x)),
    "custom_jvp": lambda p, x: swaps_tangents(hidden(p, x)),
    "cond on the batch": lambda p, x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, hidden(p, x)),
    "while on the batch": lambda p, x: lax.while_loop(
        lambda c: jnp.abs(c).max() > 1e-3, lambda c: c * 0.95, hidden(p, x) * 10 * x
    ),
    "stopped mean": lambda p, x: _normalized_features(hidden(p, x), True),
    "compared with the mean": lambda p, x: jnp.where(x > x.mean(0), hidden(p, x), 0.0),
    "rounded mean": lambda p, x: hidden(p, x) * jnp.round(10 * x.mean(0)).astype(int),
    "shifted concatenation": lambda p, x: _bordered(hidden(p, x))[1:],
    "padded and shifted": lambda p, x: jnp.pad(hidden(p, x), ((1, 0), (0, 0)))[:-1] + x,
    "split and swapped": lambda p, x: jnp.concatenate(jnp.split(hidden(p, x), 2)[::-1]),
    "pallas, whole": lambda p, x: _pallas(_whole_kernel, (N, D), hidden(p, x)),
    "pallas, scratch": lambda p, x: _running_sum(hidden(p, x), in_scratch=True),
    "pallas, one block of all steps": lambda p, x: _running_sum(hidden(p, x), in_scratch=False),
    "inside jit": jax.jit(lambda p, x: hidden(p, x) - hidden(p, x).mean(0)),
    "inside remat": jax.checkpoint(lambda p, x: jnp.cumsum(hidden(p, x), 0)),
    "inside a scan over layers": lambda p, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ w - h.mean(0)), None), x, jnp.stack([p["w"], p["u"]])
    )[0],
    "inside vmap over members": lambda p, x: jax.vmap(
        lambda w: jnp.tanh(x @ w) - jnp.tanh(x @ w).mean(0)
    )(jnp.stack([p["w"], p["u"]])).sum(0),
    "covariance of features": lambda p, x: x @ jnp.cov(hidden(p, x).T),
    "pairs of distances": lambda p, x: jnp.abs(x[:, None] - hidden(p, x)[None]).sum((1, 2))[:, None]
    + x,
    "cumulative product": lambda p, x: jnp.cumprod(1 + 0.1 * hidden(p, x), 0),
    "einsum across": lambda p, x: jnp.einsum("nd,md->n", x, hidden(p, x))[:, None] + x,
    "median": lambda p, x: hidden(p, x) - jnp.median(x, 0),
    "interpolated": lambda p, x: jnp.interp(x[:, 0], jnp.sort(x[:, 1]), jnp.arange(6.0))[:, None]
    + x,
    "mixup": lambda p, x: 0.7 * hidden(p, x) + 0.3 * hidden(p, x)[PERMUTED],
    "polyfit": lambda p, x: x @ jnp.linalg.lstsq(hidden(p, x), x)[0],
    "tiled along": lambda p, x: jnp.tile(hidden(p, x), (2, 1))[1 : N + 1],
    "tiled copies of the last": lambda p, x: x + jnp.tile(hidden(p, x)[-1:], (N, 1)),
    "repeated along": lambda p, x: jnp.repeat(hidden(p, x), 2, 0)[1 : N + 1],
    "rolled by value": lambda p, x: jnp.roll(hidden(p, x), jnp.argmax(x[0]), 0),
    "kron across": lambda p, x: jnp.kron(hidden(p, x)[:1], x),
    "outer across": lambda p, x: jnp.outer(hidden(p, x)[:, 0], x[:, 0]),
    "triangle across": lambda p, x: jnp.tril(hidden(p, x) @ x.T) @ x,
    "determinant of all": lambda p, x: x * jnp.linalg.slogdet(_kernel(hidden(p, x)))[1],
    "determinant of a sum": lambda p, x: x * jnp.linalg.det(_matrices(p, x).sum(0)),
    "inverse of a sum": lambda p, x: hidden(p, x) @ jnp.linalg.inv(_matrices(p, x).sum(0)),
    "norm of all": lambda p, x: hidden(p, x) / jnp.linalg.norm(hidden(p, x)),
    "chunks of several": lambda p, x: lax.map(
        lambda rows: hidden(p, rows) - x.mean(0), x.reshape(3, 2, D)
    ).reshape(N, D),
}  # fmt: skip


def _crops(p, x):
    both = jnp.concatenate([x, jnp.sin(x)])
    h = jnp.tanh(both @ p["w"])
    one, other = jnp.split(h, 2)
    return one * other


def _interleaved(p, x):
    both = jnp.stack([x, jnp.sin(x)], 1).reshape(2 * N, D)
    return jnp.tanh(both @ p["w"]).reshape(N, 2, D).sum(1)


def _time_major(p, x):
    sequences = jnp.stack([x, x * x, jnp.sin(x)])  # (T, N, D)
    step = lambda c, r: ((c := jnp.tanh(c @ p["u"] + r @ p["w"])), c)
    return lax.scan(step, jnp.zeros((N, D)), sequences)[1].swapaxes(0, 1)


def _batch_first(p, x):
    step = lambda c, r: ((c := jnp.tanh(c @ p["u"] + r @ p["w"])), None)
    sequences = jnp.stack([x, x * x], 1)
    return lax.scan(step, jnp.zeros((N, D)), sequences.swapaxes(0, 1))[0]


def _attention(p, x):
    s = jnp.stack([x, jnp.sin(x), x * x], 1)
    return jax.nn.softmax(jnp.einsum("nsd,ntd->nst", s @ p["w"], s), -1) @ s


def _with_class_token(p, x):
    s = jnp.concatenate([jnp.broadcast_to(p["b"], (N, 1, D)), x[:, None]], 1)
    return _self_attended(s, p)


def _self_attended(s, p):
    return jax.nn.softmax(jnp.einsum("nsd,ntd->nst", s @ p["w"], s), -1) @ s


def _solved(p, x):
    a = jnp.einsum("ni,nj->nij", x, x) + jnp.eye(D)
    return jnp.linalg.solve(a, hidden(p, x)[..., None])[..., 0]


def _cholesky(p, x):
    a = jnp.einsum("ni,nj->nij", x, x) + jnp.eye(D)
    return jax.vmap(lambda a, r: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), r))(
        a, hidden(p, x)
    )


def _newton(p, x):
    def root(r):
        f = lambda z: z + 0.3 * jnp.tanh(z @ p["u"]) - r
        solve = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        return lax.custom_root(
            f, r, lambda f, z: lax.fori_loop(0, 20, lambda _, z: z - f(z), z), solve
        )

    return jax.vmap(root)(hidden(p, x))


APART = {
    "dense": hidden,
    "checkpointed": jax.checkpoint(hidden),
    "jitted": jax.jit(hidden),
    "vmapped": lambda p, x: jax.vmap(lambda r: hidden(p, r))(x),
    "mapped": lambda p, x: lax.map(lambda r: hidden(p, r), x),
    "a loop of no iterations": lambda p, x: hidden(p, x) + _stacked_by_no_iteration(x),
    "mapped in micro-batches": lambda p, x: lax.map(lambda r: hidden(p, r), x, batch_size=2),
    "mapped with a remainder": lambda p, x: lax.map(lambda r: hidden(p, r), x, batch_size=4),
    "written by fori_loop": lambda p, x: _written(hidden(p, x), lambda i: i),
    "attention": _attention,
    "class token": _with_class_token,
    "layer norm": lambda p, x: (hidden(p, x) - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
    "crops": _crops,
    "crops, interleaved": _interleaved,
    "two towers": lambda p, x: (hidden(p, x) * hidden(p, jnp.cos(x))).sum(1)[:, None],
    "time-major": _time_major,
    "recurrence": _batch_first,
    "associative scan over time": lambda p, x: lax.associative_scan(
        jnp.add, jnp.stack([hidden(p, x)] * 3)
    ).swapaxes(0, 1),
    "picked by a column": lambda p, x: hidden(p, x)[jnp.arange(N), jnp.arange(N) % D][:, None] * x,
    "picked by an argmax": lambda p, x: hidden(p, x)[jnp.arange(N), x.argmax(1)][:, None] + x,
    "taken along": lambda p, x: jnp.take_along_axis(hidden(p, x), x.argsort(1), 1),
    "put by a column": lambda p, x: jnp.zeros((N, D))
    .at[jnp.arange(N), x.argmax(1)]
    .set(hidden(p, x)[:, 0]),
    "permuted and back": lambda p, x: jnp.tanh(x[PERMUTED] @ p["w"])[jnp.argsort(PERMUTED)],
    "reversed and back": lambda p, x: jnp.tanh(x[::-1] @ p["w"])[::-1],
    "rolled and back": lambda p, x: jnp.roll(jnp.tanh(jnp.roll(x, 2, 0) @ p["w"]), -2, 0),
    "flattened and back": lambda p, x: jnp.sin(hidden(p, x).reshape(-1)).reshape(N, D),
    "merged the other way": lambda p, x: jnp.sin(
        jnp.stack([hidden(p, x), x]).reshape(2 * N, D)
    ).reshape(2, N, D).sum(0),
    "sorted features": lambda p, x: jnp.sort(hidden(p, x), 1),
    "top_k features": lambda p, x: lax.top_k(hidden(p, x), 2)[0],
    "fft of features": lambda p, x: jnp.fft.fft(hidden(p, x)).real,
    "convolved features": lambda p, x: _conv(hidden(p, x), 3, "features")[:, 0],
    "windows of features": lambda p, x: lax.reduce_window(
        hidden(p, x), -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"
    ),
    "solve by example": _solved,
    "cholesky by example": _cholesky,
    "eigh by example": lambda p, x: jnp.linalg.eigh(
        jnp.einsum("ni,nj->nij", x, x) + jnp.diag(jnp.arange(4.0))
    )[0] + hidden(p, x),
    "custom_root by example": _newton,
    "custom_vjp": lambda p, x: quiet(hidden(p, x)),
    "straight through": lambda p, x: straight_through(hidden(p, x)) + hidden(p, x),
    "pallas by rows": lambda p, x: _pallas(_rows_kernel, (1, D), hidden(p, x)),
    "scan over layers": lambda p, x: lax.scan(
        lambda h, w: (jax.nn.relu(h @ w) + h, None), x, jnp.stack([p["w"], p["u"]])
    )[0],
    "cond by example": lambda p, x: jax.vmap(
        lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, hidden(p, r))
    )(x),
    "scattered sum over positions": lambda p, x: jnp.zeros((N, 2)).at[
        :, jnp.array([0, 1, 0, 1])
    ].add(hidden(p, x)),
    "padded and cut": lambda p, x: jnp.tanh(jnp.pad(x, ((2, 1), (0, 0))) @ p["w"])[2 : 2 + N],
    "stacked members": lambda p, x: jax.vmap(lambda w: jnp.tanh(x @ w))(
        jnp.stack([p["w"], p["u"]])
    ).sum(0),
    "grouped convolution": lambda p, x: lax.conv_general_dilated(
        x.reshape(1, N * D, 1), jnp.ones((N * D, D, 1)), (1,), "SAME", feature_group_count=N
    ).reshape(N, D) + hidden(p, x),
    "batched convolution": lambda p, x: jax.vmap(
        lambda r: jnp.convolve(hidden(p, r), r, mode="same")
    )(x),
    "while by example": lambda p, x: jax.vmap(
        lambda r: lax.while_loop(lambda c: jnp.abs(c).max() > 0.5, lambda c: c * 0.7, r)
    )(x) + hidden(p, x),
    "tile": _each(lambda h, r: jnp.tile(h, 2)),
    "tile of rows": _each(lambda h, r: (jnp.tile(h[None], [3, 1]) * r).sum(0)),
    "tile of features": lambda p, x: jnp.tile(hidden(p, x), (1, 3)),
    "tile, and the first copy": lambda p, x: jnp.tile(hidden(p, x), (3, 1))[:N],
    "tile of one electron": lambda p, x: (jnp.tile(hidden(p, x)[:, None], (1, 5, 1))).sum(1),
    "repeat": _each(lambda h, r: jnp.repeat(h, 2)),
    "repeat by counts": lambda p, x: jnp.repeat(hidden(p, x), np.array([1, 2, 0, 1]), axis=1),
    "repeat and take back": lambda p, x: jnp.repeat(hidden(p, x), 2, 0)[::2],
    "roll of one": _each(lambda h, r: jnp.roll(h, 1)),
    "roll of matrices": _each(lambda h, r: jnp.roll(_matrix(h, r), (1, 2), (0, 1)).sum(0)),
    "kron": _each(jnp.kron),
    "kron of matrices": _each(lambda h, r: jnp.kron(_matrix(h, r), jnp.eye(2)).sum(0)),
    "outer": _each(lambda h, r: jnp.outer(h, r).ravel()),
    "triu": lambda p, x: jnp.triu(_matrices(p, x)).sum(-1),
    "tril": _each(lambda h, r: jnp.tril(_matrix(h, r), -1).sum(0)),
    "triangle by index": _each(lambda h, r: _matrix(h, r)[UPPER]),
    "triangle by traced index": _each(lambda h, r: _matrix(h, r)[jnp.triu_indices(D, 1)]),
    "triangles by index": lambda p, x: _matrices(p, x)[:, UPPER[0], UPPER[1]],
    "triangle put back": _each(
        lambda h, r: jnp.zeros((D, D)).at[UPPER].set(_matrix(h, r)[UPPER]).sum(0)
    ),
    "diagonal": _each(lambda h, r: jnp.diag(_matrix(h, r))),
    "trace": _each(lambda h, r: h * jnp.trace(_matrix(h, r))),
    "slogdet": lambda p, x: jnp.linalg.slogdet(_matrices(p, x))[1][:, None],
    "slogdet with its sign": _each(
        lambda h, r: jnp.prod(jnp.stack(jnp.linalg.slogdet(_matrix(h, r))))[None]
    ),
    "det": lambda p, x: jnp.linalg.det(_matrices(p, x))[:, None],
    "det of three": _each(lambda h, r: jnp.linalg.det(_matrix(h, r)[:3, :3])[None]),
    "determinants by vmap": _each(lambda h, r: jax.vmap(
        lambda k: jnp.linalg.slogdet(k * _matrix(h, r) + jnp.eye(D))[1]
    )(jnp.arange(1.0, 4.0))),
    "a sum of determinants": _each(lambda h, r: jax.nn.logsumexp(
        jnp.linalg.slogdet(jnp.stack([_matrix(h, r), _matrix(r, h)]))[1]
    )[None]),
    "inv": lambda p, x: jnp.linalg.inv(_matrices(p, x)).sum(-1),
    "solve of one": _each(lambda h, r: jnp.linalg.solve(_matrix(h, r), h)),
    "cholesky of one": _each(lambda h, r: jnp.linalg.cholesky(jnp.outer(h, h) + jnp.eye(D)).sum(0)),
    "qr of one": _each(lambda h, r: jnp.abs(jnp.linalg.qr(_matrix(h, r))[1]).sum(0)),
    "eigh of one": _each(
        lambda h, r: jnp.linalg.eigh(jnp.outer(h, h) + jnp.diag(jnp.arange(4.0)))[1][0] ** 2
    ),
    "svd of one": _each(lambda h, r: jnp.linalg.svd(_matrix(h, r), compute_uv=False)),
    "norm": lambda p, x: hidden(p, x) / jnp.linalg.norm(hidden(p, x), axis=1, keepdims=True),
    "norms of matrices": _each(lambda h, r: h / jnp.stack([
        jnp.linalg.norm(_matrix(h, r), order) for order in ("fro", "nuc", 2, jnp.inf)
    ])),
    "map of determinants": lambda p, x: lax.map(
        lambda r: _log_determinant(hidden(p, r), r)[None], x, batch_size=4
    ),
    "map inside vmap": _each(lambda h, r: lax.map(lambda s: s * h.sum(), r, batch_size=3)),
    "map of chunks": lambda p, x: lax.map(
        lambda rows: hidden(p, rows), x.reshape(3, 2, D)
    ).reshape(N, D),
    "gradient of a determinant": lambda p, x: jax.vmap(
        jax.grad(lambda r: _log_determinant(hidden(p, r), r))
    )(x),
    "forward Laplacian": lambda p, x: jax.vmap(
        lambda r: _kinetic(p, r, _forward_laplacian)[None]
    )(x),
    "Laplacian in a loop": lambda p, x: jax.vmap(lambda r: _kinetic(p, r, _looped_laplacian)[None])(
        x
    ),
    "trace of a Hessian": lambda p, x: jax.vmap(
        lambda r: _kinetic(p, r, lambda f, r: jnp.trace(jax.hessian(f)(r)))[None]
    )(x),
}  # fmt: skip

# Where a gradient is stopped, or a value is compared, counted or rounded on the way.
VALUE_ONLY = frozenset(
    {
        "ranked",
        "cond on the batch",
        "while on the batch",
        "stopped mean",
        "compared with the mean",
        "rounded mean",
    }
)
# Whose rule of a derivative mixes what the function does not.
DERIVATIVE_ONLY = frozenset({"custom_vjp backward", "custom_jvp"})
EXPECTED = {
    name: Truth(name not in DERIVATIVE_ONLY, name not in VALUE_ONLY) for name in MIXING
} | dict.fromkeys(APART, Truth(False, False))
PROGRAMS = MIXING | APART
