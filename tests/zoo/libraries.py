"""Models of libraries that the tests' environment need not have: ``make zoo``."""

import importlib
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program
from tests.zoo._inside import (
    INSIDE,
    SCAN,
    convolution,
    drawn,
    equinox_group_norm,
    equinox_linear,
    linen_dense,
    loop_of_vmap,
    tapped,
    through,
)

FAMILY = "Models of other libraries"


# ------------------------------------------------------------------ jraph: graphs


def _graph(seed: int = 0, nodes: int = 5, edges: int = 7) -> Any:
    import jraph

    draw = np.random.default_rng(seed)
    return jraph.GraphsTuple(
        nodes=draw.normal(size=(nodes, 3)),
        edges=draw.normal(size=(edges, 2)),
        senders=draw.integers(0, nodes, edges),
        receivers=draw.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=draw.normal(size=(1, 2)),
    )


def _on_nodes(net: nn.Module) -> Case:
    graph = _graph()

    def apply_fn(params, nodes):
        return net.apply(params, graph._replace(nodes=nodes)).nodes

    params = drawn(net.init(jax.random.key(0), graph))
    objective, batch = jk.Objective(apply_fn, jk.Categorical()), (graph.nodes, labels(1, 5))
    return Case(objective, params, batch, tapped(apply_fn, linen_dense), coupled=True)


@program("jraph: GraphNetwork", family=FAMILY, checked=INSIDE, needs=("jraph",))
def _graph_network():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            def dense(size):
                return jraph.concatenated_args(nn.Dense(size))

            net = jraph.GraphNetwork(dense(4), dense(3))  # edges, nodes: what the outputs read
            return net(graph)

    return _on_nodes(Net())


@program("jraph: graph convolution", family=FAMILY, checked=INSIDE, needs=("jraph",))
def _graph_convolution():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            return jraph.GraphConvolution(nn.Dense(3), add_self_edges=True)(graph)

    return _on_nodes(Net())


@program("jraph: graph attention", family=FAMILY, checked=INSIDE, needs=("jraph",))
def _graph_attention():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            logit = nn.Dense(1)
            net = jraph.GAT(
                nn.Dense(4), lambda s, r, e: logit(jnp.concatenate([s, r], -1)), nn.Dense(3)
            )
            return net(graph._replace(edges=None))

    return _on_nodes(Net())


# ------------------------------------------------------------------ Equinox: fields and memory


def _equinox(model: Any, inputs: jax.Array, outputs: Any, layers: list, **options: Any) -> Case:
    """A model for one example, and Gaussian targets."""
    import equinox as eqx

    params, rest = eqx.partition(model, eqx.is_inexact_array)
    params = drawn(params)

    def apply_fn(params, x):
        return jax.vmap(lambda row: outputs(eqx.combine(params, rest), row))(x)

    def unrolled(params, x):
        return jnp.stack([outputs(eqx.combine(params, rest), row) for row in x])

    targets = normal(2, *jax.eval_shape(apply_fn, params, inputs).shape)
    objective = jk.Objective(apply_fn, jk.Gaussian())
    linear = through(eqx.nn.Linear, "__call__", equinox_linear)
    twin = tapped(unrolled, linear, *layers)
    return Case(objective, params, (inputs, targets), twin, likelihood="gaussian", **options)


@program("pdequinox: UNet", family=FAMILY, checked=INSIDE, needs=("pdequinox",))
def _unet():
    import equinox as eqx
    import pdequinox

    net = pdequinox.arch.ClassicUNet(
        1, 1, 1, hidden_channels=4, num_levels=1, key=jax.random.key(0)
    )
    layers = [
        through(jax.lax, "conv_general_dilated", convolution),
        through(eqx.nn.GroupNorm, "__call__", equinox_group_norm),
    ]
    return _equinox(net, normal(1, 2, 1, 8), lambda net, row: net(row), layers)


def _equivariant_linear(inside, theirs, x, linear, get_parameter):
    """A kernel for each pair of irreps; components of one irrep are rows."""
    import e3nn_jax as e3nn

    kernels = []

    def get(*args):
        kernels.append(get_parameter(*args))
        return kernels[-1]

    y = theirs(x, linear, get)
    chunks = list(y.chunks)
    for path, kernel in zip(linear.instructions, kernels, strict=True):
        rows = jnp.swapaxes(x.chunks[path.i_in], -1, -2)
        z = inside.tap.dense(inside.name(kernel), rows, jnp.zeros_like(rows @ kernel))
        chunks[path.i_out] += path.path_weight * jnp.swapaxes(z, -1, -2)
    return e3nn.from_chunks(y.irreps, chunks, y.shape[:-1])


@program("e3nn: equivariant linear layers", family=FAMILY, checked=INSIDE, needs=("e3nn_jax",))
def _equivariant():
    import e3nn_jax as e3nn

    module = importlib.import_module("e3nn_jax._src.linear_flax")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = e3nn.IrrepsArray("2x0e + 1x1o", x)
            x = e3nn.flax.Linear("4x0e + 2x1o")(x)
            lengths = e3nn.norm(x.filter("1o"))
            x = e3nn.scalar_activation(x.filter("0e"), [jax.nn.gelu])
            return e3nn.flax.Linear("3x0e")(e3nn.concatenate([x, lengths])).array

    net, x = Net(), normal(1, 4, 5)
    params = drawn(net.init(jax.random.key(0), x))
    twin = tapped(net.apply, through(module, "linear_vanilla", _equivariant_linear))
    return Case(jk.Objective(net.apply, jk.Categorical()), params, (x, labels(2, 4)), twin)


