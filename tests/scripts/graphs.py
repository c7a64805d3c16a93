"""Classes of graphs: several in one batch, as one large graph with padding."""

import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script, train

GRAPHS, NODES, EDGES, FEATURES = 16, 96, 192, 8  # of a batch; the last graph is padding


def graph_net(params, graph):
    nodes = graph["nodes"]
    for layer in params["layers"]:
        messages = jax.nn.relu(nodes @ layer["send"])[graph["senders"]]
        received = jax.ops.segment_sum(messages, graph["receivers"], NODES)
        nodes = jax.nn.relu(nodes @ layer["self"] + received @ layer["receive"] + layer["bias"])
    pooled = jax.ops.segment_sum(nodes, graph["graph"], GRAPHS)
    return pooled @ params["head"]


def batch_of(key):
    keys = jax.random.split(key, 4)
    graph = jnp.sort(jax.random.randint(keys[0], (NODES,), 0, GRAPHS))
    nodes = jax.random.normal(keys[1], (NODES, FEATURES))
    senders = jax.random.randint(keys[2], (EDGES,), 0, NODES)
    shift = jax.random.randint(keys[3], (EDGES,), 1, 5)
    receivers = jnp.where(graph[(senders + shift) % NODES] == graph[senders], senders + shift, 0)
    batch = {"nodes": nodes, "senders": senders, "receivers": receivers % NODES, "graph": graph}
    score = jax.ops.segment_sum(nodes[:, 0] * nodes[:, 1], graph, GRAPHS)
    return batch, (score > 0).astype(jnp.int32), jnp.arange(GRAPHS) < GRAPHS - 1


@script("graphs: a batch of graphs, padding")
def run(optimizer, seed):
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    matrix = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5
    layers = [
        {
            "send": matrix(rows, 16),
            "receive": matrix(16, 16),
            "self": matrix(rows, 16),
            "bias": jnp.zeros(16),
        }
        for rows in (FEATURES, 16)
    ]
    params = {"layers": layers, "head": matrix(16, 2)}
    opt = jk.Optimizer(jk.Objective(graph_net, jk.Categorical()), optimizer)
    return train(opt, params, batch_of, seed)
