"""The JAX counterparts, where there are any, on the problems of ``_torch_programs``."""

import functools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.flax
import safetensors.numpy

import jaxkfac as jk
from benchmarks._fixes._sizes import Size
from jaxkfac.linalg import clip_eigenvalues, eigh_clipped, from_spectrum
from jaxkfac.memory import cast_once, load_safetensors

FOLDER = tempfile.TemporaryDirectory()


class Program(NamedTuple):
    """As in ``_torch_programs``."""

    prepare: Callable[[], Any]
    before: Callable[[Any], Any]
    after: Callable[[Any], Any]


def parameters(width: int, depth: int) -> dict[str, Any]:
    draw = lambda key: jax.random.normal(key, (width, width)) / width**0.5
    keys = jax.random.split(jax.random.key(0), depth)
    return {
        f"layer{i:02}": {"kernel": draw(key), "bias": jnp.zeros(width)}
        for i, key in enumerate(keys)
    }


def forward(params: Any, x: jax.Array) -> jax.Array:
    for name in params:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x if name == max(params) else jnp.tanh(x)
    return x


def batch(size: Size) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (size.rows, size.width))
    return x, jnp.arange(size.rows) % size.width


OBJECTIVE = jk.Objective(forward, jk.Categorical())


def factors(size: Size) -> Program:
    """Against keeping the input and the output gradient of every layer to the end."""

    def loss(params: Any, shifts: Any, x: jax.Array, y: jax.Array) -> Any:
        inputs = {}
        for name in params:
            inputs[name] = x
            x = x @ params[name]["kernel"] + params[name]["bias"] + shifts[name]
            x = x if name == max(params) else jnp.tanh(x)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean(), inputs

    passes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    gram = jax.jit(lambda rows: rows.T @ rows / len(rows))
    stats = jax.jit(jk.value_grad_and_factors(OBJECTIVE))

    def before(state: Any) -> Any:
        params, (x, y) = state
        shifts = {name: jnp.zeros((size.rows, size.width)) for name in params}
        (value, inputs), (grads, gradients) = passes(params, shifts, x, y)
        ones = jnp.ones((size.rows, 1))
        return (
            value,
            grads,
            {
                name: jax.block_until_ready(
                    (gram(jnp.concatenate([inputs[name], ones], 1)), gram(gradients[name]))
                )
                for name in params
            },
        )

    return Program(
        lambda: (parameters(size.width, size.depth), batch(size)),
        before,
        lambda state: stats(*state),
    )


def budgeted_factors(size: Size) -> Program:
    """A budget of one layer's factors, against all of them as outputs of one program."""
    whole = jax.jit(jk.value_grad_and_factors(OBJECTIVE))
    layer = 3 * 4 * (size.width + 1) ** 2  # A with its ones column, what it is made of, and G
    within = jk.value_grad_and_factors(OBJECTIVE, max_factor_bytes=layer)
    return Program(
        lambda: (parameters(size.width, size.depth), batch(size)),
        lambda state: whole(*state),
        lambda state: within(*state),
    )


def sent_factor(size: Size) -> Program:
    return Program(
        lambda: jnp.ones((size.factor, size.factor), jnp.bfloat16),
        lambda factor: np.asarray(factor.astype(jnp.float32)),
        lambda factor: np.asarray(factor).astype(np.float32),
    )


def clipping(size: Size) -> Program:
    @jax.jit
    def dense(matrix: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(matrix)
        return vectors @ jnp.diag(clip_eigenvalues(values, 1e3, 1e-6)) @ vectors.T

    def prepare() -> jax.Array:
        rows = jax.random.normal(jax.random.key(0), (2 * size.matrix, size.matrix))
        return rows.T @ rows / len(rows)

    def clipped(matrix: jax.Array) -> jax.Array:
        found = eigh_clipped(matrix, max_condition=1e3, floor=1e-6)
        return from_spectrum(found.values, found.vectors)

    return Program(prepare, dense, jax.jit(clipped))


def training_step(size: Size) -> Program:
    plain = optax.sgd(0.1)
    rows = size.rows // size.micro_batches
    accumulating = jk.multi_steps(plain, every_k_schedule=size.micro_batches)

    def step(tx: Any, params: Any, state: Any, part: Any, **terms: int) -> Any:
        grads = jax.grad(OBJECTIVE)(params, part)
        updates, state = tx.update(grads, state, params, **terms)
        return optax.apply_updates(params, updates), state

    full = jax.jit(functools.partial(step, plain), donate_argnums=(0, 1))
    micro = jax.jit(
        lambda params, state, part: step(accumulating, params, state, part, terms=rows),
        donate_argnums=(0, 1),
    )

    def prepare() -> Any:
        x, y = batch(size)
        parts = [
            jax.block_until_ready((x[i : i + rows], y[i : i + rows]))
            for i in range(0, size.rows, rows)
        ]
        return parameters(size.width, size.depth), (x, y), parts

    def before(state: Any) -> Any:
        params, whole, _ = state
        return full(params, plain.init(params), whole)

    def after(state: Any) -> Any:
        params, _, parts = state
        inner = accumulating.init(params)
        for part in parts:
            params, inner = jax.block_until_ready(micro(params, inner, part))
        return params

    return Program(prepare, before, after)


def loading(size: Size) -> Program:
    file = FOLDER.name + "/loaded.safetensors"
    flat = parameters(size.model_width, size.model_depth)
    safetensors.numpy.save_file(
        {f"{n}.{leaf}": np.asarray(x) for n, layer in flat.items() for leaf, x in layer.items()},
        file,
    )
    convert = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    return Program(
        lambda: None,
        lambda _: convert(safetensors.flax.load_file(file)),
        lambda _: load_safetensors(file, dtype=jnp.bfloat16),
    )


def conversion(size: Size) -> Program:
    whole = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree))
    return Program(
        lambda: parameters(size.model_width, size.model_depth),
        whole,
        lambda params: cast_once(params, jnp.bfloat16),
    )


def recomputation(size: Size) -> Program:
    """Blocks of two dense layers, scanned; against the same without recomputation."""

    def block(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
        for i in range(2):
            x = jnp.tanh(x @ layers["kernel"][i] + layers["bias"][i])
        return x, None

    def gradient(block: Any) -> Any:
        def blocks(params: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(block, x, params)[0]

        compute = jax.jit(jax.grad(jk.Objective(blocks, jk.Categorical())))
        return lambda state: compute(*state)

    def prepare() -> Any:
        layers = parameters(size.width, size.depth).values()
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
        return jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), stacked), batch(size)

    return Program(prepare, gradient(block), gradient(jax.checkpoint(block)))


PROGRAMS: dict[str, Callable[[Size], Program]] = {
    "collect_retaining_graph": factors,
    "collect_on_device": budgeted_factors,
    "to_host_converted_first": sent_factor,
    "stabilize_on_device": clipping,
    "full_batch_step": training_step,
    "load_then_convert": loading,
    "cast_and_move_always": conversion,
    "ReentrantlyRecomputed": recomputation,
}
