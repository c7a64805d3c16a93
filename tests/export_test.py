"""What every entry point is on every platform: products, their precision, solvers; no callbacks."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ROWS, IN, HIDDEN, OUT = 24, 10, 14, 6
# What each platform decomposes a symmetric matrix with; JAX's own names.
EIGH = {
    "cpu": "lapack_ssyevd_ffi",
    "cuda": "cusolver_syevd_ffi",
    "rocm": "hipsolver_syevd_ffi",
    "tpu": "Eigh",
}

_DOT = re.compile(
    r"stablehlo\.dot_general .*? : \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
)
_CALL = re.compile(r"custom_call @(\w+)")
_PRECISION = re.compile(r"precision = \[(\w+), (\w+)\]")


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def apply(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return (hidden @ params["down"]).astype(jnp.float32)


def problem(dtype=jnp.float32):
    """Objective, parameters, batch: two dense layers without biases."""
    params = {"up": of(IN, HIDDEN, dtype=dtype), "down": of(HIDDEN, OUT, dtype=dtype)}
    batch = (of(ROWS, IN, dtype=dtype), of(ROWS, dtype=jnp.int32))
    return jk.Objective(apply, jk.Categorical()), params, batch


def module(fn, *args, platforms=("cuda",)):
    """StableHLO of a function, lowered at once for platforms that need not be here."""
    shapes = jax.eval_shape(lambda *xs: xs, *args)
    return jax.export.export(jax.jit(fn), platforms=platforms)(*shapes).mlir_module()


def grams(text):
    """``{(rows' dtype, feature size, result's dtype): [precisions]}`` of products of rows."""
    out = {}
    for line in text.splitlines():
        if found := _DOT.search(line):
            (*left, dtype), (*right, _), (*result, into) = (s.split("x") for s in found.groups())
            if left == right and len(result) == 2 and result[0] == result[1]:
                precision = _PRECISION.search(line)
                asked = precision[1] if precision else "DEFAULT"
                out.setdefault((dtype, int(result[0]), into), []).append(asked)
    return out


def key():
    return jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype, precision", [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_each_side_is_one_product_of_rows_accumulated_in_float32(dtype, precision, platform):
    """Float32 rows ask for full precision: no TF32, no lone bfloat16 pass."""
    objective, params, batch = problem(dtype)
    text = module(jk.value_grad_and_factors(objective), params, batch, platforms=[platform])
    rows = {"float32": "f32", "bfloat16": "bf16"}[jnp.dtype(dtype).name]
    sides = Counter((IN, HIDDEN, HIDDEN, OUT))
    assert grams(text) == {(rows, n, "f32"): [precision] * count for n, count in sides.items()}


@pytest.mark.parametrize(
    "fisher, products",
    [
        ("empirical", {IN: 1, HIDDEN: 2, OUT: 1}),
        ("mc", {IN: 1, HIDDEN: 2, OUT: 1}),
        ("exact", {IN: 1, HIDDEN: 2, OUT: 1}),
        ("forward", {IN: 1, HIDDEN: 1}),
        ("exact_if_terms_do_not_mix", {IN: 1, HIDDEN: 2, OUT: 1}),
    ],
)
def test_a_fisher_type_adds_vector_jacobian_products_but_no_product_of_rows(fisher, products):
    objective, params, batch = problem()
    stats = jk.value_grad_and_factors(objective, fisher=fisher)
    found = grams(module(stats, params, batch, key()))
    assert {n: len(p) for (_, n, _), p in found.items()} == products


def test_a_wide_side_is_three_panels_of_its_upper_triangle():
    wide = 768
    objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
    x, y = of(ROWS, wide), of(ROWS, OUT)
    text = module(jk.value_grad_and_factors(objective), {"kernel": of(wide, OUT)}, (x, y))
    dots = [m.group(3) for line in text.splitlines() if (m := _DOT.search(line))]
    panels = ["256x768xf32", "256x512xf32", "256x256xf32"]
    assert [d for d in dots if d in panels] == panels
    assert "768x768xf32" not in dots


def test_a_wide_output_side_is_whole_before_its_cotangent_is_propagated():
    """Else a scheduler that puts the products off keeps the cotangent until it has done them."""
    wide = 768
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], jk.Gaussian())
    params = {"up": of(IN, wide), "down": of(wide, OUT)}
    text = module(jk.value_grad_and_factors(objective), params, (of(ROWS, IN), of(ROWS, OUT)))
    (types,) = re.findall(r"stablehlo\.optimization_barrier .* : (.*?) loc", text)
    assert f"tensor<{wide}x{wide}xf32>" in types and f"tensor<{ROWS}x{wide}xf32>" in types


@functools.cache
def entry_points():
    """``{name: (function, arguments)}`` of every function that can be jitted."""
    objective, params, batch = problem()
    stats = jk.value_grad_and_factors(objective)
    like = stats.factor_shapes(params, batch)
    decompose = functools.partial(jk.eigendecompose, placement="device")
    bases = jax.eval_shape(decompose, like)
    kfac = jk.kfac(0.1, like=like, damping=1e-3, norm_constraint=1e-2)
    accumulated = jk.multi_steps(kfac, 4, like=like)
    scaled = jk.scale_by_bases(damping=1e-3)
    config = jk.lslora.Config(rank=2, target="up|down")
    adapted = jk.lslora.attach(apply, config)
    init = functools.partial(jk.lslora.init, config, apply, params, batch[0])
    adapters = jax.eval_shape(lambda k: init(key=k), key())
    in_nf4 = jk.nf4.quantize({"up": of(64, HIDDEN), "down": of(HIDDEN, OUT)}, "up")

    def update(tx, **extra):
        return lambda g, s, p, more: tx.update(g, s, p, **dict.fromkeys(extra, more))

    out = {
        "Objective": (objective, (params, batch)),
        "apply_power": (lambda t, b: jk.apply_power(t, b, power=-0.5), (params, bases)),
        "natural_gradient": (
            lambda t, b: jk.natural_gradient(t, b, damping=1e-3),
            (params, bases),
        ),
        "fisher_vector_product": (jk.fisher_vector_product, (params, bases)),
        "update_average": (lambda a, f: jk.update_average(a, f, 0.9), (like, like)),
        "reconstruct": (jk.reconstruct, (bases,)),
        "correct_eigenvalues": (
            lambda p, b, d, k: jk.correct_eigenvalues(objective, b)(p, d, k),
            (params, bases, batch, key()),
        ),
        "eigendecompose": (decompose, (like,)),
        "kfac": (
            update(kfac, factors=None),
            (params, jax.eval_shape(kfac.init, params), params, like),
        ),
        "multi_steps": (
            update(accumulated, factors=None),
            (params, jax.eval_shape(accumulated.init, params), params, like),
        ),
        "scale_by_bases": (
            update(scaled, bases=None),
            (params, jax.eval_shape(scaled.init, params), params, bases),
        ),
        "lslora.init": (lambda k: init(key=k), (key(),)),
        "lslora.attach": (adapted, (params, adapters, batch[0])),
        "lslora.fourier_loss": (jk.lslora.fourier_loss, (adapters,)),
        "nf4.dequantize": (jk.nf4.dequantize, (in_nf4,)),
    }
    for name, fisher, sharing in (
        ("empirical", "empirical", "expand"),
        ("mc", "mc", "expand"),
        ("exact", "exact", "expand"),
        ("forward", "forward", "expand"),
        ("reduce", "empirical", "reduce"),
    ):
        collect = jk.value_grad_and_factors(objective, fisher=fisher, sharing=sharing)
        out[f"value_grad_and_factors, {name}"] = (collect, (params, batch, key()))
    for name in ("fisher", "ggn", "hessian"):

        def product(p, d, v, name=name):
            return getattr(jk.operators, name)(objective, p, d) @ v

        out[f"operators.{name}"] = (product, (params, batch, params))
    out["operators.kronecker"] = (lambda b, v: jk.operators.kronecker(b) @ v, (bases, params))
    return out


DECOMPOSING = ("eigendecompose", "kfac", "multi_steps")


@pytest.mark.parametrize("name", entry_points())
def test_every_entry_point_is_a_module_of_its_own_without_callbacks(name):
    """All that it calls are the platforms' solvers; a callback would be a call, too."""
    fn, args = entry_points()[name]
    called = set(_CALL.findall(module(fn, *args, platforms=PLATFORMS)))
    assert called == (set(EIGH.values()) if name in DECOMPOSING else set())


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", DECOMPOSING)
def test_sides_of_one_size_are_decomposed_by_one_call(name, platform):
    """Four sides, of which two have one size."""
    fn, args = entry_points()[name]
    called = _CALL.findall(module(fn, *args, platforms=[platform]))
    assert called == [EIGH[platform]] * 3
