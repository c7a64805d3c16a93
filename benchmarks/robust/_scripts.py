"""Three trainings in which adaptive K-FAC without its safeguard diverged, as problems."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, dense_layers, glorot, rows

# ---------------- a perceptron on features that nobody scaled, and one batch


_FEATURES = (9, 128, 128, 128, 2)


def _features() -> Arrays:
    """Features in [0, 30]; the class depends on two of them."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 30, (512, _FEATURES[0])).astype(np.float32)
    labels = (np.sin(x[:, 0] / 3) + x[:, 1] / 15 > 1).astype(np.int32)
    parts = {"inputs": x[:256], "labels": labels[:256]}
    return parts | {"validation_inputs": x[256:], "validation_labels": labels[256:]}


def _all_examples(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    return data["inputs"], data["labels"]


def _relu_logits(params: Any, x: jax.Array) -> jax.Array:
    for p in params[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _nats(z: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], -1).mean()


def _features_loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    x, labels = batch
    return _nats(mark("categorical", _relu_logits(params, x), labels), labels)


def _features_measure(params: Any, data: Any) -> jax.Array:
    return _nats(_relu_logits(params, data["inputs"]), data["labels"])


UNSCALED = Problem(
    name="unscaled_perceptron",
    title="ReLU perceptron 9-128-128-128-2, features in [0, 30], one batch of 256",
    measure="cross entropy of the batch, nats",
    fisher="mc",
    data=_features,
    initial=lambda seed: dense_layers(seed, _FEATURES),
    batch=_all_examples,
    loss=_features_loss,
    validate=_features_measure,
)


# ---------------- a graph network on one batch of graphs


_GRAPHS, _NODES, _EDGES, _WIDTH, _ROUNDS = 32, 18, 40, 64, 3


def _graphs() -> Arrays:
    """Random graphs as one disconnected graph; the class is the parity of a count of nodes."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 7, (_GRAPHS, _NODES))
    ends = rng.integers(0, _NODES, (2, _GRAPHS, _EDGES)) + _NODES * np.arange(_GRAPHS)[:, None]
    parts = {
        "nodes": np.eye(7, dtype=np.float32)[kinds.ravel()],
        "senders": ends[0].ravel().astype(np.int32),
        "receivers": ends[1].ravel().astype(np.int32),
        "labels": ((kinds == 3).sum(1) % 2).astype(np.int32),
    }
    return parts


def _graph_params(seed: int) -> dict[str, Any]:
    sizes = [7] + [_WIDTH] * _ROUNDS
    rng = np.random.default_rng(seed)
    params = {}
    for i, n in enumerate(sizes[:-1]):
        params[f"edges{i}"] = {"w": glorot(rng, 2 * n, _WIDTH), "b": np.zeros(_WIDTH, np.float32)}
        params[f"nodes{i}"] = {
            "w": glorot(rng, n + _WIDTH, _WIDTH),
            "b": np.zeros(_WIDTH, np.float32),
        }
    return params | {"head": {"w": glorot(rng, _WIDTH, 2), "b": np.zeros(2, np.float32)}}


def _graph_logits(params: Any, batch: Any) -> jax.Array:
    """Messages along edges are summed at nodes, and nodes over their graph."""
    x, senders, receivers = batch["nodes"], batch["senders"], batch["receivers"]
    for i in range(_ROUNDS):
        p, q = params[f"edges{i}"], params[f"nodes{i}"]
        messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ p["w"] + p["b"])
        arrived = jax.ops.segment_sum(messages, receivers, _GRAPHS * _NODES)
        x = jax.nn.relu(jnp.concatenate([x, arrived], -1) @ q["w"] + q["b"])
    summed = x.reshape(_GRAPHS, _NODES, -1).sum(1)
    return summed @ params["head"]["w"] + params["head"]["b"]


def _graph_loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    return _nats(
        mark("categorical", _graph_logits(params, batch), batch["labels"]), batch["labels"]
    )


def _graph_measure(params: Any, data: Any) -> jax.Array:
    return _nats(_graph_logits(params, data), data["labels"])


GRAPHS = Problem(
    name="graph_network",
    title="Graph network of three rounds with summed messages, one batch of 32 graphs",
    measure="cross entropy of the batch, nats",
    fisher="mc",
    data=_graphs,
    initial=_graph_params,
    batch=lambda data, seed, step: dict(data),
    loss=_graph_loss,
    validate=_graph_measure,
)


# ---------------- a gated recurrent unit that tells spirals apart


_STATE, _LENGTH, _SPIRALS, _HELD_OUT, _BATCH = 16, 16, 4096, 1024, 32


def _spirals() -> Arrays:
    """Noisy spirals, half of them mirrored; the class is the direction."""
    rng = np.random.default_rng(0)
    total = _SPIRALS + _HELD_OUT
    t = np.linspace(0, 2 * np.pi, _LENGTH)
    offset = rng.uniform(0, 2 * np.pi, (total, 1))
    x = np.stack([np.sin(t + offset), np.cos(t + offset)], -1) / (1 + t[:, None])
    labels = np.arange(total) % 2
    x[labels == 1, :, 0] *= -1
    x, labels = x.astype(np.float32), labels.astype(np.float32)
    parts = {"inputs": x[:_SPIRALS], "labels": labels[:_SPIRALS]}
    return parts | {"validation_inputs": x[_SPIRALS:], "validation_labels": labels[_SPIRALS:]}


def _spiral_batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = rows(_SPIRALS, _BATCH, seed, step)
    return data["inputs"][chosen], data["labels"][chosen]


def _gru_params(seed: int) -> dict[str, np.ndarray]:
    rng, limit = np.random.default_rng(seed), _STATE**-0.5

    def uniform(*shape: int) -> np.ndarray:
        return rng.uniform(-limit, limit, shape).astype(np.float32)

    return {
        "inputs": uniform(2, 3 * _STATE),
        "states": uniform(_STATE, 3 * _STATE),
        "bias": uniform(3 * _STATE),
        "state_bias": uniform(3 * _STATE),
        "head": uniform(_STATE, 1),
        "head_bias": np.zeros(1, np.float32),
    }


def _gru_logits(params: Any, x: jax.Array) -> jax.Array:
    def read(state: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        i = jnp.split(now @ params["inputs"] + params["bias"], 3, -1)
        h = jnp.split(state @ params["states"] + params["state_bias"], 3, -1)
        reset, keep = jax.nn.sigmoid(i[0] + h[0]), jax.nn.sigmoid(i[1] + h[1])
        return keep * state + (1 - keep) * jnp.tanh(i[2] + reset * h[2]), None

    start = jnp.zeros((len(x), _STATE), x.dtype)
    last, _ = jax.lax.scan(read, start, jnp.swapaxes(x, 0, 1))
    return last @ params["head"] + params["head_bias"]


def _binary_nats(z: jax.Array, labels: jax.Array) -> jax.Array:
    return (jax.nn.softplus(z[:, 0]) - labels * z[:, 0]).mean()


def _spiral_loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    x, labels = batch
    return _binary_nats(mark("bernoulli", _gru_logits(params, x), labels[:, None]), labels)


def _spiral_measure(params: Any, data: Any) -> jax.Array:
    z = _gru_logits(params, data["validation_inputs"])
    return _binary_nats(z, data["validation_labels"])


SPIRALS = Problem(
    name="spirals",
    title="GRU of width 16 that tells spirals apart, batches of 32",
    measure="cross entropy of held-out spirals, nats",
    fisher="mc",
    data=_spirals,
    initial=_gru_params,
    batch=_spiral_batch,
    loss=_spiral_loss,
    validate=_spiral_measure,
    steps=200,
)

SCRIPTS = (UNSCALED, GRAPHS, SPIRALS)
