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
# # Decomposed on the host, beside the training
#
# **Can eigendecompositions run on the host while training goes on, and does the training wait for
# them?**
#
# A decomposition of an $n \times n$ factor takes about $9 n^3$ operations on a few cores, a step
# of training far less. If every step waited for fresh eigenbases, most of the time would be spent
# waiting. `HostCurvature` takes the factors in, averages them in host memory, decomposes a
# snapshot now and then in threads of its own, and hands the bases over some steps later.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the same bits whatever the machine

import threading
import time

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
batch = (jnp.asarray(images[:512].reshape(-1, 64)), jnp.asarray(labels[:512]))
rngs = nnx.Rngs(0)
model = nnx.Sequential(
    nnx.Linear(64, 384, rngs=rngs), nnx.gelu,
    nnx.Linear(384, 384, rngs=rngs), nnx.gelu,
    nnx.Linear(384, 10, rngs=rngs),
)  # fmt: skip
apply_fn, params = jk.from_nnx(model)
objective = jk.Objective(apply_fn, jk.Categorical())
collect = jk.value_grad_and_factors(objective, fisher="mc")
stats = jax.jit(collect)

like = collect.factor_shapes(params, batch, jax.random.key(0))
size = lambda tree: (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**20
)
print(f"parameters {size(params):.1f} MiB, factors {size(like):.1f} MiB")

# %% [markdown]
# ## The schedule is counted in steps
#
# A *refresh* takes a snapshot of the averages, every `refresh_every` steps. Its bases are in use
# from `lag` steps later on. Nothing in this depends on how fast anything ran: only the step of
# the hand-over waits, if they are not ready by then.

# %%
EVERY, LAG = 12, 8
tx = optax.chain(
    jk.scale_by_bases(damping=1e-2), optax.clip_by_global_norm(1.0), optax.sgd(0.1)
)


@jax.jit
def apply(grads, state, params, bases):
    updates, state = tx.update(grads, state, params, bases=bases)
    return optax.apply_updates(params, updates), state


def train(num_steps, *, pause=0.0, seen=lambda name, start, end: None):
    """Train; say when each step, and each wait for bases in it, began and ended."""
    trained, state, losses = params, tx.init(params), []
    with jk.HostCurvature(decay=0.9, refresh_every=EVERY, lag=LAG) as service:
        for step, key in enumerate(jax.random.split(jax.random.key(1), num_steps)):
            start = time.perf_counter()
            loss, grads, factors = stats(trained, batch, key)
            service.push(factors, step)
            before = time.perf_counter()
            bases = service.bases(step)
            after = time.perf_counter()
            trained, state = apply(grads, state, trained, bases)
            losses.append(float(loss))  # waits for the device
            seen("wait", before, after)
            seen("step", start, time.perf_counter())
            time.sleep(pause)
    return trained, losses


# %% [markdown]
# So two runs of different speed are the same to the last bit. The second one rests between steps:

# %%
fast, losses = train(30)
slow, _ = train(30, pause=0.02)
same = jax.tree.map(lambda a, b: bool((a == b).all()), fast, slow)
assert all(jax.tree.leaves(same)), "the result does not depend on timing"
print("loss at steps 0, 10, 20, 29:", [round(losses[i], 3) for i in (0, 10, 20, 29)])
assert losses[-1] < 0.5 * losses[0]

# %% [markdown]
# ## A recording
#
# Python can report every call of a function in threads that start later. The service's threads are
# among them, and `eigh_on_host` is what decomposes one matrix. That, with the times of the steps,
# is the timeline. No code of the library is changed for it. The programs were compiled by the runs
# above.

# %%
intervals, begun = {"step": [], "wait": [], "decompose": []}, {}


def watch(frame, event, argument):
    if frame.f_code.co_name != "eigh_on_host":
        return
    thread = threading.get_ident()
    if event == "call":
        begun[thread] = time.perf_counter()
    elif event == "return":
        intervals["decompose"].append((begun.pop(thread), time.perf_counter()))


threading.setprofile(watch)
try:
    train(47, seen=lambda name, *interval: intervals[name].append(interval))
finally:
    threading.setprofile(None)

