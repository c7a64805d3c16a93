# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inside a memory budget
#
# The factors of a network weigh more than the network: a layer of $m \times n$ weights has
# $m^2 + n^2$ numbers of curvature. So they need a place, and a plan. Here a scanned, rematted
# transformer is trained with K-FAC while
#
# 1. at most a stated number of bytes of factors is on the device at any time,
# 2. averages live on the host and are decomposed there, while training goes on,
# 3. everything is computed: no layer is left out for its size.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the same bits whatever the machine

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxkfac as jk


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        d = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(d)(nn.gelu(nn.Dense(2 * d)(nn.LayerNorm()(x)))), None


class Transformer(nn.Module):
    layers: int = 6
    width: int = 32

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(16, self.width)(ids)
        stack = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = stack()(x, None)
        return nn.Dense(16)(nn.LayerNorm()(x))


# %% [markdown]
# The task: say the token that came two places before. The first two places have no answer, so the
# mask leaves their loss terms out.

# %%
ids = jax.random.randint(jax.random.key(0), (16, 24), 0, 16)
targets = jnp.roll(ids, 2, axis=1)
mask = jnp.broadcast_to(jnp.arange(24) >= 2, ids.shape)
batch = (ids, targets, mask)

model = Transformer()
params = model.init(jax.random.key(1), ids)
objective = jk.Objective(model.apply, jk.Categorical())
stats = jk.value_grad_and_factors(objective, fisher="mc")

key = jax.random.key(2)
like = stats.factor_shapes(params, batch, key)
size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
print(f"parameters {size(params) / 2**20:.2f} MiB, factors {size(like) / 2**20:.2f} MiB")

# %% [markdown]
# ## A budget of bytes
#
# With `max_factor_bytes`, collection runs several backward passes. Each taps some of the layers,
# and in the scan a window of its iterations. The scan is never split, because slices of its
# operands would be copies of parameters; a buffer for the window is in its carry, and the
# window's start is an argument, so that one compiled program serves every window.

# %%
budget = 250_000
within = jk.value_grad_and_factors(objective, fisher="mc", max_factor_bytes=budget)
plan = within.plan(params, batch, key)
print(plan)

# %% [markdown]
# What the compiler says of it: temporaries and outputs of each distinct program, against those of
# the gradient alone.

# %%
alone = jax.jit(jax.value_and_grad(objective)).lower(params, batch).compile().memory_analysis()
seen = set()
for number, (one, lowered) in enumerate(within.lower(params, batch, key)):
    program = (number == 0, tuple(one.parts.items()))
    if program in seen:  # a further window of a program that was shown
        continue
    seen.add(program)
    memory = lowered.compile().memory_analysis()
    gradient = alone.output_size_in_bytes if number == 0 else 0
    extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - alone.temp_size_in_bytes
    print(f"pass {number}: {extra - gradient:+,} bytes against the gradient, {budget:,} allowed")
    assert extra - gradient <= budget

# %% [markdown]
# And the result is that of one pass:

# %%
whole = jax.jit(stats)(params, batch, key)
parts = within(params, batch, key)
worst = jax.tree.map(
    lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(a).max()),
    whole.factors,
    parts.factors,
)
print(f"largest relative difference {max(jax.tree.leaves(worst)):.1e}")
assert max(jax.tree.leaves(worst)) < 1e-5

# %% [markdown]
# ## Training, with curvature on the host
#
# `sink=` sends each pass's factors straight into a `HostCurvature`. Every four steps it takes a
# snapshot of its running averages and decomposes them in the background; two steps later the bases
# are handed over, exactly then, whatever the timing.

# %%
tx = optax.chain(jk.scale_by_bases(damping=1e-3), optax.clip_by_global_norm(1.0), optax.sgd(0.3))
state, losses = tx.init(params), []
trained = params
with jk.HostCurvature(decay=0.8, refresh_every=4, lag=2) as service:
    stats_into = jk.value_grad_and_factors(
        objective, fisher="mc", max_factor_bytes=budget, sink=(service, 0)
    )
    for step, key in enumerate(jax.random.split(jax.random.key(3), 24)):
        loss, grads, _ = stats_into(trained, batch, key, step=step)
        updates, state = tx.update(grads, state, trained, bases=service.bases(step))
        trained = optax.apply_updates(trained, updates)
        losses.append(float(loss))
print("loss", [round(x, 3) for x in losses[::4]], "->", round(losses[-1], 3))
assert losses[-1] < 0.7 * losses[0]

# %% [markdown]
# ## Plan before you run
#
# `jk.plan_memory` needs shapes alone: no weights, no device. It says what each row of memory takes
# as things stand, what each option would change, and the smallest set of options that fits.

# %%
shapes = jax.eval_shape(lambda: params)
plan = jk.plan_memory(
    objective,
    shapes,
    batch,
    optimizer=optax.adam(1e-3),
    device_bytes=3e6,
    options=("accumulation", "host", "bf16", "budget"),
)
print(plan)

# %% [markdown]
# ## The documented case: a 7B decoder
#
# The report that this library comes from counts 30 GB of factors on a GPU, 5 GB of a graph that
# was retained, 15 GB of float32 copies made before factors were moved, and an allocation of 43 GB
# that failed in a decomposition. What of it can be true follows from shapes (three matrices are
# 43 GB for 59,861 rows; the largest factor here has 11,008). For the layers of a Llama-7B:

# %%
width, hidden, blocks = 4096, 11008, 32
square = lambda n: 4 * n * n  # bytes of one float32 matrix
inputs = 3 * square(width) + square(hidden)  # q, k and v share one; o; gate and up share one; down
outputs = 5 * square(width) + 2 * square(hidden)  # q, k, v, o, down; gate and up
gib = 2**30
print(f"factors: {blocks * (inputs + outputs) / gib:.1f} GiB, in bfloat16 half of that")
print(f"one factor of the hidden side: {square(hidden) / gib:.2f} GiB")
print(f"its decomposition, matrix and scratch: {3 * square(hidden) / gib:.2f} GiB")

# %% [markdown]
# So the 30 GB are probably all factors in bfloat16, at once; every figure of that report and of
# four others is answered in `benchmarks/results/documents.md`. What is done about it here:
#
# - `max_factor_bytes=2e9`: at most two gigabytes of factors on the device, whatever the model;
# - `HostCurvature`: averages folded to half (symmetric matrices), on the host, or beyond a stated
#   number of bytes in memory-mapped files; one matrix at a time in work;
# - `jaxkfac plan --preset llama-7b --device-bytes 80e9 --batch 4 --tokens 2048` prints the whole
#   table for this model, and the smallest set of options that fits.
