"""Measurements for the analysis of a 7B model with K-FAC factors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxkfac as jk
from benchmarks._documents import _layouts as layouts
from benchmarks._documents._bytes import (
    GB,
    MIB,
    compiled,
    new_arrays,
    resident,
    storages,
    tree_bytes,
)
from benchmarks._documents._claim import Context, Measured
from benchmarks._documents._problems import (
    GELU_OBJECTIVE,
    LOSS,
    OBJECTIVE,
    ROWS,
    WIDTH,
    batch,
    jax_batch,
    network,
    parameters,
)
from torch_ref import unfixed

LAYOUT = "llama-7b"
BUDGET = {"parameters": 14, "optimizer": 28, "factors": 30, "activations": 10, "graph": 5}  # GB
VOCABULARY = 151_936  # rows of a common vocabulary of 7B models
ORIGIN_OF_43_GB = (
    f"a bfloat16 factor of side {VOCABULARY:,}, a common size of a vocabulary, takes "
    f"{2 * VOCABULARY**2 / 2**30:.3f} GiB. `max_dense` (16,384 by default) keeps such a side as a "
    f"diagonal, of {4 * VOCABULARY / 10**6:.1f} MB in float32."
)
SIDE = 2048  # of the matrix that is decomposed to count the solver's scratch
FACTOR = 1024  # of the one that is converted and sent


def collecting(
    device: str, *, dtype: torch.dtype = torch.float32, gelu: bool = False, **fixes: bool
) -> Any:
    """The document's pass; with every fault unless its remedy is named."""
    model = network(device, between=nn.GELU if gelu else nn.Tanh).to(dtype)
    x, y = batch(device)
    options = {"retain_graph": True, "to_host": False, "cleanup": False, **fixes}
    return lambda: unfixed.collect(model, LOSS, (x.to(dtype), y), **options)


def factors_on_device(context: Context) -> Measured:
    """Of a bfloat16 model: what a factor's copy on the host is not."""

    def held(*, to_host: bool) -> float:
        factors = collecting(context.device, dtype=torch.bfloat16, to_host=to_host)()
        made_there = [x for f in factors.values() for x in (f.a, f.g) if x.dtype == torch.bfloat16]
        return sum(x.numel() * x.element_size() for x in made_there) / MIB

    return Measured(held(to_host=False), held(to_host=True), "MiB")


def jax_factors_on_device(context: Context) -> Measured:
    params, data = parameters(), jax_batch()
    whole = jax.jit(jk.value_grad_and_factors(OBJECTIVE)).lower(params, data).compile()
    one_layer = 3 * 4 * (WIDTH + 1) ** 2  # A with its ones column, what it is made of, and G
    within = jk.value_grad_and_factors(OBJECTIVE, max_factor_bytes=one_layer)
    passes = [lowered.compile() for _, lowered in within.lower(params, data)]
    rest = tree_bytes(params) / MIB  # the gradient, an output of the first
    made = lambda program: program.memory_analysis().output_size_in_bytes / MIB
    return Measured(made(whole) - rest, max(map(made, passes[1:])), "MiB")


def retained(context: Context) -> Measured:
    work = [collecting(context.device, retain_graph=keep, gelu=True) for keep in (True, False)]
    return Measured(*(storages(one, context.device).peak for one in work), "MiB")


def jax_retained(context: Context | None = None, *, gelu: bool = True) -> Measured:
    """A program that returns every layer's input and output gradient, against the taps."""
    params, (x, y) = parameters(), jax_batch()
    between = jax.nn.gelu if gelu else jnp.tanh

    def loss(params: Any, shifts: Any, x: jax.Array) -> Any:
        inputs = {}
        for name in params:
            inputs[name] = x
            x = x @ params[name]["kernel"] + params[name]["bias"] + shifts[name]
            x = x if name == max(params) else between(x)
        return OBJECTIVE.loss(x, y, None)[0], inputs

    shifts = {name: jnp.zeros((ROWS, WIDTH)) for name in params}
    kept = compiled(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), params, shifts, x)
    stats = jk.value_grad_and_factors(GELU_OBJECTIVE if gelu else OBJECTIVE)
    factors = tree_bytes(stats.factor_shapes(params, (x, y))) / MIB  # formed of them afterwards
    return Measured(kept + factors, compiled(stats, params, (x, y)), "MiB")


def converted_first(context: Context) -> Measured:
    """Bytes that are made where the factor is before any of it is sent."""
    if context.device == "cuda":
        factors = collecting("cuda", dtype=torch.bfloat16, retain_graph=False)()
        both = lambda first: unfixed.host_eigenvalues(factors, move_first=first)
        peaks = (storages(lambda f=first: both(f), "cuda").peak for first in (False, True))
        return Measured(*peaks, "MiB")
    factor = torch.ones(FACTOR, FACTOR, dtype=torch.bfloat16)
    before = storages(factor.float, context.device).left
    return Measured(before, storages(factor.cpu, context.device).left, "MiB")


