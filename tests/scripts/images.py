"""Small images by a convolutional network of Flax NNX, with batch norm and dropout."""

import jax
from flax import nnx

import jaxkfac as jk
from tests.scripts._script import script, train

CLASSES = 5


class CNN(nnx.Module):
    """Takes a batch that is a dictionary, as a data loader yields it."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(8 * 16, 32, rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, batch):
        h = nnx.avg_pool(nnx.relu(self.norm(self.conv(batch["image"]))), (2, 2), (2, 2))
        h = nnx.relu(self.dropout(self.hidden(h.reshape(len(h), -1))))
        return self.out(h)


@script("images: NNX, batch norm, dropout, a dictionary")
def run(optimizer, seed):
    templates = jax.random.normal(jax.random.key(100 + seed), (CLASSES, 8, 8, 1))

    def batch_of(key):
        labels = jax.random.randint(key, (64,), 0, CLASSES)
        noise = 2 * jax.random.normal(key, (64, 8, 8, 1))
        return {"image": templates[labels] + noise}, labels

    apply_fn, params = jk.from_nnx(CNN(nnx.Rngs(seed)), mutable=nnx.BatchStat)
    opt = jk.Optimizer(jk.Objective(apply_fn, jk.Categorical()), optimizer)
    return train(opt, params, batch_of, seed)
