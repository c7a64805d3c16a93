"""The same with this library: ``python -m benchmarks._uses.influence PROBLEM.npz OUTPUT.npz``."""

import json
import operator
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk

SIDES = ("activation", "gradient")


def dense(p: Any, name: str, x: Any) -> Any:
    x = x @ p[f"{name}.w"]
    return x + p[f"{name}.b"] if f"{name}.b" in p else x


def perceptron(p: Any, x: Any) -> Any:
    for i in range(2):
        x = jnp.tanh(dense(p, f"layers.{i}", x))
    return dense(p, "layers.2", x)


def normed(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def transformer(heads: int, fixed: Any) -> Any:
    def apply(p: Any, ids: Any) -> Any:
        x = fixed["table"][ids] + fixed["places"]
        for i in range(sum(name.endswith("qkv.w") for name in p)):
            name = f"blocks.{i}"
            rows, length, width = x.shape
            parts = dense(p, f"{name}.qkv", normed(x)).reshape(rows, length, 3, heads, -1)
            q, k, v = jnp.moveaxis(parts, 2, 0)
            logits = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
            seen = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))  # JAX's own is in float32
            mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
            x = x + dense(p, f"{name}.out", mixed.reshape(rows, length, width))
            x = x + dense(p, f"{name}.down", jax.nn.gelu(dense(p, f"{name}.up", normed(x))))
        return dense(p, "head", normed(x))

    return apply


def main() -> None:
    problem = dict(np.load(sys.argv[1]))
    settings = json.loads(str(problem.pop("settings")))
    if problem["q_inputs"].dtype == np.float64 or settings["dtype"] == "float64":
        jax.config.update("jax_enable_x64", True)
    data = {k: jnp.asarray(problem.pop(k)) for k in ("inputs", "targets", "q_inputs", "q_targets")}
    fixed = {k: jnp.asarray(problem.pop(k)) for k in ("table", "places") if k in problem}
    params = {k: jnp.asarray(v) for k, v in problem.items()}
    model = perceptron
    if settings["kind"] == "transformer":
        model = transformer(settings["heads"], fixed)
    objective = jk.Objective(model, jk.Categorical())
    size, number = settings["batch_size"], len(data["inputs"])
    queries = data["q_inputs"], data["q_targets"]

    def batches() -> Any:
        for i in range(0, number, size):
            yield data["inputs"][i : i + size], data["targets"][i : i + size]

    seconds, start = {}, (time.perf_counter(), time.process_time())

    def stage(name: str, done: Any) -> None:
        nonlocal start
        jax.block_until_ready(jax.tree.leaves(done))
        now = time.perf_counter(), time.process_time()
        seconds[name] = [b - a for a, b in zip(start, now, strict=True)]
        start = now

    stats = jk.value_grad_and_factors(objective, fisher="empirical")
    collect = jax.jit(lambda params, batch: stats(params, batch).factors)
    add, factors = jax.jit(operator.add, donate_argnums=0), None
    for batch in batches():
        new = collect(params, batch)
        factors = new if factors is None else add(factors, new)
    stage("covariance", factors)
    assert factors is not None
    bases = jk.eigendecompose(factors, max_condition=float("inf"))
    stage("decomposition", bases)
    measure = jax.jit(jk.correct_eigenvalues(objective, bases, fisher="empirical"))
    corrected = None
    for batch in batches():
        new = measure(params, batch)
        corrected = new if corrected is None else corrected + new
    stage("lambda", corrected)
    assert corrected is not None
    pairwise = jk.influence(objective, params, corrected, queries, batches())
    stage("pairwise", pairwise)
    own = jk.self_influence(objective, params, corrected, batches())
    stage("self", own)
    terms = data["targets"].size // number  # theirs is of sums over an example
    found = {"pairwise": pairwise / terms, "self": own / terms}
    if settings["keep"]:
        for layer in bases.layers:
            name = layer.weight.path.removesuffix(".w")
            factor: Any = factors[layer.name]
            found |= {f"activation/{name}": factor.a, f"gradient/{name}": factor.g}
            found[f"lambda/{name}"] = terms * corrected[layer.name].raw_values.T  # type: ignore
    np.savez(sys.argv[2], **{k: np.asarray(v) for k, v in found.items()})
    print(json.dumps({"seconds": seconds, "versions": {"jax": jax.__version__}}))


if __name__ == "__main__":
    main()
