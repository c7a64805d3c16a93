"""What is compiled, by name."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from benchmarks.accelerators._others import others
from benchmarks.accelerators._programs import SIZES, Steps
from jaxkfac.factors import FISHER_TYPES

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def steps_of(size: str, dtype: str, layout: str) -> Mapping[str, Callable[[], Any]]:
    """``{name: () to (function, shapes of its arguments)}``."""
    if size == "others":
        return others(DTYPES[dtype])
    return (decoder_steps if layout == "one device" else sharded_steps)(size, DTYPES[dtype])


def decoder_steps(size: str, dtype: Any) -> Mapping[str, Callable[[], Any]]:
    """``{name: () to (function, shapes of its arguments)}``; the gradient comes first."""
    s = Steps(SIZES[size], dtype)
    out: dict[str, Callable[[], Any]] = {"gradient": s.gradient}
    for fisher in FISHER_TYPES:
        out[f"factors, {fisher}"] = functools.partial(s.factors, fisher=fisher)
    return out | {
        "factors, empirical, reduce": lambda: s.factors(sharing="reduce"),
        "factors, mc, reduce": lambda: s.factors(fisher="mc", sharing="reduce"),
        "factors, a quarter of the rows": lambda: s.factors(subsample=0.25),
        "factors, at every fourth step": s.every_fourth,
        "EKFAC pass": s.ekfac,
        "decomposition": s.decomposition,
        "natural gradient": s.natural_gradient,
        "K-FAC step": s.kfac,
        "training, SGD with momentum": s.sgd,
        "training, K-FAC, exact": functools.partial(s.training, packed=False),
        "training, K-FAC, exact, packed": functools.partial(s.training, packed=True),
        "training, K-FAC, pi": functools.partial(s.training, packed=False, damping_mode="pi"),
        "training, K-FAC, pi, packed": functools.partial(
            s.training, packed=True, damping_mode="pi"
        ),
        "training, K-FAC, exact, packed, in 4 turns": functools.partial(
            s.training, packed=True, collect=4
        ),
        "training, K-FAC, pi, packed, in 4 turns": functools.partial(
            s.training, packed=True, collect=4, damping_mode="pi"
        ),
        "adapters, factors": s.adapters,
        "adapters on NF4, factors": lambda: s.adapters(quantised=True),
        "library's decoder, gradient": lambda: s.decoder_step(factors=False),
        "library's decoder, factors": lambda: s.decoder_step(factors=True),
        "generation": s.generation,
        "budget of a quarter, first pass": lambda: s.budgeted(0),
        "budget of a quarter, last pass": lambda: s.budgeted(-1),
    }


def sharded_steps(size: str, dtype: Any) -> Mapping[str, Callable[[], Any]]:
    """Those of ``decoder_steps`` that are compiled for several devices, too."""
    s = Steps(SIZES[size], dtype)
    return {
        "gradient": s.gradient,
        "factors, empirical": s.factors,
        "natural gradient": s.natural_gradient,
        "K-FAC step": s.kfac,
        "K-FAC step, divided": lambda: s.kfac(divided=True),
    }
