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
# # The documents, measured
#
# **Five reports of models that ran out of memory propose remedies. Which of them save bytes?**
#
# Each report says what went wrong, what was changed, and how much it saved. All claims are
# judged in [the documents](../docs/documents.md), most of them in PyTorch and in JAX. This notebook
# measures eight in JAX, as it runs: no clock, no GPU. Bytes are those that the compiler plans for a
# program, or those of the arrays that are alive.

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small decompositions on few cores

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkfac as jk

# %config InlineBackend.figure_formats = ["svg"]
plt.rcParams.update(jk.plot.FIGURE_STYLE)

MIB = 2**20
measured = {}  # {what: (MiB before, MiB after)}


def note(what, before, after):
    measured[what] = before, after
    print(f"{what}: {before:.2f} -> {after:.2f} MiB")


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / MIB


def planned(function, *arguments, **options):
    """Temporaries and outputs of a program, without those that reuse an argument."""
    memory = jax.jit(function, **options).lower(*arguments).compile().memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (memory.temp_size_in_bytes + made) / MIB


def alive(work):
    """Bytes of new arrays on the device while the result is held."""
    before = {x.unsafe_buffer_pointer() for x in jax.live_arrays()}
    out = work()
    new = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}
    del out
    return sum(size for place, size in new.items() if place not in before) / MIB


# %% [markdown]
# ## A small network
#
# Six dense layers of width 128 with tanh between them, and 1024 rows: small enough to compile in a
# second, large enough that activations weigh more than parameters.

# %%
WIDTH, DEPTH, ROWS = 128, 6, 1024


def forward(params, x, shifts=None):
    inputs = []
    for i, layer in enumerate(params):
        inputs.append(x)
        x = x @ layer["w"] + layer["b"]
        x = x if shifts is None else x + shifts[i]
        x = x if i == DEPTH - 1 else jnp.tanh(x)
    return x if shifts is None else (x, inputs)


def data(rows):
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (rows, WIDTH)), jax.random.randint(
        keys[1], (rows,), 0, WIDTH
    )


keys = jax.random.split(jax.random.key(0), DEPTH)
kernels = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
params = [{"w": kernel, "b": jnp.zeros(WIDTH)} for kernel in kernels]
batch = data(ROWS)
objective = jk.Objective(forward, jk.Categorical())
stats = jk.value_grad_and_factors(objective)

# %% [markdown]
# ## The graph that was retained
#
# "Hooks keep every layer's input and output gradient, and the factors are formed when the pass has
# ended." In JAX that is a program which returns them all. The taps of this library form the factors
# inside the backward pass, where the two meet anyway. (With GELU in place of tanh the compiler
# keeps the input of each as well, and the two programs take the same: see the record.)


# %%
def everything(params, shifts, batch):
    def loss(params, shifts):
        logits, inputs = forward(params, batch[0], shifts)
        return objective.loss(logits, batch[1], None)[0], inputs

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, shifts)


shifts = [jnp.zeros((ROWS, WIDTH)) for _ in params]
like = stats.factor_shapes(params, batch)
kept = planned(everything, params, shifts, batch) + bytes_of(like)
note(
    "factors formed in the backward pass, not after it",
    kept,
    planned(stats, params, batch),
)

# %% [markdown]
# ## Factors on the device
#
# "Factors pile up on the device; moved as soon as they are formed, none does." A budget of one
# layer's factors runs several passes, and sends what each has formed to the host.

# %%
one_layer = 3 * 4 * (WIDTH + 1) ** 2  # A, what it is made of, and G
within = jk.value_grad_and_factors(objective, max_factor_bytes=one_layer)
passes = [
    lowered.compile().memory_analysis() for _, lowered in within.lower(params, batch)
]
most = max(memory.output_size_in_bytes for memory in passes[1:]) / MIB
note("factors moved as soon as they are formed", bytes_of(like), most)

# %% [markdown]
# ## The order of converting and moving
#
# "A bfloat16 factor is converted to float32 before it is sent to the host." The order of the two
# decides where the float32 copy lies.

# %%
factor = jnp.ones((1024, 1024), jnp.bfloat16)
held = []


def convert_then_move():
    held.append(factor.astype(jnp.float32))
    return np.asarray(held[-1])


before = alive(convert_then_move)
held.clear()
after = alive(lambda: np.asarray(factor).astype(np.float32))
note("factors moved first, then converted", before, after)

