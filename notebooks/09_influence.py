# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Influence
#
# **Which training images most influenced an answer, and do such scores find wrong labels?**
#
# An influence function says what the loss of a query would do if one training example counted a
# little more. It multiplies two gradients through the inverse curvature of the loss, and Kronecker
# factors are that curvature. Here a small network learns digits, a tenth of which have a wrong
# label, so that we know what there is to find.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small decompositions on few cores

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac.data import load_digits
from jaxkfac.models import MLP

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

# %%
train, test = load_digits("train", seed=0), load_digits("test", seed=0)
rng = np.random.default_rng(0)
number = len(train.labels)
flipped = rng.permutation(number)[: number // 10]
labels = np.array(train.labels)
labels[flipped] = (labels[flipped] + rng.integers(1, 10, len(flipped))) % 10
batch = jnp.asarray(train.images.reshape(number, 64)), jnp.asarray(labels)
wrong = np.isin(np.arange(number), flipped)
print(f"{number} training images, {wrong.sum()} of them with a wrong label")

# %% [markdown]
# ## A network that has learnt the wrong labels too
#
# Full batches, Adam and a small penalty. `keep` weighs the examples: all ones now, and zeros later
# for those that we leave out.

# %%
apply_fn, initial = jk.from_nnx(
    MLP((64, 32, 10), activation=jnp.tanh, rngs=nnx.Rngs(0))
)
objective = jk.Objective(apply_fn, jk.Categorical())
adam = optax.adam(1e-2)


@jax.jit
def fit(keep):
    def loss(params):
        each = optax.softmax_cross_entropy_with_integer_labels(
            apply_fn(params, batch[0]), batch[1]
        )
        return (each * keep).sum() / keep.sum() + 5e-4 * sum(
            jnp.vdot(x, x) for x in jax.tree.leaves(params)
        )

    def step(carry, _):
        params, state = carry
        updates, state = adam.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (initial, adam.init(initial)), length=200)[0][0]


def accuracy(params):
    logits = apply_fn(params, test.images.reshape(-1, 64))
    return float((jnp.argmax(logits, axis=-1) == test.labels).mean())


params = fit(jnp.ones(number))
print(f"test accuracy {accuracy(params):.3f}")

# %% [markdown]
# ## The curvature
#
# Factors of all the training images, their eigenvectors, and the eigenvalues measured along them
# (EKFAC), which makes a better curvature of the same bases.

# %%
stats = jax.jit(jk.value_grad_and_factors(objective, fisher="mc"))
bases = jk.eigendecompose(stats(params, batch, jax.random.key(0)).factors)
measure = jax.jit(jk.correct_eigenvalues(objective, bases, fisher="mc"))
bases = measure(params, batch, jax.random.key(1))

# %% [markdown]
# ## Examples that stand alone
#
# `jk.self_influence` is the score of an example with itself: large where the model had to bend for
# one example that the others do not support. A wrong label makes such an example. The loss of the
# example is a simple alternative, and a fair one to compare with.

# %%
own = np.asarray(jk.self_influence(objective, params, bases, batch))
losses = optax.softmax_cross_entropy_with_integer_labels(
    apply_fn(params, batch[0]), batch[1]
)
orders = {
    "self-influence": np.argsort(-own),
    "the loss": np.argsort(-np.asarray(losses)),
}
found = {name: np.cumsum(wrong[order]) / wrong.sum() for name, order in orders.items()}
fifth = number // 5
for name, curve in found.items():
    print(
        f"by {name}: {100 * curve[fifth - 1]:.0f} % of the wrong labels "
        "are in the first fifth"
    )
assert found["self-influence"][fifth - 1] >= 0.8

# %% [markdown]
# What are they worth? Trained again without the tenth of the images that has the largest
# self-influence, the network does better on the test set; without as many at random it does not.

# %%
tenth = number // 10
without = {
    "everything": np.ones(number),
    "without the suspects": np.where(
        np.isin(np.arange(number), orders["self-influence"][:tenth]), 0.0, 1.0
    ),
    "without as many others": np.where(rng.permutation(number) < tenth, 0.0, 1.0),
}
after = {
    name: accuracy(fit(jnp.asarray(keep, jnp.float32)))
    for name, keep in without.items()
}
for name, share in after.items():
    print(f"trained on {name}: test accuracy {share:.3f}")
assert after["without the suspects"] > max(
    after["everything"], after["without as many others"]
)

# %% [markdown]
# ## Which images influenced an answer
#
# Here are the scores of a few test images with every training image. A positive score means that
# training on it lowers the loss of the query. We ask about three images that the network gets right
# and three that it gets wrong.

# %%
inputs = jnp.asarray(test.images.reshape(-1, 64))
answers = np.asarray(jnp.argmax(apply_fn(params, inputs), axis=-1))
right, missed = (
    np.flatnonzero(x)[:3] for x in (answers == test.labels, answers != test.labels)
)
asked = np.concatenate([right, missed])
queries = inputs[asked], jnp.asarray(test.labels[asked])
scores = np.asarray(jk.influence(objective, params, bases, queries, batch))
helpful, harmful = np.argsort(-scores)[:, :4], np.argsort(scores)[:, :4]
same = np.mean(labels[helpful] == test.labels[asked][:, None])
share = [wrong[helpful].mean(), wrong[harmful].mean()]
print(f"{100 * same:.0f} % of the most helpful images have the query's label")
print(
    f"wrong labels: {share[0]:.2f} of the helpful, {share[1]:.2f} of the harmful ones"
)
assert same > 0.8 and share[1] > 0.5 > share[0]

# %% [markdown]
# ## The answer
#
# Each row is a query, the images that help it most, and those that harm it most, with the labels
# that they were given; red labels are the wrong ones. Nearly all helpful images (96 %) carry the
# label of the query, and most harmful images (83 %) have a wrong label. In the order by
# self-influence, all wrong labels are in the first fifth. On this network the order by the loss,
# which needs no curvature, is nearly as good, with 99 %. It cannot give the left half of the
# figure.

# %%
fig = plt.figure(figsize=(9.2, 5.0), layout="constrained")
left, right = fig.subfigures(1, 2, width_ratios=(1.7, 1))
axes = left.subplots(6, 10)
for row, query in enumerate(asked):
    shown = [None, *helpful[row], None, *harmful[row]]
    for axis in axes[row]:
        axis.axis("off")
    axes[row, 0].imshow(test.images[query], cmap="gray_r")
    said = f"{test.labels[query]}" + (
        "" if answers[query] == test.labels[query] else f", said {answers[query]}"
    )
    axes[row, 0].set_title(said, fontsize=8)
    for axis, one in zip(axes[row], shown, strict=True):
        if one is not None:
            axis.imshow(train.images[one], cmap="gray_r")
            color = "#b3261e" if wrong[one] else jk.plot.INK
            axis.set_title(str(labels[one]), fontsize=8, color=color)
left.text(0.01, 1.02, "query")
left.text(0.14, 1.02, "most helpful")
left.text(0.63, 1.02, "most harmful")
axis = right.subplots()
looked = np.arange(1, number + 1) / number
for (name, curve), color in zip(
    found.items(), (jk.plot.SIDES["A"], jk.plot.SIDES["G"])
):
    axis.plot(looked, curve, label=f"by {name}", color=color)
axis.plot(
    [0, 1], [0, 1], color=jk.plot.MUTED, linestyle=(0, (4, 3)), label="in any order"
)
axis.set(
    xlabel="training images looked at",
    ylabel="wrong labels found",
    xlim=(0, 1),
    ylim=(0, 1.02),
)
axis.legend()
plt.show()
