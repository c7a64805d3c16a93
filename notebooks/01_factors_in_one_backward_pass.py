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
# # Factors in one backward pass
#
# **Can the backward pass of a compiled program bring the curvature of every layer along with the
# gradient, and what does that cost?**
#
# K-FAC approximates the Fisher matrix of a dense layer $y = W^\top a$ by a Kronecker product
# $A \otimes G$ of two small matrices: the second moment of the layer's inputs $a$, and of the
# gradients $g$ with respect to its outputs. Both exist during a backward pass. But a compiled,
# scanned, rematerialised JAX program has no hooks to read them with.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small decompositions on few cores

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac.data import load_digits
from jaxkfac.models import VisionTransformer, VisionTransformerConfig

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

# %% [markdown]
# ## What a tap is
#
# Give the layer an extra input, its *slot*, that the forward pass ignores. The chain rule has
# nothing to say about the cotangent of an ignored input: it is zero, or, if we write the rule
# ourselves, *anything we like*. We like the two second moments.


# %%
@jax.custom_vjp
def tapped_product(a, w, slot):
    return a @ w


def forward(a, w, slot):
    return a @ w, (a, w)  # the slot is no residual


def backward(saved, g):
    a, w = saved
    return g @ w.T, a.T @ g, {"a": a.T @ a, "g": g.T @ g}


tapped_product.defvjp(forward, backward)

# %% [markdown]
# The first two cotangents are those of the product, so the gradient is untouched. The third is a
# statistic that leaves the backward pass as "the gradient with respect to the slot". One call of
# `jax.grad` brings both:

# %%
a = jax.random.normal(jax.random.key(0), (128, 3))
w = jax.random.normal(jax.random.key(1), (3, 2))
slot = {"a": jnp.zeros((3, 3)), "g": jnp.zeros((2, 2))}


def loss(w, slot):
    return 0.5 * jnp.sum(jnp.tanh(tapped_product(a, w, slot)) ** 2)


gradient, factors = jax.grad(loss, argnums=(0, 1))(w, slot)
assert np.allclose(
    gradient, jax.grad(lambda w: 0.5 * jnp.sum(jnp.tanh(a @ w) ** 2))(w), atol=1e-5
)
assert np.allclose(factors["a"], a.T @ a, atol=1e-4)

# %% [markdown]
# Cotangents already do the bookkeeping that hooks have to invent: they *add up* where one slot is
# read several times (tied weights), they *stack* where the slot is scanned, they are *summed over
# devices* where the slot is replicated, and rematerialisation recomputes `a` for them as it does
# for the gradient.
#
# ## On a real model
#
# The library finds the products by itself. It traces the function, follows every parameter to
# where it meets data, and re-emits the program with taps in those places, through `jit`,
# `checkpoint` and `scan`. Here is a vision transformer whose blocks are scanned and rematted, on
# handwritten digits.

# %%
images, labels = load_digits("train", seed=0)
images, labels = jnp.asarray(images[:256]), jnp.asarray(labels[:256])
apply_fn, params = jk.from_nnx(
    VisionTransformer(VisionTransformerConfig(), rngs=nnx.Rngs(0))
)
jk.find_layers(apply_fn, params, images)

# %% [markdown]
# Query, key and value read the same variable: they share one input factor, which is computed,
# stored and decomposed once. The biases are joined to their products: a column of ones is
# appended to the inputs.

# %%
objective = jk.Objective(apply_fn, jk.Categorical())
collect = jk.value_grad_and_factors(objective, fisher="mc")
stats = jax.jit(collect)
value, grads, factors = stats(params, (images, labels), jax.random.key(0))

plain = jax.jit(jax.value_and_grad(objective))
plain_value, plain_grads = plain(params, (images, labels))
difference = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), grads, plain_grads)
print("largest difference to jax.grad:", max(jax.tree.leaves(difference)))

assert max(jax.tree.leaves(difference)) < 1e-6

# %% [markdown]
# ## Are they the right matrices?
#
# $A = \frac{1}{NS} \sum a a^\top$ over examples and positions. For one layer the inputs are
# easily had: the first one sees the image's patches. A column of ones stands for the bias.

# %%
rows = [
    image.reshape(4, 2, 4, 2).transpose(0, 2, 1, 3).reshape(16, 4) for image in images
]
rows = np.concatenate([np.concatenate(rows), np.ones((16 * len(images), 1))], axis=1)
np.testing.assert_allclose(
    factors["patch/kernel"].a, rows.T @ rows / len(rows), atol=1e-5
)