def _memax(name: str, *layers: Any, **options: Any) -> Case:
    """Recurrent layers over time, of one sequence at a time."""
    import equinox as eqx
    from memax.equinox import train_utils

    net = train_utils.get_residual_memory_model(name, 3, 4, 2, num_layers=1, key=jax.random.key(0))
    starts = jnp.zeros(5, bool)

    def outputs(net, row):
        return net(net.initialize_carry(), (row, starts))[1]

    residual = importlib.import_module("memax.equinox.models.residual")
    loops = [through(owner, "filter_vmap", loop_of_vmap) for owner in (eqx, residual)]
    return _equinox(net, normal(1, 2, 5, 3), outputs, [SCAN, *loops, *layers], **options)


@program("memax: gated recurrent unit", family=FAMILY, checked=INSIDE, needs=("memax",))
def _memax_gru():
    return _memax("GRU")


@program("memax: linear recurrence", family=FAMILY, checked=INSIDE, needs=("memax",))
def _memax_linear():
    return _memax("LinearRNN")


@program("memax: gated delta net", family=FAMILY, checked=INSIDE, needs=("memax",))
def _memax_delta():
    return _memax("GDN")


def _selective(inside, theirs, self, x, key=None):
    """S6's inputs to its scan, written again: ``A_log`` is read twice."""
    (x, start), name, shape = x, inside.name(self.A_log), self.A_log.shape
    a, dt = -jnp.exp(self.A_log), self.dt(x)
    decay = jnp.exp(inside.tap.scale(name, dt * a, dt * a, shape=shape))
    held = inside.tap.scale(name, (1 - decay) / a, (decay - 1) / a, shape=shape)
    return (decay, held * self.B(x) * x), start


@program(
    "memax: S6 (Mamba)",
    family=FAMILY,
    checked=f"{INSIDE}; inputs of its scan written again",
    needs=("memax",),
)
def _memax_mamba():
    from memax.equinox.semigroups.s6 import S6

    return _memax("S6", through(S6, "forward_map", _selective))


# Parts of complex matrices, and what is behind them.
COMPLEX = tuple(
    f"layers/0/{name}" for name in "B_re B_im C_re C_im gamma_log nu_log theta_log".split()
)


def _skipped(inside, theirs, self, h, x, key=None):
    y = theirs(self, h, x, key)
    return y + inside.tap.scale(inside.name(self.D), x[0], jnp.zeros_like(y), shape=y.shape)


@program(
    "memax: linear recurrent unit, complex",
    family=FAMILY,
    checked=f"{INSIDE}, to 1e-6: its state is of complex64",
    unchecked=COMPLEX,
    needs=("memax",),
)
def _memax_lru():
    from memax.equinox.semigroups.lru import LRU

    return _memax("LRU", through(LRU, "backward_map", _skipped), tolerance=1e-6)


# ------------------------------------------------------------------ NumPyro, Keras


@program("NumPyro: a Bayesian network, its log density", family=FAMILY, checked="brute force",
         needs=("numpyro",))  # fmt: skip
def _numpyro():
    import numpyro
    from numpyro.infer.util import log_density

    dist = numpyro.distributions
    shapes = {"up": (4, 5), "down": (5, 3)}

    def model(x, y):
        p = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(2))
            for name, shape in shapes.items()
        }
        logits = jk.mark_outputs(two_layers(p, x, PLAIN), jk.Categorical())
        with numpyro.plate("examples", len(x)):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    def loss(params, batch):
        return -log_density(model, batch, {}, params)[0] / len(batch[0])

    params, batch = tree(0, **shapes), (normal(1, 5, 4), labels(2, 5))
    return Case(loss, params, batch, factors=oracle(two_layers, params, batch))


def two_layers(p, x, tap):
    h = jnp.tanh(tap.dense("up", x, x @ p["up"]))
    return tap.dense("down", h, h @ p["down"])


@program(
    "Keras: dense layers and a normalization, stateless",
    family=FAMILY,
    checked="brute force, to 1e-6: its normalization rounds to float32",
    needs=("keras",),
)
def _keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    layers = keras.layers
    kinds = {"dtype": "float64"}
    net = keras.Sequential(
        [
            layers.Input((4,), **kinds),
            layers.Dense(5, activation="tanh", **kinds),
            layers.LayerNormalization(**kinds),
            layers.Dense(3, **kinds),
        ]
    )
    shapes = [v.shape for v in net.trainable_variables]
    params = [normal(i, *shape) for i, shape in enumerate(shapes)]
    fixed = [v.value for v in net.non_trainable_variables]

    def apply_fn(params, x):
        return net.stateless_call(params, fixed, x)[0]

    def twin(p, x, tap):
        h = jnp.tanh(tap.dense("0", x, x @ p[0] + p[1], bias=True))
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)
        h = tap.scale("2", h, h * p[2], shape=p[2].shape)
        h = tap.lone_bias("3", h + p[3], shape=p[3].shape)
        return tap.dense("4", h, h @ p[4] + p[5], bias=True)

    objective, batch = jk.Objective(apply_fn, jk.Categorical()), (normal(9, 5, 4), labels(2, 5))
    return Case(objective, params, batch, twin, tolerance=1e-6)
