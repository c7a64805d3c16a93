"""Losses that are no mean of one likelihood."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests._oracle import Block, oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Losses"


def contrastive(p, batch):
    logits = (batch[0] @ p["image"]) @ (batch[1] @ p["text"]).T

    def one_way(logits):
        logits = jk.mark_outputs(logits, jk.Categorical(), weight=0.5)
        return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()

    return 0.5 * one_way(logits) + 0.5 * one_way(logits.T)


@program(
    "contrastive loss in both directions (CLIP)",
    family=FAMILY,
    checked="brute force",
    unchecked=("text",),
)
def _contrastive():
    n, params = 5, {"image": normal(1, 3, 4), "text": normal(2, 2, 4)}
    images, texts = normal(3, n, 3), normal(4, n, 2)
    p = jax.nn.softmax((images @ params["image"]) @ (texts @ params["text"]).T)
    q = jax.nn.softmax(((images @ params["image"]) @ (texts @ params["text"]).T).T)
    score = (p - jnp.eye(n)) + (q - jnp.eye(n)).T  # each direction is half of a mean over n
    g = np.sqrt(0.5 / n) * np.asarray(score @ (texts @ params["text"]))
    a = np.asarray(images)
    factors = {"image": Block("dense", a.T @ a / n, g.T @ g, None)}
    return Case(contrastive, params, (images, texts), factors=factors)


@program("classes and boxes from one trunk", family=FAMILY, checked="brute force")
def _multi_task():
    def model(p, x):
        return {"class": x.mean(1) @ p["class"], "box": x @ p["box"]}

    likelihoods = {"class": jk.Categorical(), "box": jk.Gaussian()}
    params = {"class": normal(1, 3, 4), "box": normal(2, 3, 2)}
    x, targets = normal(3, 5, 2, 3), {"class": labels(4, 5, classes=4), "box": normal(5, 5, 2, 2)}
    pooled, rows = np.asarray(x.mean(1)), np.asarray(x).reshape(-1, 3)
    score = jax.nn.softmax(pooled @ params["class"]) - jax.nn.one_hot(targets["class"], 4)
    error = np.asarray(x @ params["box"] - targets["box"]).reshape(-1, 2)
    factors = {
        "class": Block("dense", pooled.T @ pooled / 5, np.asarray(score.T @ score) / 5, None),
        "box": Block("dense", rows.T @ rows / 10, error.T @ error / 10, None),
    }
    return Case(jk.Objective(model, likelihoods), params, (x, targets), factors=factors)


@program("two weighted terms on two sets of points", family=FAMILY, checked="Gauss-Newton")
def _two_terms():
    def loss(p, batch):
        (x, f), (z, h) = batch
        inside = jk.mark_outputs(x @ p["w"], jk.Gaussian(), weight=2.0)
        border = jk.mark_outputs(z @ p["w"], jk.Gaussian(), weight=20.0)
        return jnp.square(inside - f).sum(-1).mean() + 10 * jnp.square(border - h).sum(-1).mean()

    x, z = normal(1, 7, 3), normal(2, 4, 3)
    a = (np.asarray(2 * x.T @ x / 7 + 20 * z.T @ z / 4)) / 22  # times G it is the matrix itself
    factors = {"w": Block("dense", a, 22 * np.eye(2), None)}
    batch = (x, normal(3, 7, 2)), (z, normal(4, 4, 2))
    options = {"fisher": "exact"}
    return Case(loss, {"w": normal(5, 3, 2)}, batch, factors=factors, options=options)


def ppo(p, batch, mark=jk.mark_outputs):
    """The clipped objective of a policy, its value's error and its entropy, from one trunk."""
    x, action, before, advantage, gain = batch
    h = jnp.tanh(x @ p["trunk"])
    logits = mark(h @ p["policy"], jk.Categorical())
    value = mark(h @ p["value"], jk.Gaussian(), weight=0.5)  # (N,)
    log_p = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_p, action[:, None], 1)[:, 0] - before)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    error = 0.5 * jnp.square(value - gain)
    return (-surrogate + 0.5 * error - 0.01 * entropy).mean()


def actor_and_critic():
    params = tree(0, trunk=(4, 5), policy=(5, 3), value=(5,))
    x, action, n = normal(1, 6, 4, scale=1.0), labels(2, 6), 6
    batch = (x, action, jnp.log(jnp.full(n, 0.4)), normal(3, n, scale=1.0), normal(4, n))
    h = np.tanh(np.asarray(x @ params["trunk"]))
    return params, batch, h, np.asarray(jax.nn.softmax(h @ params["policy"]))