steps, waits, work = (
    np.array(intervals[name]) for name in ("step", "wait", "decompose")
)
# Before the first refresh there are no bases: the first step waits for it, whatever the lag is.
later = work[work[:, 0] > steps[0, 1]]
print(f"{len(work)} matrices decomposed, {len(later)} of them while training went on")
matrices = len(like.a_sums) + len(like.g_sums)
assert len(work) == 4 * matrices and len(later) == 3 * matrices  # four refreshes

# %% [markdown]
# How much of the decomposition was hidden? That is the fraction of the decomposition time in which
# no step waited. And how much slower were the steps? On a CPU both share the cores, so a step
# beside a decomposition takes longer. On an accelerator the host's cores are free for it.

# %%
shared = lambda a, b: np.clip(
    np.minimum(a[1], b[:, 1]) - np.maximum(a[0], b[:, 0]), 0, None
).sum()
decomposing = (later[:, 1] - later[:, 0]).sum()
waited = sum(shared(one, later) for one in waits[1:])
beside = np.array([shared(one, later) > 0 for one in steps[1:]])
lengths = 1e3 * (steps[1:, 1] - steps[1:, 0] - (waits[1:, 1] - waits[1:, 0]))
hidden = 1 - waited / decomposing
print(
    f"decomposing {decomposing:.2f} s, of which a step waited {waited:.2f} s: "
    f"{hidden:.0%} hidden"
)
print(f"a step takes {np.median(lengths[~beside]):.0f} ms alone,", end=" ")
print(
    f"{np.median(lengths[beside]):.0f} ms beside a decomposition "
    "(medians, this machine)"
)
assert beside.any() and not beside.all()

# %% [markdown]
# ## Factors that the device has no room for
#
# With `max_factor_bytes=` collection runs several backward passes, each of which brings some of
# the layers, and `sink=` sends them into the service as they come. All is computed; no layer is
# left out for its size. It costs passes:

# %%
budget = "1.5MiB"
within = jk.value_grad_and_factors(objective, fisher="mc", max_factor_bytes=budget)
key = jax.random.key(2)
print(within.plan(params, batch, key))
whole, parts = stats(params, batch, key), within(params, batch, key)
worst = jax.tree.map(
    lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(a).max()),
    whole.factors,
    parts.factors,
)
assert max(jax.tree.leaves(worst)) < 1e-5, "the factors are those of one pass"

with jk.HostCurvature(decay=0.9, refresh_every=4, lag=2) as service:
    into = jk.value_grad_and_factors(
        objective, fisher="mc", max_factor_bytes=budget, sink=(service, 0)
    )
    loss, grads, _ = into(params, batch, key, step=0)
    assert service.bases(0).is_finite()

# %% [markdown]
# [Memory and planning](../docs/memory.md) has the rest: averages on disk, eigenvectors that stay
# on the host, and a plan that says beforehand which of these is needed.
#
# ## The answer
#
# Yes, and it hardly waits: after the first refresh, for which there is nothing to do but wait,
# steps go on while matrices are decomposed. Each bar of the first line is a step, each bar of the
# last line one matrix. Dashed lines are refreshes, full lines the steps that got their bases. A
# thin bar in the middle line is the hand-over itself. A wide one is a step that waited, because
# the bases were not ready after `lag` steps: the two cores of this recording had other work
# besides. A larger `lag` makes room for that, and the result is then that of the larger lag, on
# every machine.

# %%
zero = steps[0, 0]
fig, ax = plt.subplots(figsize=(9.2, 2.6), layout="constrained")
lanes = (
    ("steps", steps, 0),
    ("waiting for bases", waits, 3),
    ("decompositions", work, 1),
)
for row, (_, lane, color) in enumerate(lanes):
    spans = [(a - zero, b - a) for a, b in lane if b - a > 1e-3]
    ax.broken_barh(
        spans, (row - 0.35, 0.7), color=jk.plot.COLORS[color], ec="white", lw=0.4
    )
for step in range(0, len(steps), EVERY):
    ax.axvline(steps[step, 1] - zero, color=jk.plot.MUTED, ls="--", lw=0.8)
    if 0 < step < len(steps) - LAG:
        ax.axvline(steps[step + LAG, 0] - zero, color=jk.plot.INK, lw=0.8)
ax.set_yticks(range(3), [label for label, _, _ in lanes])
ax.set(
    ylim=(2.6, -0.6),
    xlabel="seconds",
    title=f"after the first refresh {hidden:.0%} are hidden",
)
ax.grid(False)
plt.show()
