"""Train a small network on handwritten digits with K-FAC, with bases decomposed on the host.

Run: python examples/digits_mlp.py

The loop a training script would have: statistics every step, a running average, a new
eigendecomposition now and then outside the compiled step, and any optax optimizer behind
`jk.scale_by_bases`. `jk.kfac` does all of this inside one compiled step.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac.data import load_digits
from jaxkfac.models import MLP

EPOCHS, BATCH, REFRESH = 10, 128, 10

train, test = load_digits("train", seed=0), load_digits("test", seed=0)
apply_fn, params = jk.from_nnx(MLP((64, 128, 10), rngs=nnx.Rngs(0)))
collect = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()), fisher="mc")
stats = jax.jit(collect)
tx = optax.chain(
    jk.scale_by_bases(damping=1e-2),
    optax.clip_by_global_norm(3.0),
    optax.sgd(0.1, momentum=0.9),
)


@jax.jit
def apply_step(params, state, grads, bases):
    updates, state = tx.update(grads, state, params, bases=bases)
    return optax.apply_updates(params, updates), state


state, average, bases, step = tx.init(params), None, None, 0
images, labels = jnp.asarray(train.images).reshape(-1, 64), jnp.asarray(train.labels)
for epoch, key in enumerate(jax.random.split(jax.random.key(0), EPOCHS)):
    order = jax.random.permutation(key, len(labels))
    for start in range(0, len(labels) - BATCH + 1, BATCH):
        rows = order[start : start + BATCH]
        label_key = jax.random.fold_in(key, start)
        loss, grads, factors = stats(params, (images[rows], labels[rows]), label_key)
        average = factors if average is None else jk.update_average(average, factors, 0.95)
        if step % REFRESH == 0:
            bases = jk.eigendecompose(average, max_condition=1e6, placement="host")
        params, state = apply_step(params, state, grads, bases)
        step += 1
    hits = apply_fn(params, jnp.asarray(test.images).reshape(-1, 64)).argmax(-1) == test.labels
    print(f"epoch {epoch + 1:2d}  loss {float(loss):.4f}  test accuracy {float(hits.mean()):.4f}")