def blocks(params, x, h, policy, value):
    """Blocks of the three layers, from cotangents (pulls, N, classes) and (pulls, N)."""
    n = len(x)
    back = policy @ np.asarray(params["policy"]).T + value[..., None] * np.asarray(params["value"])
    back = back * (1 - h**2)
    dense = lambda a, g: Block("dense", a.T @ a / n, np.einsum("pni,pnj->ij", g, g) / n, None)
    return {
        "trunk": dense(np.asarray(x), back),
        "policy": dense(h, policy),
        "value": dense(h, value[..., None]),
    }


@program("PPO: policy and value from one trunk, natural gradient", family=FAMILY,
         checked="brute force")  # fmt: skip
def _ppo_exact():
    """The Fisher of the policy, and the value's Gauss-Newton matrix, as ACKTR takes them."""
    params, batch, h, p = actor_and_critic()
    classes = np.sqrt(p.T)[..., None] * (np.eye(3)[:, None] - p)  # (class, n, 3)
    policy = np.concatenate([classes, np.zeros((1, 6, 3))])
    value = np.concatenate([np.zeros((3, 6)), np.full((1, 6), np.sqrt(0.5))])
    factors = blocks(params, batch[0], h, policy, value)
    return Case(ppo, params, batch, factors=factors, options={"fisher": "exact"})


@program("PPO: clipped, at the gradient's own cotangents", family=FAMILY, checked="brute force")
def _ppo_clipped():
    """Where the ratio is clipped the policy's row is that of the entropy alone."""
    params, batch, h, p = actor_and_critic()
    x, action, before, advantage, gain = map(np.asarray, batch)
    ratio = p[np.arange(6), action] / np.exp(before)
    kept = np.where(advantage > 0, ratio < 1.2, ratio > 0.8)
    assert set(kept) == {True, False}
    score = np.eye(3)[action] - p
    entropy = -p * (np.log(p) - (p * np.log(p)).sum(-1, keepdims=True))
    policy = -(kept * advantage * ratio)[:, None] * score - 0.01 * entropy
    value = np.sqrt(0.5) * (h @ np.asarray(params["value"]) - gain)  # the root of the weight
    factors = blocks(params, x, h, policy[None], value[None])
    return Case(ppo, params, batch, factors=factors)


@program("a tuple of outputs: classes and a number for each example", family=FAMILY,
         checked="brute force")  # fmt: skip
def _tuple():
    params, (x, y, *_, gain), h, p = actor_and_critic()

    def apply_fn(p, x):
        h = jnp.tanh(x @ p["trunk"])
        return h @ p["policy"], h @ p["value"]

    policy = p - np.eye(3)[np.asarray(y)]
    value = h @ np.asarray(params["value"]) - np.asarray(gain)
    factors = blocks(params, x, h, policy[None], value[None])
    objective = jk.Objective(apply_fn, (jk.Categorical(), jk.Gaussian()))
    return Case(objective, params, (x, (y, gain)), factors=factors)


@program("two classes from one logit for each example, (N,)", family=FAMILY, checked="brute force")
def _one_logit():
    def model(p, x, tap):
        h = jnp.tanh(tap.dense("up", x, x @ p["up"]))
        return tap.dense("head", h, (h @ p["head"])[:, None])

    params, (x, y) = tree(0, up=(4, 5), head=(5,)), (normal(1, 6, 4), labels(2, 6, classes=2) * 1.0)
    factors = oracle(model, params, (x, y[:, None]), likelihood="bernoulli")
    objective = jk.Objective(lambda p, x: model(p, x, PLAIN)[:, 0], jk.Bernoulli())
    return Case(objective, params, (x, y), factors=factors)


@program("logits in bfloat16", family=FAMILY, checked="brute force")
def _bfloat16():
    """Cotangents, of a mean over six, are rounded to bfloat16 where the logits are."""
    params, x, y = tree(0, up=(4, 5), head=(5, 3)), normal(1, 6, 4), labels(2, 6)

    def apply_fn(p, x):
        return (jnp.tanh(x @ p["up"]) @ p["head"]).astype(jnp.bfloat16)

    h = np.tanh(np.asarray(x @ params["up"]))
    z = jnp.asarray(apply_fn(params, x), jnp.float32)
    g = jax.nn.softmax(z) - jax.nn.one_hot(y, 3, dtype=jnp.float32)
    g = 6 * np.asarray((g / 6).astype(jnp.bfloat16), np.float64)
    back = g @ np.asarray(params["head"]).T * (1 - h**2)
    x = np.asarray(x)
    factors = {
        "head": Block("dense", h.T @ h / 6, g.T @ g / 6, None),
        "up": Block("dense", x.T @ x / 6, back.T @ back / 6, None),
    }
    return Case(
        jk.Objective(apply_fn, jk.Categorical()), params, (jnp.asarray(x), y), factors=factors
    )
