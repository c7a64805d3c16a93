"""Every form of program: plain LoRA is the merged kernel, and a batch may mix adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._arguments import leaves_by_path, with_leaves
from jaxkfac._errors import LostRowsError
from jaxkfac.interception import trace
from jaxkfac.lslora import Config, attach, init, stack


def weights(*shape):
    return jax.random.normal(jax.random.key(sum(shape) + len(shape)), shape) / 3


PARAMS = {
    "w": weights(4, 6),
    "v": weights(6, 4),
    "t": weights(6, 4),
    "q": weights(4, 2, 3),
    "o": weights(2, 3, 4),
    "e": weights(3, 4, 5),
    "s": weights(3, 4, 4),
    "fused": weights(4, 3, 2, 2),
}
X = jax.random.normal(jax.random.key(9), (3, 2, 4))  # examples, positions, features


def heads(p, x):
    return jnp.einsum("nsd,dhk->nshk", x, p["q"])


PROGRAMS = {
    "dense layers": (lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], "w|v"),
    "kernel first": (lambda p, x: jnp.einsum("oi,nsi->nso", p["t"], x), "t"),
    "two contracted axes": (lambda p, x: jnp.einsum("nshk,hkd->nsd", heads(p, x), p["o"]), "q|o"),
    "contracted axes in another order": (
        lambda p, x: jax.lax.dot_general(
            heads(p, x).swapaxes(2, 3), p["o"], (((2, 3), (1, 0)), ((), ()))
        ),
        "q|o",
    ),
    "outputs in another order": (
        lambda p, x: jnp.einsum("nsd,dkh->nskh", x, p["q"].transpose(0, 2, 1)),
        "q",
    ),
    "fused outputs": (lambda p, x: jnp.einsum("nsd,dthk->nsthk", x, p["fused"]), "fused"),
    "transposed view": (lambda p, x: x @ p["t"].T, "t"),
    "reshaped view": (lambda p, x: x @ p["q"].reshape(4, 6), "q"),
    "examples and positions in one axis": (
        lambda p, x: (x.reshape(6, 4) @ p["w"]).reshape(3, 2, 6),
        "w",
    ),
    "scan of a remat": (
        lambda p, x: jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, p["s"])[
            0
        ],
        "s",
    ),
    "kernel constant in a scan": (
        lambda p, x: jax.lax.scan(
            lambda c, r: (jnp.tanh(c @ p["s"][0] + r), None), x[:, 0], jnp.moveaxis(x, 1, 0)
        )[0],
        r"s\[0\]",
    ),
    "traced index": (
        lambda p, x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["s"][i]), x),
        "s",
    ),
    "batched experts": (
        lambda p, x: jnp.einsum("nesi,eio->neso", jnp.stack([x, 2 * x, -x], 1), p["e"]),
        "e",
    ),
    "experts as outputs": (lambda p, x: jnp.einsum("nsi,eio->nseo", x, p["e"]), "e"),
    "vmap over jit": (lambda p, x: jax.vmap(jax.jit(lambda r: r @ p["w"]))(x), "w"),
}


def moved(tree, seed):
    """Leaves away from their first values."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        structure,
        [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)],
    )


def merged(fn, config, adapters):
    """The parameters with every product of A and B added: another road to plain LoRA."""
    table = trace(fn, PARAMS, X, experts=config.experts).table
    leaves = leaves_by_path(PARAMS)
    for name, adapter in adapters.items():
        weight = table[name].weight
        delta = config.scaling(name) * jnp.einsum("...ir,...ro->...io", adapter.a, adapter.b)
        old = weight.read(leaves[weight.path])
        leaves[weight.path] = weight.write(leaves[weight.path], old + delta)
    return with_leaves(PARAMS, leaves)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "experts"), [*((n, None) for n in PROGRAMS), ("experts as outputs", "e")]
)
def test_plain_lora_is_the_merged_kernel_and_rows_may_mix_adapters(name, experts):
    fn, target = PROGRAMS[name]
    plain = Config(rank=2, alpha=3, target=target, fourier_placement="none", experts=experts)
    inside = Config(rank=2, alpha=3, target=target, fourier_placement="bottleneck", experts=experts)
    linear = moved(init(fn, plain, PARAMS, X, key=jax.random.key(0)), 1)
    first, second = (moved(init(fn, inside, PARAMS, X, key=jax.random.key(0)), i) for i in (2, 3))
    adapted, curved = attach(fn, plain), attach(fn, inside)

    @jax.jit
    def run(linear, first, second):
        bank = stack({"first": first, "second": second})
        return (
            (adapted(PARAMS, linear, X), fn(merged(fn, plain, linear), X)),
            curved(PARAMS, bank, X, adapter=jnp.array([1, -1, 0])),
            (curved(PARAMS, second, X)[0], fn(PARAMS, X)[1], curved(PARAMS, first, X)[2]),
            fn(PARAMS, X),
        )

    (got, want), mixed, rows, base = run(linear, first, second)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)  # float32 sums in another order
    assert float(jnp.abs(want - base).max()) > 0.05
    np.testing.assert_allclose(mixed, jnp.stack(rows), rtol=1e-5, atol=2e-6)
    assert float(jnp.abs(mixed - base)[jnp.array([0, 2])].max()) > 0.05


def test_rows_that_do_not_run_along_the_examples_are_refused():
    """Both leading axes have three entries; only one of them is the examples."""

    def fn(p, x):
        return jnp.einsum("nsi,eio->enso", x, p["e"])

    config = Config(rank=2, target="e")
    bank = stack({"only": init(fn, config, PARAMS, X, key=jax.random.key(0))})
    with pytest.raises(LostRowsError, match=r"layer 'e': example axis lost at `dot_general`"):
        attach(fn, config)(PARAMS, bank, X, adapter=jnp.zeros(3, int))
