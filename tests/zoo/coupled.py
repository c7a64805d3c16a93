"""Programs in which examples of a batch meet, or look as if they did."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse  # noqa: TID251

import jaxkfac as jk
from tests._checks import squares
from tests._programs import labels, normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Examples that meet, or seem to"
N, D, H = 5, 4, 3
EDGES = np.array([[0, 0], [0, 1], [1, 2], [2, 2], [3, 0], [3, 4], [4, 3]])


def adjacency():
    values = jnp.linspace(0.5, 1.5, len(EDGES))
    return sparse.BCOO((values, jnp.asarray(EDGES)), shape=(N, N))


def graph_convolution(p, x, tap):
    """Two layers, each followed by a mean over neighbors."""
    mixed = adjacency() if tap is PLAIN else adjacency().todense()
    h = jnp.tanh(mixed @ tap.dense("up", x, x @ p["up"]))
    return mixed @ tap.dense("down", h, h @ p["down"])


@program("graph convolution, its neighbors a constant BCOO matrix", family=FAMILY,
         checked="brute force over the whole graph")  # fmt: skip
def _graph():
    objective = jk.Objective(lambda p, x: graph_convolution(p, x, PLAIN), jk.Categorical())
    batch = normal(1, N, D), labels(2, N)
    return Case(objective, tree(0, up=(D, 5), down=(5, 3)), batch, graph_convolution, coupled=True)


def time_major(p, x, tap):
    """A recurrence over ``(T, N, D)``, written out for brute force."""
    step = lambda h, r, tap: jnp.tanh(
        tap.dense("rows", r, r @ p["rows"]) + tap.dense("again", h, h @ p["again"])
    )
    sequences, h = x.swapaxes(0, 1), jnp.zeros((len(x), H))
    if tap is PLAIN:
        h, _ = lax.scan(lambda h, r: (step(h, r, PLAIN), None), h, sequences)
    else:
        for r in sequences:
            h = step(h, r, tap)
    return tap.dense("head", h, h @ p["head"])


@program("recurrence over time-major sequences", family=FAMILY, checked="brute force, unrolled")
def _time_major():
    objective = jk.Objective(lambda p, x: time_major(p, x, PLAIN), jk.Categorical())
    params = tree(0, rows=(D, H), again=(H, H), head=(H, 3))
    return Case(objective, params, (normal(1, N, 4, D), labels(2, N)), time_major)


def autoencoder(p, x, tap):
    h = jnp.tanh(tap.dense("w", x, x @ p["w"] + p["b"], bias=True))
    return tap.dense("w@transposed", h, h @ p["w"].T + p["c"], bias=True)


@program("tied autoencoder, a bias on either side", family=FAMILY, checked="brute force")
def _autoencoder():
    objective = jk.Objective(lambda p, x: autoencoder(p, x, PLAIN), jk.Gaussian())
    params, x = tree(0, w=(D, H), b=(H,), c=(D,)), normal(1, N, D)
    return Case(objective, params, (x, x), autoencoder, likelihood="gaussian")


def siamese(p, x, tap):
    """SimSiam's two views through one encoder, the target stopped."""
    views = jnp.concatenate([x, jnp.sin(x)])
    h = tap.dense("encoder", views, views @ p["encoder"])
    one, other = jnp.split(h, 2)
    y = tap.dense("predictor", one, one @ p["predictor"])
    return y - lax.stop_gradient(other)


@program("SimSiam: two views side by side along the batch, a stopped target", family=FAMILY,
         checked="brute force")  # fmt: skip
def _siamese():
    objective = jk.Objective(lambda p, x: siamese(p, x, PLAIN), jk.Gaussian())
    params = tree(0, encoder=(D, H), predictor=(H, H))
    batch = normal(1, N, D), jnp.zeros((N, H))
    return Case(objective, params, batch, siamese, likelihood="gaussian")


