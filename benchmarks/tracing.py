"""Cost of tracing: CPU seconds for the gradient, the layer table, statistics and their shapes.

Run: python -m benchmarks.tracing [--layers 32] [--repeats 3] [--json FILE]

The program is an unrolled decoder of the Llama layout, written without a framework: root mean
square norms, rotary positions, grouped queries, a gated feed-forward, and no scan, so that every
layer is traced. It holds 6.7 billion parameters at 32 layers, and shapes suffice. Figures are
``time.process_time`` of the best of several runs, each with new functions, so that no cache of
ours answers. JAX's own caches stay warm, as they are for everyone's second trace.

Floors, none of which runs any emission of ours: the gradient is of a program that has been traced
and analysed first, so JAX differentiates equations (``replayed_s``) in place of functions, whose
derivatives it keeps; ``floor_ratio`` is ``find_layers_s`` and ``replayed_s`` over ``gradient_s``.
Statistics may lie below it, because equal runs of equations are differentiated once.
Sampled statistics pull a second cotangent back, which ``second_pullback_s`` is added for.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

import jaxkfac as jk
from benchmarks._record import shown, stamp, write

WIDTH, HIDDEN, HEADS, KEY_HEADS, HEAD, VOCABULARY = 4096, 11008, 32, 32, 128, 32000
EXAMPLES, TOKENS = 1, 512


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in "qkv")
    q, k = rotated(q), rotated(k)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(jnp.asarray(HEAD, x.dtype))
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhqs,bshk->bqhk", weights, v), p["o"])


def feed_forward(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def decoder(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = x + attention(p["attention"], norm(p["norm"], x))
        x = x + feed_forward(p["mlp"], norm(p["mlp_norm"], x))
    return norm(params["norm"], x) @ params["head"]


def shapes(layers: int) -> tuple[Any, Any]:
    """``(params, batch)`` as shapes."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = {
        "norm": array(WIDTH),
        "mlp_norm": array(WIDTH),
        "attention": {
            "q": array(WIDTH, HEADS, HEAD),
            "k": array(WIDTH, KEY_HEADS, HEAD),
            "v": array(WIDTH, KEY_HEADS, HEAD),
            "o": array(HEADS, HEAD, WIDTH),
        },
        "mlp": {
            "gate": array(WIDTH, HIDDEN),
            "up": array(WIDTH, HIDDEN),
            "down": array(HIDDEN, WIDTH),
        },
    }
    params = {
        "embedding": array(VOCABULARY, WIDTH),
        "layers": [layer] * layers,
        "norm": array(WIDTH),
        "head": array(WIDTH, VOCABULARY),
    }
    ids = array(EXAMPLES, TOKENS, dtype=jnp.int32)
    return params, (ids, ids)


def best(make: Callable[[], Callable[[], Any]], repeats: int) -> tuple[float, Any]:
    """The fewest CPU seconds of several runs, and what the last one returned."""
    seconds, out = [], None
    for _ in range(repeats):
        run = make()
        start = time.process_time()
        out = run()
        seconds.append(time.process_time() - start)
    return min(seconds), out


def measure(layers: int, repeats: int) -> dict[str, float]:
    """Every figure, and the equations of the two programs, those inside of shared ones once."""
    params, batch = shapes(layers)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def objective() -> jk.Objective:
        return jk.Objective(lambda p, x: decoder(p, x), jk.Categorical())

    def gradient() -> Callable[[], Any]:
        fn = jax.value_and_grad(objective())
        return lambda: jax.make_jaxpr(lambda p, b: fn(p, b))(params, batch)

    def replayed() -> Callable[[], Any]:
        loss = jax.make_jaxpr(objective())(params, batch)
        leaves, rest = jax.tree.leaves(params), jax.tree.leaves(batch)
        equations = jax.extend.core.jaxpr_as_fun(loss)
        fn = jax.value_and_grad(lambda leaves, rest: equations(*leaves, *rest)[0])
        return lambda: jax.make_jaxpr(fn)(leaves, rest)

    def pulled_back_twice() -> Callable[[], Any]:
        fn = objective()

        def both(params: Any, batch: Any) -> Any:
            value, pull = jax.vjp(lambda p: fn(p, batch), params)
            return pull(value), pull(2 * value)

        return lambda: jax.make_jaxpr(both)(params, batch)

    def table() -> Callable[[], Any]:
        apply_fn = objective().apply_fn
        return lambda: jk.find_layers(apply_fn, params, batch[0])

    def statistics(fisher: Any) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            fn = jk.value_grad_and_factors(objective(), fisher=fisher)
            return lambda: jax.make_jaxpr(lambda p, b, k: fn(p, b, k))(params, batch, key)

        return make

    def factor_shapes() -> Callable[[], Any]:
        fn = jk.value_grad_and_factors(objective())
        fn.traced(params, fn.checked(batch))  # as ever after the first call
        return lambda: fn.factor_shapes(params, batch)

    plain, plain_jaxpr = best(gradient, repeats)
    again, _ = best(replayed, repeats)
    twice, _ = best(pulled_back_twice, repeats)
    found, layer_table = best(table, repeats)
    full, full_jaxpr = best(statistics("empirical"), repeats)
    sampled, _ = best(statistics("mc"), repeats)
    shapes_alone, _ = best(factor_shapes, repeats)
    return {
        "layers": len(layer_table),
        "gradient_s": plain,
        "find_layers_s": found,
        "statistics_s": full,
        "sampled_s": sampled,
        "factor_shapes_s": shapes_alone,
        "replayed_s": again,
        "second_pullback_s": twice - plain,
        "statistics_ratio": full / plain,
        "sampled_ratio": sampled / plain,
        "floor_ratio": (found + again) / plain,
        "sampled_floor_ratio": (found + again + twice - plain) / plain,
        "gradient_equations": equations(plain_jaxpr.jaxpr, set()),
        "statistics_equations": equations(full_jaxpr.jaxpr, set()),
    }


def equations(jaxpr: Any, seen: set[int]) -> int:
    """How many equations are lowered; a jaxpr that several equations call counts once."""
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    inner = (
        getattr(part, "jaxpr", part)
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for part in (value if isinstance(value, tuple | list) else [value])
    )
    return len(jaxpr.eqns) + sum(equations(j, seen) for j in inner if hasattr(j, "eqns"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="decoder layers (default 32)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = stamp(layers=args.layers, repeats=args.repeats)
    record["decoder"] = measure(args.layers, args.repeats)
    shown("decoder", record["decoder"])
    write(record, args.json)


if __name__ == "__main__":
    main()