# %% [markdown]
# $G = \frac{1}{NR} \sum g g^\top$ is over examples and loss terms. Here the labels were drawn
# from the model (`fisher="mc"`), so that the mean of $A \otimes G$ is an approximation of the
# Fisher matrix rather than of the "empirical" one; notebook
# [02](02_clipping_and_conditioning.ipynb) compares them.
#
# ## Using them
#
# `jk.eigendecompose` and `jk.natural_gradient` make $(A \otimes G + \delta)^{-1} \nabla$ of them.
# `jk.kfac` does averages, refreshes and preconditioning inside one compiled step, here with a
# learning rate; `jk.kfac(like=like)` needs none ([loops](../docs/loops.md)). It samples the labels,
# as K-FAC's theory asks. Given labels are cheaper, because they need only one backward pass.

# %%
bases = jk.eigendecompose(factors, max_condition=1e6)
step = jk.natural_gradient(grads, bases, damping=1e-3)
slope = sum(jax.tree.leaves(jax.tree.map(lambda g, p: jnp.vdot(g, p), grads, step)))
assert slope > 0, "the natural gradient is a direction of descent"

batch = (images, labels)
like = collect.factor_shapes(params, batch)
tx = jk.kfac(3e-3, like=like, damping=1e-2, damping_mode="pi", norm_constraint=1e-3)
state, trained = tx.init(params), params


@jax.jit
def train_step(params, state, key):
    value, grads, factors = stats(params, batch, key)
    updates, state = tx.update(grads, state, params, factors=factors, value=value)
    return jax.tree.map(jnp.add, params, updates), state, value


losses = []
for key in jax.random.split(jax.random.key(1), 30):
    trained, state, value = train_step(trained, state, key)
    losses.append(float(value))
jk.check_state(state)
print("loss at steps 0, 10, 20, 29:", [round(losses[i], 3) for i in (0, 10, 20, 29)])
assert losses[-1] < 0.5 * losses[0]

# %% [markdown]
# ## What it costs
#
# The floor is arithmetic: for a layer with `n` rows and `d` features on both sides a gradient is $6
# n d^2$ operations, and the two second moments are $2 n d^2$ each, or half of that where only a
# triangle is computed. No activation lives longer than the gradient needs it. Time is measured in
# pairs, one call of each in turn, so that other work of the machine slows both.


# %%
def seconds(fn, *args):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


with_factors = jax.jit(jk.value_grad_and_factors(objective))
for fn in (plain, with_factors):
    seconds(fn, params, batch)  # compile
pairs = [
    (seconds(plain, params, batch), seconds(with_factors, params, batch))
    for _ in range(15)
]
ratios = sorted(after / before for before, after in pairs)
ratio = ratios[len(ratios) // 2]
print(
    f"time of (gradient + all factors) / gradient: {ratio:.2f}, "
    "on this machine, this model"
)
print(f"half of the pairs between {ratios[3]:.2f} and {ratios[11]:.2f}")

compiled = [
    fn.lower(params, batch).compile().memory_analysis() for fn in (plain, with_factors)
]
temporaries = [c.temp_size_in_bytes / 2**20 for c in compiled]
size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(factors)) / 2**20
print(
    f"temporaries: {temporaries[0]:.1f} MiB without, "
    f"{temporaries[1]:.1f} MiB with factors"
)
print(f"the factors themselves: {size:.1f} MiB")
assert temporaries[1] < 1.2 * temporaries[0]

# %% [markdown]
# `python -m benchmarks.factors` measures the same on larger models, and
# [the page of numbers](../docs/numbers.md) has its record.
#
# ## The answer
#
# Yes. The left panels show the two factors of one kernel of the first block, from the same compiled
# call as the gradient; white is zero, and the last row and column of $A$ belong to the bias. The
# right panel compares the time of that call with the time of the gradient alone.

# %%
name, block = "blocks/up/kernel", 0
one = factors[name]
fig, axes = plt.subplots(1, 3, figsize=(9.2, 3), layout="constrained")
for ax, matrix, title in ((axes[0], one.a[block], "A"), (axes[1], one.g[block], "G")):
    limit = np.quantile(np.abs(matrix), 0.99)
    ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.set(
        title=f"{title} of {name}: {len(matrix)} × {len(matrix)}", xticks=[], yticks=[]
    )
    ax.grid(False)

heights = np.array([[1.0, ratio], [1.0, temporaries[1] / temporaries[0]]])
for i, label in enumerate(("gradient", "gradient and all factors")):
    bars = axes[2].bar(
        np.arange(2) + 0.4 * i - 0.2, heights[:, i], width=0.36, label=label
    )
    axes[2].bar_label(bars, fmt="%.2f", fontsize=8)
axes[2].set_xticks(range(2), ["time", "temporary memory"])
axes[2].set(ylim=(0, 1.45 * heights.max()), title="relative to the gradient alone")
axes[2].grid(False, axis="x")
axes[2].legend(loc="upper left")
plt.show()