def normalized(p, x, tap):
    h = tap.dense("up", x, x @ p["up"])
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    y = tap.scale("norm/weight", h, h * p["norm"]["weight"], shape=(H,))
    y = jnp.tanh(tap.lone_bias("norm/bias", y + p["norm"]["bias"], shape=(H,)))
    return tap.dense("head", y, y @ p["head"])


@program("Equinox: BatchNorm over the axis of a vmap, in training", family=FAMILY,
         checked="brute force over the whole batch")  # fmt: skip
def _equinox_batch_norm():
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, state = make(H, "batch", eps=1e-5, mode="batch", dtype=jnp.float64)

    def apply_fn(p, x):
        own = eqx.tree_at(
            lambda n: (n.weight, n.bias), norm, (p["norm"]["weight"], p["norm"]["bias"])
        )
        call = jax.vmap(own, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return jnp.tanh(call(x @ p["up"], state)[0]) @ p["head"]

    params = tree(0, up=(D, H), norm__weight=(H,), norm__bias=(H,), head=(H, 3))
    batch = normal(1, N, D), labels(2, N)
    return Case(jk.Objective(apply_fn, jk.Categorical()), params, batch, normalized, coupled=True)


def euler(p, x, tap):
    for _ in range(4):
        x = x + 0.25 * jnp.tanh(tap.dense("field", x, x @ p["field"]))
    return tap.dense("head", x, x @ p["head"])


def _solved_by_diffrax(adjoint):
    import diffrax

    def apply_fn(p, x):
        def one(row):
            term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
            solution = diffrax.diffeqsolve(
                term, diffrax.Euler(), 0.0, 1.0, 0.25, row, args=p["field"], max_steps=8,
                adjoint=getattr(diffrax, adjoint)(), saveat=diffrax.SaveAt(t1=True),
            )  # fmt: skip
            return solution.ys[0] @ p["head"]

        return jax.vmap(one)(x)

    params = tree(0, field=(D, D), head=(D, 3))
    return jk.Objective(apply_fn, jk.Categorical()), params, (normal(1, N, D), labels(2, N))


@program("diffrax: a neural differential equation, DirectAdjoint", family=FAMILY,
         checked="brute force, unrolled", needs=("diffrax",))  # fmt: skip
def _diffrax_direct():
    return Case(*_solved_by_diffrax("DirectAdjoint"), euler)


@program("diffrax: the same with its default adjoint", family=FAMILY, checked="gradient",
         uncovered={"field": "`while`", "head": "example axis lost"},
         needs=("diffrax",))  # fmt: skip
def _diffrax_default():
    return Case(*_solved_by_diffrax("RecursiveCheckpointAdjoint"))


# ------------------------------------------------------------------ gradients in the forward pass


def network(p, x):
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def adapted(p, tasks, *, first_order):
    """MAML: the network of each task is a gradient step away, taken on the task's support."""

    def one(support, classes, query):
        def inner(p):
            chosen = jax.nn.log_softmax(network(p, support))[jnp.arange(len(classes)), classes]
            return -chosen.mean()

        step = jax.grad(inner)(p)
        step = lax.stop_gradient(step) if first_order else step
        return network(jax.tree.map(lambda w, s: w - 0.5 * s, p, step), query)

    return jax.vmap(one)(*tasks)


def _maml(*, first_order):
    objective = jk.Objective(
        lambda p, tasks: adapted(p, tasks, first_order=first_order), jk.Categorical()
    )
    tasks = normal(1, N, 4, D), labels(2, N, 4), normal(3, N, 2, D)
    return objective, tree(0, up=(D, H), bias=(H,), down=(H, 3)), (tasks, labels(4, N, 2))


@program("MAML, first order: a step of its own for each task", family=FAMILY,
         checked="squares of each task's gradient")  # fmt: skip
def _maml_first_order():
    objective, params, batch = _maml(first_order=True)
    return Case(objective, params, batch, factors=squares(objective, params, batch, params))


@program("MAML", family=FAMILY, checked="gradient")
def _maml_of_both_orders():
    return Case(*_maml(first_order=False))
