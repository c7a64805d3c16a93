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
# # Accumulation equal to the large batch
#
# **A batch does not fit, so it is cut into micro-batches. Is the resulting step the one that the
# whole batch would give?**
#
# For plain gradient descent on micro-batches of one size the answer is easy: the mean of the
# means is the mean. With masks the micro-batches have different numbers of loss terms. With K-FAC
# there are second moments to add up as well. And the optimizer must run once for the group, since
# it is not linear.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

# %% [markdown]
# The task: say the token that came two places before, from the last three. Texts are padded to
# one length. Half of them are short, and the mask leaves out what lies beyond their ends. They
# are sorted by length, as data often is, so micro-batches differ much.

# %%
N, S, TOKENS = 32, 32, 16
ids = jax.random.randint(jax.random.key(0), (N, S), 0, TOKENS)
before = [jax.nn.one_hot(jnp.roll(ids, k, axis=1), TOKENS) for k in range(3)]
inputs = jnp.concatenate(before, axis=-1)  # (N, S, 48)
lengths = jnp.concatenate(
    [jnp.full(N // 2, S), jnp.linspace(4, S // 2, N // 2).astype(int)]
)
mask = (jnp.arange(S) >= 2) & (jnp.arange(S) < lengths[:, None])
batch = (inputs, jnp.roll(ids, 2, axis=1), mask)

rngs = nnx.Rngs(0)
model = nnx.Sequential(
    nnx.Linear(48, 128, rngs=rngs), nnx.gelu,
    nnx.Linear(128, 128, rngs=rngs), nnx.gelu,
    nnx.Linear(128, TOKENS, rngs=rngs),
)  # fmt: skip
apply_fn, params = jk.from_nnx(model)
objective = jk.Objective(apply_fn, jk.Categorical())
collect = jk.value_grad_and_factors(objective)


def parts(k):
    """The batch as ``k`` micro-batches."""
    return jax.tree.map(lambda x: x.reshape(k, N // k, *x.shape[1:]), batch)


def cut(tree):
    """The micro-batches one by one."""
    return [
        jax.tree.unflatten(jax.tree.structure(tree), x)
        for x in zip(*jax.tree.leaves(tree))
    ]


print("loss terms of 4 micro-batches:", parts(4)[2].sum((1, 2)))

# %% [markdown]
# ## Adding up
#
# With $R_i$ the loss terms of micro-batch $i$, the gradient of the whole batch is
# $\sum R_i \nabla_i / \sum R_i$. Factors are kept as sums and counts for this reason: they add up
# with `+`. The mean of means is something else:

# %%
K = 4
stats = jax.jit(collect)
_, grads, factors = stats(params, batch)
micro = [stats(params, one) for one in cut(parts(K))]

flat = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]
off = lambda a, b: float(jnp.linalg.norm(flat(a) - flat(b)) / jnp.linalg.norm(flat(b)))
means = lambda factors: [(f.a, f.g) for f in factors.values()]

pooled = micro[0].factors
for one in micro[1:]:
    pooled = pooled + one.factors
weights = jnp.array([one.factors.terms for one in micro])
weights = weights / weights.sum()
weighed = jax.tree.map(
    lambda *g: sum(w * x for w, x in zip(weights, g)), *[m.grads for m in micro]
)
unweighed = jax.tree.map(lambda *g: sum(g) / K, *[m.grads for m in micro])
print(f"factors by +:               {off(means(pooled), means(factors)):.1e} off")
print(f"gradients by loss terms:    {off(weighed, grads):.1e} off")
print(f"gradients, mean of means:   {off(unweighed, grads):.1e} off")
print(
    "factors of the last one:    "
    f"{off(means(micro[-1].factors), means(factors)):.1e} off"
)
assert off(means(pooled), means(factors)) < 1e-5 and off(weighed, grads) < 1e-5
assert off(unweighed, grads) > 1e-2

# %% [markdown]
# ## In a training
#
# `jk.multi_steps` keeps these sums and runs K-FAC on the last micro-batch of a group only.
# `optax.MultiSteps` around the same K-FAC does not fail, and nothing inside could notice: it
# takes the mean of means, and hands on the last micro-batch's factors alone. Three trainings, one
# update for each whole batch. The factors are those of the given labels, which are the same in
# every cut of the batch; a training of your own samples them (`fisher="mc"`), which is what
# K-FAC's theory asks for.

# %%
UPDATES = 12
like = collect.factor_shapes(params, batch)
kfac = jk.kfac(2e-2, like=like, damping=1e-2, damping_mode="pi", norm_constraint=3e-3)


def train(tx, k):
    """Parameters and losses after each update of the batch in ``k`` micro-batches."""
    state = tx.init(params)

    def one_micro(carry, batch):
        params, state = carry
        _, grads, factors = collect(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    def one_update(carry, _):
        carry, _ = jax.lax.scan(one_micro, carry, parts(k))
        return carry, (flat(carry[0]), objective(carry[0], batch))

    run = jax.jit(lambda carry: jax.lax.scan(one_update, carry, length=UPDATES))
    (_, state), found = run((params, state))
    jk.check_state(state)
    return found


whole, losses = train(kfac, 1)
ours, our_losses = train(jk.multi_steps(kfac, every_k_schedule=K), K)
naive, naive_losses = train(optax.MultiSteps(kfac, every_k_schedule=K), K)
distance = lambda run: (
    np.linalg.norm(run - whole, axis=1) / np.linalg.norm(whole - flat(params), axis=1)
)
print(f"loss {objective(params, batch):.3f} -> {losses[-1]:.4f}", end=" ")
print(f"(multi_steps {our_losses[-1]:.4f}, optax.MultiSteps {naive_losses[-1]:.4f})")
print(
    f"parameters off after {UPDATES} updates, relative to the way that they have come:"
)
print(
    f"multi_steps {distance(ours)[-1]:.1e}, optax.MultiSteps {distance(naive)[-1]:.1e}"
)
assert losses[-1] < 0.1 * objective(params, batch)
assert distance(ours).max() < 1e-4 < 1e-2 < distance(naive).min()

# %% [markdown]
# ## What it saves
#
# Activations become smaller with the micro-batch. The sums are one more copy of gradients and
# factors. The compiler counts both, for one pass and one update:

# %%
counts = (1, 2, 4, 8, 16)
saved = []
size = lambda tree: (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**20
)
for k in counts:
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts(k))
    memory = stats.lower(params, one).compile().memory_analysis()
    tx = kfac if k == 1 else jk.multi_steps(kfac, every_k_schedule=k)
    extra = size(jax.eval_shape(tx.init, params)) - size(
        jax.eval_shape(kfac.init, params)
    )
    saved.append((memory.temp_size_in_bytes / 2**20, extra))
    print(
        f"{k:2} micro-batches: temporaries {saved[-1][0]:.2f} MiB, sums {extra:.2f} MiB"
    )
temporaries, sums = np.array(saved).T
assert (np.diff(temporaries) < 0).all() and np.ptp(sums[1:]) < 1e-3

# %% [markdown]
# Cutting a batch of this size into micro-batches saves memory. Accumulating more batches of the
# same size saves none, and the sums take more. `jk.plan_memory` says the same before anything runs,
# from shapes alone:

# %%
jk.plan_memory(
    objective,
    jax.eval_shape(lambda: params),
    batch,
    optimizer=optax.adam(1e-3),
    device_bytes="3MB",
    options=("accumulation",),
)

# %% [markdown]
# ## The answer
#
# With sums and counts the step is the same, to rounding: on the left, `jk.multi_steps` ends within
# a millionth of the whole batch's path. The mean of means ends a quarter off. It trains here too,
# but nothing warns that the training is a different one. On the right is the use of accumulation:
# temporaries shrink with the micro-batch, and the price does not depend on the number of
# micro-batches.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.2), layout="constrained")
updates = np.arange(1, UPDATES + 1)
left.semilogy(
    updates,
    distance(naive),
    "o-",
    ms=3,
    color=jk.plot.COLORS[1],
    label="optax.MultiSteps",
)
left.semilogy(
    updates, distance(ours), "o-", ms=3, color=jk.plot.COLORS[0], label="jk.multi_steps"
)
left.set(
    xlabel="update", title="distance of the parameters from the whole batch's, relative"
)
left.set(ylim=(1e-9, 10))
left.legend(loc="center right")
right.bar(range(len(counts)), temporaries, label="temporaries of a pass")
right.bar(range(len(counts)), sums, bottom=temporaries, label="sums")
right.set_xticks(range(len(counts)), counts)
right.set(xlabel="micro-batches", ylabel="MiB", title="memory")
right.grid(False, axis="x")
right.legend()
plt.show()
