"""Kernels that rows pick, loops in reverse, and losses that hold more than their marks."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests import derivatives_test, gathered_experts_test, several_readings_test
from tests._checks import objective_of, squares
from tests._derivatives import FORMS, blocks_of, points
from tests._oracle import Block, oracle
from tests._programs import labels, normal, tree
from tests.zoo import Case, program
from tests.zoo.derivatives import FAMILY as DERIVATIVES
from tests.zoo.flow import FAMILY as FLOW
from tests.zoo.losses import FAMILY as LOSSES
from tests.zoo.views import PARTS
from tests.zoo.weights import weight_norm


def _experts(way):
    params, batch = gathered_experts_test.params(), gathered_experts_test.batch()
    factors = gathered_experts_test.expected(params, batch)
    return Case(objective_of(gathered_experts_test.WAYS[way]), params, batch, factors=factors)


@program("experts' kernels gathered by token, top two", family=FLOW, checked="brute force")
def _gathered():
    return _experts("top-2")


@program("one expert's kernel by index, under vmap", family=FLOW, checked="brute force")
def _mapped():
    return _experts("vmap")


@program("kernels gathered by token in a scan of remat", family=FLOW, checked="brute force")
def _in_a_loop():
    return _experts("scan and remat")


@program("a conditioned layer: a kernel for each class", family=FLOW, checked="brute force")
def _by_class():
    """Every position of an example picks that example's kernel."""

    def apply_fn(p, inputs):
        x, kind = inputs
        return jnp.tanh(jnp.einsum("nsd,ndh->nsh", x, p["w"][kind])) @ p["head"]

    def every(p, inputs, tap):
        x, kind = inputs
        h = sum(
            jnp.where((kind == k)[:, None, None], tap.dense("w", x, x @ p["w"][k], at=(k,)), 0.0)
            for k in range(3)
        )
        return tap.dense("head", jnp.tanh(h), jnp.tanh(h) @ p["head"])

    kind = jnp.asarray([2, 0, 2, 0])
    params, x = tree(0, w=(3, 4, 5), head=(5, 3)), normal(1, 4, 2, 4)
    batch = (x, kind), labels(2, 4, 2)
    factors = oracle(every, params, batch)
    rows = [np.asarray(x)[np.asarray(kind) == k].reshape(-1, 4) for k in range(3)]
    a = np.stack([r.T @ r / max(len(r), 1) for r in rows])
    factors["w"] = factors["w"]._replace(a=a)
    packed = lambda p, inputs: apply_fn(p, (inputs["x"], inputs["kind"]))
    data = {"x": x, "kind": kind}, batch[1]
    return Case(jk.Objective(packed, jk.Categorical()), params, data, factors=factors)


@program("a list in which one layer is twice, stacked for a scan", family=PARTS,
         checked="brute force, unrolled")  # fmt: skip
def _twice():
    model = several_readings_test.TWICE["a, b, a"]
    objective = jk.Objective(lambda p, x: model(p, x, None), jk.Categorical())
    params, batch = tree(0, wa=(4, 4), wb=(4, 4)), (normal(1, 5, 4), labels(2, 5, classes=4))
    return Case(objective, params, batch, factors=oracle(model, params, batch))


@program("cond by example under vmap, a single example", family=FLOW, checked="brute force")
def _one_row():
    params, x = tree(0, a=(4, 4), b=(4, 4)), jnp.abs(normal(1, 1, 4))
    target = normal(2, 1, 4)
    model = jax.vmap(several_readings_test.routed, (None, 0))
    out = np.tanh(np.asarray(x @ params["a"]))
    g = (out - np.asarray(target)) * (1 - out**2)
    factors = {"a": Block("dense", np.asarray(x.T @ x), g.T @ g, None)}
    factors["b"] = Block("dense", np.zeros((4, 4)), np.zeros((4, 4)), None)
    return Case(jk.Objective(model, jk.Gaussian()), params, (x, target), factors=factors)


@program("PINN in reverse, its layers in a scan", family=DERIVATIVES,
         checked="brute force, unrolled", unchecked=("b1", "c"))  # fmt: skip
def _scanned():
    net, form = derivatives_test, FORMS["reverse over reverse"]
    params, (x, z) = net.scanned_params(), points()
    loss = net.loss_of(lambda p, x: form(lambda x: net.scanned(p, x), x) - 1.0, net.scanned)
    inside = lambda p, x: form(lambda x: net.written_out(p, x), x) - 1.0
    one = lambda xs: np.ones((1, len(xs), 1))
    parts = [(inside, x, 2.0, one(x)), (net.written_out, z, 20.0, one(z))]
    layers = jk.find_layers(loss, params, (x, z)).layers
    joined = {layer.name: layer.bias is not None for layer in layers}
    joined |= {f"m{i}": joined["m"] for i in range(net.LENGTH)}
    apart, factors = blocks_of(parts, net.layers_apart(params), joined), {}
    for layer in layers:
        names = [layer.name.replace("m", f"m{i}", 1) for i in range(net.LENGTH)]
        each = [apart[name] for name in (names if layer.stack else [layer.name]) if name in apart]
        if each:
            a, g = (np.stack([block[k] for block in each]) for k in (1, 2))
            a, g = (a, g) if layer.stack else (a[0], g[0])
            factors[layer.name] = Block("dense", a, g, None)
    return Case(loss, params, (x, z), factors=factors, options={"fisher": "exact"})


@program("a penalty on activations beside a mark", family=LOSSES, checked="brute force")
def _penalised():
    def model(p, x, tap):
        h = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        return tap.dense("head", h, h @ p["head"])

    def loss(p, batch):
        x, y = batch
        h = jnp.tanh(x @ p["w"])
        log_p = jax.nn.log_softmax(jk.mark_outputs(h @ p["head"], jk.Categorical()))
        return -jnp.take_along_axis(log_p, y[:, None], 1).mean() + jnp.abs(h).mean()

    params, batch = tree(0, w=(4, 5), head=(5, 3)), (normal(8, 6, 4), labels(9, 6))
    return Case(loss, params, batch, factors=oracle(model, params, batch))


@program("weight norm in a loss with marks", family=LOSSES,
         checked="brute force, squares of each example's gradient")  # fmt: skip
def _weight_norm():
    def model(p, x, tap):
        y = jnp.tanh(tap.dense("v@effective", x, x @ weight_norm(p)))
        return tap.dense("head", y, y @ p["head"])

    def loss(p, batch):
        x, y = batch
        h = jnp.tanh(x @ weight_norm(p)) @ p["head"]
        log_p = jax.nn.log_softmax(jk.mark_outputs(h, jk.Categorical()))
        return -jnp.take_along_axis(log_p, y[:, None], 1).mean()

    params, batch = tree(0, v=(4, 5), g=(5,), head=(5, 3)), (normal(8, 6, 4), labels(9, 6))
    behind = squares(objective_of(model), params, batch, ["v", "g"])
    return Case(loss, params, batch, factors=oracle(model, params, batch) | behind)
