"""What every entry point is on every platform: products, their precision, solvers; no callbacks."""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk
from tests._entry_points import ENTRY_POINTS, HIDDEN, IN, NOT_EXPORTED, OUT, ROWS, of, problem

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# What each platform decomposes a symmetric matrix with; JAX's own names.
EIGH = {
    "cpu": "lapack_ssyevd_ffi",
    "cuda": "cusolver_syevd_ffi",
    "rocm": "hipsolver_syevd_ffi",
    "tpu": "Eigh",
}

QR = {  # and a solve with its triangle, which only LAPACK has as a call
    "lapack_strsm_ffi",
    "lapack_sgeqrf_ffi",
    "lapack_sorgqr_ffi",
    "cusolver_geqrf_ffi",
    "cusolver_orgqr_ffi",
    "hipsolver_geqrf_ffi",
    "hipsolver_orgqr_ffi",
    "Qr",
    "ProductOfElementaryHouseholderReflectors",
}

CHOLESKY = {  # and solves with its triangle; a TPU's are no calls
    "cpu": "lapack_spotrf_ffi",
    "cuda": "cusolver_potrf_ffi",
    "rocm": "hipsolver_potrf_ffi",
}
TRIANGULAR = "lapack_strsm_ffi"

_DOT = re.compile(
    r"stablehlo\.dot_general .*? : \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
)
_CALL = re.compile(r"custom_call @(\w+)")
_PRECISION = re.compile(r"precision = \[(\w+), (\w+)\]")


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


def entry_of(name):
    fn, args = ENTRY_POINTS[name].build()
    return fn, *args


@pytest.mark.default(2, slow=2)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype, precision", [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_each_side_is_one_product_of_rows_accumulated_in_float32(dtype, precision, platform):
    """Float32 rows ask for full precision: no TF32, no lone bfloat16 pass."""
    objective, params, batch = problem(dtype)
    text = module(jk.value_grad_and_factors(objective), params, batch, platforms=[platform])
    rows = {"float32": "f32", "bfloat16": "bf16"}[jnp.dtype(dtype).name]
    sides = Counter((IN, HIDDEN, HIDDEN, OUT))
    assert grams(text) == {(rows, n, "f32"): [precision] * count for n, count in sides.items()}


@pytest.mark.default(4, slow=1)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("wide", [768, 1536])
def test_a_wide_side_is_three_panels_of_its_upper_triangle(wide, platform):
    """On accelerators only a wider one."""
    objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
    stats, batch = jk.value_grad_and_factors(objective), (of(ROWS, wide), of(ROWS, OUT))
    text = module(stats, {"kernel": of(wide, OUT)}, batch, platforms=[platform])
    dots = [m.group(3) for line in text.splitlines() if (m := _DOT.search(line))]
    third, whole = wide // 3, [f"{wide}x{wide}xf32"]
    panels = [f"{third}x{k * third}xf32" for k in (3, 2, 1)]
    expected = panels if platform == "cpu" or wide >= 1024 else whole
    assert [d for d in dots if d in panels + whole] == expected


def test_a_wide_output_side_is_whole_before_its_cotangent_is_propagated():
    """Else a scheduler that puts the products off keeps the cotangent until it has done them."""
    wide = 768
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], jk.Gaussian())
    params = {"up": of(IN, wide), "down": of(wide, OUT)}
    text = module(jk.value_grad_and_factors(objective), params, (of(ROWS, IN), of(ROWS, OUT)))
    (types,) = re.findall(r"stablehlo\.optimization_barrier .* : (.*?) loc", text)
    assert f"tensor<{wide}x{wide}xf32>" in types and f"tensor<{ROWS}x{wide}xf32>" in types


@pytest.mark.default(2, slow=3)
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_entry_point_is_a_module_of_its_own_without_callbacks(name):
    """Products of rows, in full precision; all that it calls are the platforms' solvers."""
    entry = ENTRY_POINTS[name]
    text = module(*entry_of(name), platforms=PLATFORMS)
    solvers = (set(EIGH.values()) if entry.eigh else set()) | (QR if entry.qr else set())
    solvers |= {*CHOLESKY.values(), TRIANGULAR} if entry.cholesky else set()
    assert set(_CALL.findall(text)) == solvers
    # One for every way in which JAX lowers a product, where it lowers for all platforms at once.
    found = grams(text) and grams(module(*entry_of(name), platforms=["tpu"]))
    assert {n: len(asked) for (_, n, _), asked in found.items()} == entry.grams
    assert {p for asked in found.values() for p in asked} <= {"HIGHEST"}


@pytest.mark.default(1, slow=3)
@pytest.mark.sampled(10)  # each of both
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", [name for name, entry in ENTRY_POINTS.items() if entry.eigh])
def test_sides_of_one_size_are_decomposed_by_one_call(name, platform):
    """Four sides, of which two have one size; one tridiagonal matrix of a Lanczos iteration."""
    called = _CALL.findall(module(*entry_of(name), platforms=[platform]))
    assert called == [EIGH[platform]] * ENTRY_POINTS[name].eigh


@pytest.mark.default(1, slow=1)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", [name for name, entry in ENTRY_POINTS.items() if entry.cholesky])
def test_inverses_are_one_cholesky_decomposition_of_each_side_and_two_solves(name, platform):
    text, number = module(*entry_of(name), platforms=[platform]), ENTRY_POINTS[name].cholesky
    called = Counter(_CALL.findall(text))
    solves = called.pop(TRIANGULAR, 0) + text.count("stablehlo.triangular_solve")
    decomposed = called.pop(CHOLESKY.get(platform), 0) + text.count("stablehlo.cholesky")
    assert (decomposed, solves) == (number, 2 * number) and not called


def public():
    """``{name: callable}`` as users write it, after ``jk.``."""
    rooms = {"lslora.": jk.lslora, "nf4.": jk.nf4, "operators.": jk.operators, "": jk}
    found: dict = {}  # a function that has two names counts under the longer one
    for room, module in rooms.items():
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not is_value(value) and value not in found.values():
                found[room + name] = value
    return found


def is_value(found):
    """A class that only holds something, or names it."""
    if not inspect.isclass(found):
        return not inspect.isfunction(found)  # an alias of types
    holds = issubclass(found, BaseException | tuple | Mapping) or dataclasses.is_dataclass(found)
    # issubclass would ask every protocol that any test module has defined.
    return holds or inspect.isabstract(found) or Protocol in found.__mro__


def test_every_public_function_is_exported_or_has_a_reason_not_to_be():
    exported = {name.split(", ")[0] for name in ENTRY_POINTS}
    assert not exported & NOT_EXPORTED.keys()
    assert public().keys() == exported - {"Objective", "LongSum"} | NOT_EXPORTED.keys()
