"""Bytes of programs in both frameworks, without a clock and, but for one function, a heap."""

import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxkfac.memory import track
from torch_ref.memory import track_storages

MIB, GB = 2**20, 10**9


class Storages(NamedTuple):
    """What the storages that a program makes come to.

    Attributes:
        peak: The most at once, in MiB.
        left: Alive when the program has returned, its result among them, in MiB.
        calls: How often each operation ran.
    """

    peak: float
    left: float
    calls: Counter[str]


def storages(work: Callable[[], Any], device: str = "cpu") -> Storages:
    """Count PyTorch's storages on a device while a program runs."""
    _warm_up()
    gc.collect()
    gc.disable()  # what only the collector would free is held, always
    try:
        with track_storages(device) as seen:
            out = work()
            left = seen.live_bytes
        del out
    finally:
        gc.enable()
    return Storages(seen.peak_bytes / MIB, left / MIB, seen.calls)


@functools.cache
def _warm_up() -> None:
    """A process's first counted backward pass leaves cycles, which hold what is none of them."""
    with track_storages():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.zeros(2).long()).backward()
    gc.collect()


def new_arrays(work: Callable[[], Any]) -> float:
    """Bytes of JAX arrays that are alive when ``work`` has returned and were not before, in MiB."""
    before = {x.unsafe_buffer_pointer() for x in jax.live_arrays()}
    out = work()
    after = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}
    made = sum(nbytes for place, nbytes in after.items() if place not in before) / MIB
    del out
    return made


def compiled(function: Callable[..., Any], *arguments: Any, outputs: bool = True) -> float:
    """Temporaries, and outputs that reuse no argument, of a compiled program, in MiB."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return of_program(jitted.lower(*arguments).compile(), outputs=outputs)


def of_program(program: Any, *, outputs: bool = True) -> float:
    """The same of what has been compiled."""
    memory = program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes if outputs else 0
    return (memory.temp_size_in_bytes + made) / MIB


def tree_bytes(tree: Any) -> int:
    """Of all arrays, or shapes of arrays, in a tree."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def parameter_bytes(model: torch.nn.Module) -> int:
    """Of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def resident(work: Callable[[], Any]) -> float:
    """Peak of resident memory beyond what was there, in MiB; for a process of its own."""
    with track("run") as stage:
        out = jax.block_until_ready(work())
    del out
    if stage.resident_peak is None or stage.resident_before is None:
        raise RuntimeError("this system does not say how much memory a process uses")
    return max(stage.resident_peak.nbytes - stage.resident_before, 0) / MIB