# %% [markdown]
# ## The decomposition
#
# "A decomposition of 10,000 rows needs 40 GB of scratch, so it has to run on the host." What a
# program for it plans, eigenvectors included, grows with the square of the rows:

# %%
matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
scratch = planned(jnp.linalg.eigh, matrix) * (10_000 / 1024) ** 2 * MIB / 1e9
print(f"10,000 rows: {scratch:.1f} GB beside the matrix, where the document says 40")
assert scratch < 4

# %% [markdown]
# ## Padding and recomputation
#
# "Padding to the longest of a batch instead of a fixed length saves 2 to 3 of 8 GB, recomputation
# about half." Here are six blocks of attention and two dense layers, and eight rows of 20 to 160
# tokens, of at most 256. The bytes are those of one gradient.


# %%
def block(x, w):
    weights = jax.nn.softmax((x @ w["q"]) @ (x @ w["k"]).mT / 8)
    x = x + weights @ (x @ w["v"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def gradient_bytes(tokens, body):
    shape = lambda *sizes: jax.ShapeDtypeStruct((6, *sizes), jnp.float32)
    weights = {name: shape(64, 64) for name in ("q", "k", "v")}
    weights |= {"up": shape(64, 256), "down": shape(256, 64)}
    x = jax.ShapeDtypeStruct((8, tokens, 64), jnp.float32)
    loss = lambda weights, x: jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)
    return planned(jax.grad(loss), weights, x)


lengths = np.random.default_rng(0).integers(20, 160, size=8)
fixed = gradient_bytes(256, block)
note(
    "padded to the longest of the batch",
    fixed,
    gradient_bytes(int(lengths.max()), block),
)
note("activations recomputed", fixed, gradient_bytes(256, jax.checkpoint(block)))

# %% [markdown]
# ## Copies that never were
#
# "Converting a bfloat16 model to bfloat16 again, and moving it to where it is, makes two copies."
# It makes none. The check that the document proposes is right, and saves nothing.

# %%
small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
again = alive(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), small))
checked = alive(lambda: jk.cast_once(small, jnp.bfloat16))
note("a cast that looks first", again, checked)

# %% [markdown]
# ## Accumulation
#
# "With 4 steps of accumulation memory falls by 75 %." The loop of the document keeps its batch as
# it is and divides the loss: the optimizer steps more rarely, and nothing becomes smaller. What
# does help is to cut the batch that one had: no claim of the document, but a lesson of ours.


# %%
def training_bytes(rows, every):
    tx = optax.adam(1e-3) if every == 1 else jk.multi_steps(optax.adam(1e-3), every)
    terms = {} if every == 1 else {"terms": rows}

    def step(params, state, batch):
        grads = jax.grad(objective)(params, batch)
        updates, state = tx.update(grads, state, params, **terms)
        return optax.apply_updates(params, updates), state

    arguments = params, tx.init(params), data(rows)
    return planned(step, *arguments, donate_argnums=(0, 1)) + bytes_of(arguments)


note("4 batches accumulated", training_bytes(ROWS, 1), training_bytes(ROWS, 4))
note("one batch cut in 16", training_bytes(16 * ROWS, 1), training_bytes(ROWS, 16))

# %% [markdown]
# ## The answer
#
# What each remedy leaves of the bytes that it is about. Forming factors early, sending them off,
# converting them on the host, padding less and recomputing save memory. A cast that looks first and
# accumulation over whole batches save none; the latter even holds one more copy of the gradient.

# %%
left = {
    what: after / before if before else 1.0
    for what, (before, after) in measured.items()
}
nothing = {"a cast that looks first", "4 batches accumulated"}
for what, share in left.items():
    assert (share >= 0.99) if what in nothing else (share < 0.8), (what, share)

fig, axis = plt.subplots(figsize=(8.0, 3.4), layout="constrained")
places = np.arange(len(left))
colors = [
    jk.plot.SIDES["G"] if what in nothing else jk.plot.SIDES["A"] for what in left
]
axis.barh(places, np.ones(len(left)), color=jk.plot.RULE, height=0.7)
axis.barh(places, list(left.values()), color=colors, height=0.45)
for place, (before, after) in zip(places, measured.values()):
    axis.text(1.17, place, f"{before:.2f} → {after:.2f} MiB", va="center", fontsize=8)
axis.set_yticks(places, list(left))
axis.set(xlim=(0, 1.5), ylim=(len(left) - 0.4, -0.6), xlabel="left of the bytes before")
axis.set_xticks([0, 0.5, 1.0], ["0", "half", "all"])
axis.grid(visible=False, axis="y")
plt.show()
