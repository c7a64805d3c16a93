"""Digests of what the library computes, to the bit; ``benchmarks.revisions`` compares two trees.

Run: python -m benchmarks._bits, which prints ``{name: SHA-256}`` as JSON.

Only public names are used, so that the same file runs in both trees.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk

KEY = jax.random.key(0)


def digest(tree: Any) -> str:
    """SHA-256 of all arrays of a tree, with their paths."""
    sha = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(tree), key=lambda x: str(x[0])):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def network(params: Any, x: Any) -> Any:
    """A convolution, a scan of two dense layers, a scale and a head."""
    x = jax.lax.conv_general_dilated(
        x, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jnp.tanh(x).reshape(len(x), -1) * params["scale"]
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w["kernel"] + w["bias"]), None), x, params["body"]
    )
    return x @ params["head"]


def problem() -> tuple[Any, Any]:
    """Parameters and a batch of the network."""
    shapes = {
        "conv": (3, 3, 2, 3),
        "scale": (48,),
        "body": {"kernel": (2, 48, 48), "bias": (2, 48)},
        "head": (48, 5),
    }
    leaves, form = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(KEY, len(leaves))
    params = [0.3 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    x = jax.random.normal(jax.random.key(1), (16, 4, 4, 2))
    return jax.tree.unflatten(form, params), (x, jnp.arange(16) % 5)


def digests() -> dict[str, str]:
    """Of factors, EKFAC, optimizers, host curvature, influence, adapters and four bits."""
    params, batch = problem()
    objective = jk.Objective(network, jk.Categorical())
    results: dict[str, Any] = {}
    for fisher in ("empirical", "mc", "exact", "forward"):
        stats = jk.value_grad_and_factors(objective, fisher=fisher)
        results[f"factors, {fisher}"] = jax.jit(stats)(params, batch, KEY)
    factors = results["factors, mc"][2]
    stats = jk.value_grad_and_factors(objective, fisher="mc")
    bases = jk.eigendecompose(factors)
    results["eigenbases"] = bases
    results["natural gradient"] = jk.natural_gradient(results["factors, mc"][1], bases, damping=0.1)
    corrected = jk.correct_eigenvalues(objective, bases, fisher="mc")
    results["EKFAC"] = jax.jit(corrected)(params, batch, KEY)
    like = stats.factor_shapes(params, batch)
    for name, tx in (
        ("kfac", jk.kfac(like=like)),
        ("kfac, rate", jk.kfac(0.1, like=like)),
        ("kfac, eigh", jk.kfac(0.1, like=like, inverse="eigh", damping_mode="exact")),
        ("kfe_adam", jk.kfe_adam(1e-2, like=like)),
        ("multi_steps", jk.multi_steps(jk.kfac(0.1, like=like), every_k_schedule=2)),
    ):
        results[name] = trained(tx, stats, params, batch, adapts=name == "kfac")
    with jk.HostCurvature(decay=0.9, refresh_every=2, lag=0) as service:
        for step in range(3):
            service.push(factors, step)
        results["host"] = service.bases(2)
    results["influence"] = jk.influence(objective, params, bases, batch, batch, damping=0.1)
    config = jk.lslora.Config(rank=2, target=r"head|body/kernel")
    adapters = jk.lslora.init(network, config, params, batch[0], key=KEY)
    adapted = jk.lslora.attach(network, config)
    loss = lambda adapters: jnp.square(adapted(params, adapters, batch[0])).sum()
    results["adapters"] = jax.jit(jax.value_and_grad(loss))(adapters)
    results["four bits"] = jk.nf4.dequantize(
        jk.nf4.quantize({"head": {"kernel": jnp.ones((64, 64))}})
    )
    plan = jk.plan_memory(
        objective, params, batch, optimizer=optax.adam(1e-3), device_bytes=1e9, compiled="none"
    )
    results["plan"] = {name: np.asarray(row) for name, row in plan.now.device.items()}
    return {name: digest(result) for name, result in results.items()}


def trained(tx: Any, stats: Any, params: Any, batch: Any, *, adapts: bool) -> Any:
    """Parameters after twelve steps."""

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        _, grads, factors = stats(params, batch, key)
        extra = stats.adaptation(params, batch, key) if adapts else {}
        updates, state = tx.update(grads, state, params, factors=factors, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for key in jax.random.split(KEY, 12):
        params, state = step(params, state, key)
    return params


if __name__ == "__main__":
    print(json.dumps(digests()))
