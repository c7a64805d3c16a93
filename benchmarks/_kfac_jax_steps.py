"""Steps of kfac-jax for ``benchmarks.optimizer_steps``: another environment, so no import of ours.

Prints its versions and the bytes of its curvature state. Then it reads a number of steps a line,
takes them, and prints ``[wall seconds, CPU seconds, loss]``.
"""

import json
import os
import sys
import time

# The products of jaxlib 0.8.1 on the CPU pack a matrix once and know it again by its address. A
# donated parameter is written in place: the next step reads the old one, and training diverges.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_xnnpack=false"

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np


def check_donation() -> None:
    """Refuse a JAX whose products do not see what was written into a donated buffer."""
    matrix, product = jnp.ones((784, 1000)), jax.jit(lambda w: jnp.ones((256, 784)) @ w)
    doubled = jax.jit(lambda w: 2 * w, donate_argnums=0)
    for factor in (1, 2):
        if float(product(matrix)[0, 0]) != factor * 784:
            raise SystemExit("a product read what a donated buffer held before: no fair peer")
        matrix = doubled(matrix)


def main() -> None:
    check_donation()
    file, settings = sys.argv[1:3]
    size, period = map(int, sys.argv[3:5])
    rate, damping, constraint = map(float, sys.argv[5:8])
    data = np.load(file)
    images, depth = data["images"], len(data.files) - 1
    params = [{"w": data[f"w{i}"], "b": np.zeros(data[f"w{i}"].shape[1])} for i in range(depth)]
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)

    def loss(params, x):
        inputs = x
        for i, p in enumerate(params):
            x = x @ p["w"] + p["b"]
            x = x if i in (depth // 2 - 1, depth - 1) else jnp.tanh(x)
        kfac_jax.register_multi_bernoulli_predictive_distribution(x, targets=inputs)
        softplus = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        return jnp.mean(jnp.sum(softplus - x * inputs, -1))

    adaptive = settings == "adaptive"
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=0.0,
        use_adaptive_learning_rate=adaptive,
        use_adaptive_momentum=adaptive,
        use_adaptive_damping=adaptive,
        initial_damping=damping if adaptive else None,
        damping_schedule=None if adaptive else lambda _: damping,
        learning_rate_schedule=None if adaptive else lambda _: rate,
        momentum_schedule=None if adaptive else lambda _: 0.9,
        norm_constraint=None if adaptive else constraint,
        inverse_update_period=period,
        num_burnin_steps=0,
        estimation_mode="fisher_gradients",
        multi_device=False,
    )

    def batch(step):
        return jnp.asarray(images[(np.arange(size) + step * size) % len(images)])

    state, taken = optimizer.init(params, jax.random.key(0), batch(0)), 0
    versions = {"jax": jax.__version__, "kfac_jax": kfac_jax.__version__}
    versions["xla_flags"] = os.environ["XLA_FLAGS"].strip()
    # Averages of the factors, and the inverses of the damped ones.
    curvature = sum(x.nbytes for x in jax.tree.leaves(state.estimator_state))
    print(json.dumps({"versions": versions, "curvature_bytes": curvature}), flush=True)
    for line in sys.stdin:
        wall, cpu, stats = time.perf_counter(), time.process_time(), {}
        for _ in range(int(line)):
            key = jax.random.key(taken)
            params, state, stats = optimizer.step(
                params, state, key, batch=batch(taken), global_step_int=taken
            )
            taken += 1
        value = float(stats["loss"])
        print(
            json.dumps([time.perf_counter() - wall, time.process_time() - cpu, value]), flush=True
        )


if __name__ == "__main__":
    main()
