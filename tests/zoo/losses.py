"""Losses that are no mean of one likelihood."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests._oracle import Block
from tests._programs import labels, normal
from tests.zoo import Case, program

FAMILY = "Losses"


def contrastive(p, batch):
    logits = (batch[0] @ p["image"]) @ (batch[1] @ p["text"]).T

    def one_way(logits):
        logits = jk.mark_outputs(logits, jk.Categorical(), weight=0.5)
        return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()

    return 0.5 * one_way(logits) + 0.5 * one_way(logits.T)


@program("contrastive loss in both directions (CLIP)", family=FAMILY, checked="brute force")
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
