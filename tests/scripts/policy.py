"""Proximal policy optimization: rollouts, epochs and minibatches in nested scans."""

import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script

ENVS, TIME, ROUNDS, EPOCHS, PARTS = 16, 32, 20, 2, 4


def networks(params, x):
    h = jnp.tanh(x @ params["trunk"] + params["bias"])
    return h @ params["policy"], (h @ params["value"])[..., 0]


def loss_fn(params, batch):
    x, action, before, advantage, gain = batch
    logits, value = networks(params, x)
    logits = jk.mark_outputs(logits, jk.Categorical())
    value = jk.mark_outputs(value, jk.Gaussian(), weight=0.5)
    log_p = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_p, action[:, None], 1)[:, 0] - before)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    surrogate = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(jnp.exp(log_p) * log_p).sum(1).mean()
    return surrogate + 0.25 * ((value - gain) ** 2).mean() - 0.01 * entropy


def move(x, action):
    """A point that is pushed left or right; the reward is to stay near the middle."""
    speed = x[:, 1] + 0.1 * (2.0 * action - 1)
    place = x[:, 0] + 0.2 * speed
    return jnp.stack([place, speed], 1), jnp.exp(-(place**2))


def rollout(params, key):
    def act(x, key):
        logits, value = networks(params, x)
        action = jax.random.categorical(key, logits)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        after, reward = move(x, action)
        return after, (x, action, log_p, value, reward)

    first, key = jax.random.normal(key, (ENVS, 2)), jax.random.fold_in(key, 1)
    _, (x, action, log_p, value, reward) = jax.lax.scan(act, first, jax.random.split(key, TIME))
    back = lambda gain, reward: (reward + 0.9 * gain,) * 2
    _, gain = jax.lax.scan(back, value[-1], reward, reverse=True)
    advantage = (gain - value - (gain - value).mean()) / ((gain - value).std() + 1e-6)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    return jax.tree.map(flat, (x, action, log_p, advantage, gain)), reward.sum(0).mean()


@script("policy: PPO, updates in nested scans")
def run(optimizer, seed):
    """Minus the mean return of each round, which is what should fall."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "trunk": jax.random.normal(keys[0], (2, 32)),
        "bias": jnp.zeros(32),
        "policy": jax.random.normal(keys[1], (32, 2)) * 0.01,
        "value": jax.random.normal(keys[2], (32, 1)) * 0.1,
    }
    opt = jk.Optimizer(loss_fn, optimizer)
    rows = ENVS * TIME
    batch = jax.eval_shape(lambda: rollout(params, keys[0])[0])
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows // PARTS, *x.shape[1:]), x.dtype), batch
    )

    def train_round(carry, key):
        batch, score = rollout(carry[0], key)

        def epoch(carry, key):
            order = jax.random.permutation(key, rows).reshape(PARTS, -1)

            def minibatch(carry, indices):
                step = opt.step(*carry, jax.tree.map(lambda x: x[indices], batch), key)
                return step[:2], step[2]

            return jax.lax.scan(minibatch, carry, order)

        carry, _ = jax.lax.scan(epoch, carry, jax.random.split(jax.random.fold_in(key, 1), EPOCHS))
        return carry, -score

    rounds = jax.random.split(jax.random.key(50 + seed), ROUNDS)
    train = jax.jit(lambda *carry: jax.lax.scan(train_round, carry, rounds))
    (params, state), losses = train(params, opt.init(params, part))
    jk.check_state(state)
    return [float(x) for x in losses]
