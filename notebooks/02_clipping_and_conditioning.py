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
# # Clipping and conditioning
#
# **K-FAC divides by eigenvalues, and the smallest of them are zero. How hard should they be
# clipped before the division?**
#
# Clipping raises every eigenvalue of a factor to at least the largest one divided by
# `max_condition`. The network here has 1,210 parameters. Its Fisher matrix has 1.5 million
# entries: small enough to write down, so that everything can be checked against the matrix
# itself.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small decompositions on few cores

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac.data import load_digits

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

# %%
images, labels = load_digits("train", seed=0)
inputs = jnp.asarray(images[:500].reshape(-1, 64))
batch = (inputs, jnp.asarray(labels[:500]))
rngs = nnx.Rngs(0)
model = nnx.Sequential(
    nnx.Linear(64, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 10, rngs=rngs)
)
apply_fn, params = jk.from_nnx(model)
objective = jk.Objective(apply_fn, jk.Categorical())

adam = optax.adam(3e-3)


@jax.jit
def step(carry, _):
    params, state = carry
    loss, grads = jax.value_and_grad(objective)(params, batch)
    updates, state = adam.update(grads, state)
    return (optax.apply_updates(params, updates), state), loss


(params, _), losses = jax.lax.scan(step, (params, adam.init(params)), length=150)
loss, grads = jax.value_and_grad(objective)(params, batch)
print(f"loss {losses[0]:.3f} -> {loss:.3f}")

# %% [markdown]
# ## Which Fisher
#
# The gradients that make up a Fisher matrix can be taken at the given targets ("empirical"), at
# labels sampled from the model ("mc"), or in expectation over all labels ("exact"). Near a good
# fit the given targets are the likely ones, gradients at them are small, and the empirical Fisher
# shrinks while the true one does not. A sample is unbiased.

# %%
key = jax.random.key(1)
traces = {}
for fisher in ("empirical", "mc", "exact"):
    stats = jax.jit(jk.value_grad_and_factors(objective, fisher=fisher))
    factors = stats(params, batch, key).factors
    traces[fisher] = sum(
        float(jnp.trace(f.a) * jnp.trace(f.g)) for f in factors.values()
    )
    print(f"{fisher:10} trace {traces[fisher]:.2f}")
assert traces["empirical"] < 0.7 * traces["exact"]
assert abs(traces["mc"] / traces["exact"] - 1) < 0.1

# %% [markdown]
# ## Why clipping is needed at all
#
# Some pixels are zero in all of these images, so their rows and columns of $A$ are zero. Others
# are nearly so. The classes' probabilities add up to one, which costs the last layer's $G$ one
# direction. These are not faults of the numerics. The decomposition runs in float64, and what it
# finds is that there is no inverse.

# %%
bases = jk.eigendecompose(factors)
dead = int((inputs == 0).all(axis=0).sum())
print(f"{dead} of 64 pixels are never lit")
flat = np.asarray(bases["layers/0/kernel"].a_raw_values)
assert (flat < 1e-7 * flat.max()).sum() >= dead
bases

# %%
jk.plot.spectra(bases)
plt.show()

# %% [markdown]
# ## What K-FAC and EKFAC make of the matrix
#
# `jk.operators.fisher` multiplies with the exact Fisher matrix: one Jacobian-vector and one
# vector-Jacobian product. Here it can be written out. K-FAC replaces each layer's block by
# $A \otimes G$. EKFAC keeps the eigenvectors of that product and measures the eigenvalues, which
# makes it the nearest matrix with those eigenvectors.

# %%
fisher = jk.operators.fisher(objective, params, batch)
exact = jax.jit(lambda operator: operator.to_dense())(fisher)
corrected = jax.jit(jk.correct_eigenvalues(objective, bases, fisher="exact"))(
    params, batch
)
dense = {
    "K-FAC": jk.operators.kronecker(bases, params).to_dense(),
    "EKFAC": jk.operators.kronecker(corrected, params).to_dense(),
}
first = jnp.arange(len(exact)) < 64 * 16 + 16  # the first layer's parameters
# Both leave out what lies between layers.
blocks = jnp.where(first == first[:, None], exact, 0.0)
errors = {
    k: float(jnp.linalg.norm(blocks - m) / jnp.linalg.norm(blocks))
    for k, m in dense.items()
}
print(
    "relative error of the layers' blocks:", {k: round(x, 3) for k, x in errors.items()}
)
assert errors["EKFAC"] <= errors["K-FAC"] < 0.5
np.testing.assert_allclose(jnp.trace(dense["EKFAC"]), jnp.trace(exact), rtol=1e-4)

# %% [markdown]
# ## What clipping does to the condition number
#
# `max_condition` bounds each factor. Eigenvalues of $A \otimes G$ are products, so a layer's
# block may have the square of it. Raw values are stored and clipping happens on read: one
# decomposition serves every bound.

# %%
bounds = 10.0 ** np.arange(0, 9)
clipped = [dataclasses.replace(bases, max_condition=float(bound)) for bound in bounds]