def jax_converted_first(context: Context) -> Measured:
    factor = jnp.ones((FACTOR, FACTOR), jnp.bfloat16)
    orders = (
        lambda: np.asarray(held.append(factor.astype(jnp.float32)) or held[-1]),
        lambda: np.asarray(factor).astype(np.float32),
    )
    held: list[jax.Array] = []  # keeps what would be there until it has been sent
    return Measured(*map(new_arrays, orders), "MiB")


def cleanup(context: Context) -> Measured:
    work = [collecting(context.device, retain_graph=False, cleanup=done) for done in (False, True)]
    return Measured(*(storages(one, context.device).left for one in work), "MiB")


def cache_in_loop(context: Context) -> Measured:
    """Bytes of tensors, with the cache emptied at every eighth layer and without."""
    work = [collecting(context.device, retain_graph=False) for _ in range(2)]
    with_it = storages(work[0], context.device).peak
    empty, torch.cuda.empty_cache = torch.cuda.empty_cache, lambda: None
    try:
        return Measured(with_it, storages(work[1], context.device).peak, "MiB")
    finally:
        torch.cuda.empty_cache = empty


def workspace(context: Context) -> Measured:
    """What a decomposition takes beyond its input, for a side of 10,000."""
    matrix = torch.eye(SIDE, device=context.device) + 1e-3
    if context.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.linalg.eigh(matrix)
        taken = (torch.cuda.max_memory_allocated() - before) / MIB
    else:
        taken = resident(lambda: torch.linalg.eigh(matrix))
    return Measured(_at_ten_thousand(taken), unit="GB")


def jax_workspace(context: Context) -> Measured:
    matrix = jnp.eye(SIDE) + 1e-3
    program = jax.jit(jnp.linalg.eigh).lower(matrix).compile()
    return Measured(_at_ten_thousand(resident(lambda: program(matrix))), unit="GB")


def _at_ten_thousand(mib: float) -> float:
    return mib * MIB * (10_000 / SIDE) ** 2 / GB


def largest_workspace() -> float:
    """Three float32 matrices of the largest factor's side, in GB."""
    return 3 * 4 * layouts.largest_side(LAYOUT) ** 2 / GB


def guarded(context: Context) -> Measured:
    """Layers that are decomposed without the guard, and with one that finds too little free."""
    factors = collecting("cpu", retain_graph=False)()
    needed = lambda rows: 3 * 4 * rows**2
    found = [
        unfixed.host_eigenvalues(factors, move_first=True, required_bytes=needed, free_bytes=free)
        for free in (1 << 40, needed(WIDTH))
    ]
    return Measured(*(float(len(layers)) for layers in found), "layers")


def jax_guarded(context: Context) -> Measured:
    """Layers with bases, decomposed where they are, and on the host for want of memory."""
    params, data = parameters(), jax_batch()
    factors = jk.value_grad_and_factors(OBJECTIVE)(params, data).factors
    found = [jk.eigendecompose(factors, placement=place) for place in ("device", "host")]
    return Measured(*(float(len(list(bases))) for bases in found), "layers")


def bfloat16_storage(context: Context) -> Measured:
    found = [
        collecting(context.device, dtype=dtype, retain_graph=False)()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    size = lambda factors: sum(
        x.numel() * x.element_size() for f in factors.values() for x in (f.a, f.g)
    )
    return Measured(*(size(factors) / MIB for factors in found), "MiB")


def jax_bfloat16_storage(context: Context) -> Measured:
    like = jk.value_grad_and_factors(OBJECTIVE).factor_shapes(parameters(), jax_batch())
    held = lambda dtype: sum(x.size * np.dtype(dtype).itemsize for x in jax.tree.leaves(like))
    return Measured(held(np.float32) / MIB, held(jnp.bfloat16) / MIB, "MiB")


def freed() -> float:
    """Factors in bfloat16 and gradients of the layout, and the document's own 5 GB of graph."""
    factors = layouts.factor_gb(LAYOUT, bytes_each=2)
    return factors + layouts.parameter_gb(LAYOUT) + BUDGET["graph"]


def sides_of(low: float, high: float) -> str:
    """Sides of the largest factor whose float32 copy has so many GB."""
    ends = (int((gb * GB / 4) ** 0.5) for gb in (low, high))
    return "where the largest factor has a side of {:,} to {:,}".format(*ends)