def condition(bases):
    """The largest of the layers' condition numbers."""
    layers = [bases[name] for name in bases]
    sides = [
        (b.a_values.max() / b.a_values.min(), b.g_values.max() / b.g_values.min())
        for b in layers
    ]
    return max(float(a) * float(g) for a, g in sides)


conditions = [condition(b) for b in clipped]
for bound, value in zip(bounds, conditions):
    assert value <= 1.001 * bound**2

# %% [markdown]
# ## What it does to the step
#
# The same gradient is preconditioned under each bound, with and without damping. The step's length
# is chosen by a search on the training loss, so that only its direction counts. We measure how far
# that loss falls, how far the loss on held-out images falls, and the norm of the step. Clipping at
# 1 makes all eigenvalues of a factor equal: that is the gradient, scaled by layer.

# %%
held_out, held_out_labels = load_digits("test", seed=0)
other = (jnp.asarray(held_out.reshape(-1, 64)), jnp.asarray(held_out_labels))
lengths = 2.0 ** jnp.arange(-14, 10, 0.5)
other_loss = objective(params, other)


@jax.jit
def search(direction):
    """The falls of both losses along a direction, and the norm of the step."""
    at = lambda t: jax.tree.map(lambda p, d: p - t * d, params, direction)
    found = jnp.nan_to_num(
        jax.lax.map(lambda t: objective(at(t), batch), lengths), nan=jnp.inf
    )
    t = lengths[found.argmin()]
    norm = t * optax.global_norm(direction)
    return loss - found.min(), other_loss - objective(at(t), other), norm


dampings = (0.0, 1e-2)
table = {}
for damping in dampings:
    steps = [search(jk.natural_gradient(grads, b, damping=damping)) for b in clipped]
    table[damping] = np.array(steps)
    for bound, (fall, other_fall, norm) in zip(bounds, table[damping]):
        print(f"damping {damping:4}, max_condition {bound:.0e}:", end=" ")
        print(f"loss -{fall:.3f}, held out -{other_fall:.3f}, norm {norm:.2f}")

(falls, other_falls, norms), (damped_falls, damped_other, _) = (
    x.T for x in table.values()
)
best = int(falls.argmax())
print(f"without damping the loss falls furthest at {bounds[best]:.0e}")
assert 0 < best < 4 and norms[-1] > 5 * norms.min(), (
    "flat directions make the step long"
)
assert other_falls[-1] < 0.6 * other_falls.max(), "for which held-out images pay"
assert damped_falls[-1] > falls.max() and damped_other[-1] > other_falls.max()
assert np.ptp(damped_falls[3:]) < 0.01, (
    "with damping the bound hardly matters from 1e3 on"
)

# %% [markdown]
# ## Clipping a preconditioner
#
# Conjugate gradients solve $(F + \delta)\,x = \nabla$ with exact products, as exactly as you
# like. The inverse of the Kronecker approximation can be their preconditioner. It is damped by
# the same $\delta$, which bounds its condition number as well.

# %%
damping = 1e-4
inverse = jk.operators.kronecker(corrected, damping=damping, power=-1.0)
plain = jk.operators.solve(fisher, grads, damping=damping, rtol=1e-3)
helped = jk.operators.solve(
    fisher, grads, damping=damping, rtol=1e-3, preconditioner=inverse
)
print(f"steps: {plain.num_steps} without, {helped.num_steps} with the preconditioner")
assert helped.converged and helped.num_steps < plain.num_steps

# %% [markdown]
# ## The answer
#
# Left: clipping bounds the condition number, by at most the square of `max_condition`. Middle:
# without damping the bound decides what a step is worth, and the best one is near 10. Beyond it
# the flat directions come in, about which the batch says little. They make the step long (right)
# and gain nothing; less is left of it on held-out images (dotted). With a damping of 1e-2 the
# best step is better than the best without, on both sets, and from 1e3 on the bound does not
# matter.
#
# So: damp, and leave `max_condition` large. Its default of 1e6 is there for the arithmetic, so
# that nothing is divided by zero; it is no substitute for damping.

# %%
fig, (left, middle, right) = plt.subplots(
    1, 3, figsize=(9.2, 3.1), layout="constrained"
)
left.loglog(bounds, conditions, "o-", ms=4, label="the worst layer")
left.loglog(bounds, bounds**2, color=jk.plot.MUTED, ls="--", label="max_condition²")
left.set(xlabel="max_condition", title="condition number of A ⊗ G")
left.legend()
for i, damping in enumerate(dampings):
    fall, other_fall, norm = table[damping].T
    color, label = jk.plot.COLORS[i], f"damping {damping:g}"
    middle.semilogx(bounds, fall, "o-", ms=4, color=color, label=label)
    middle.semilogx(bounds, other_fall, "o:", ms=3, color=color)
    right.loglog(bounds, norm, "o-", ms=4, color=color, label=label)
middle.plot([], [], "k:", label="held-out images")
middle.set(xlabel="max_condition", title="fall of the loss in one step, nats")
right.set(xlabel="max_condition", title="norm of that step")
middle.set_ylim(0, 1.5 * damped_falls.max())
middle.legend(loc="upper right")
right.legend()
plt.show()
