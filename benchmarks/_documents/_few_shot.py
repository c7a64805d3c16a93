"""Measurements for few-shot training with accumulated gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch

import jaxkfac as jk
from benchmarks._documents._bytes import MIB, of_program, storages, tree_bytes
from benchmarks._documents._claim import Context, Measured
from benchmarks._documents._problems import (
    DEPTH,
    LOSS,
    OBJECTIVE,
    ROWS,
    batch,
    interleaved,
    jax_batch,
    network,
    parameters,
)
from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training

STEPS = 16  # batches of one training


def training(
    device: str,
    *,
    every: int = 1,
    rows: int = ROWS,
    steps: int = STEPS,
    depth: int = DEPTH,
    **options: Any,
) -> Any:
    """The document's loop over batches of one size."""
    model, data = network(device, depth=depth), batch(device, rows=rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> torch.nn.Module:
        unfixed.train(model, optimizer, LOSS, [data] * steps, every=every, **options)
        return model

    return run


def accumulated(every: int) -> Any:
    """Peak of the documented loop, whose batches stay as they are."""

    def measure(context: Context) -> Measured:
        peaks = [
            storages(training(context.device, every=n), context.device).peak for n in (1, every)
        ]
        return Measured(*peaks, "MiB")

    return measure


def step_program(every: int, *, rows: int = ROWS) -> Any:
    """A compiled, donated step of the JAX counterpart."""
    tx = optax.adam(1e-3)
    tx = tx if every == 1 else jk.multi_steps(tx, every_k_schedule=every)

    def step(params: Any, state: Any, data: Any) -> Any:
        grads = jax.grad(OBJECTIVE)(params, data)
        terms = {} if every == 1 else {"terms": rows}
        updates, state = tx.update(grads, state, params, **terms)
        return optax.apply_updates(params, updates), state

    params = parameters()
    arguments = params, tx.init(params), jax_batch(rows=rows)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments


def jax_accumulated(every: int) -> Any:
    """Arguments and temporaries of a step: its accumulator is an argument."""

    def measure(context: Context) -> Measured:
        sizes = []
        for n in (1, every):
            program, arguments = step_program(n)
            sizes.append(of_program(program) + tree_bytes(arguments) / MIB)
        return Measured(*sizes, "MiB")

    return measure


def backward(context: Context) -> Measured:
    """Peak of one backward pass, of the loss and of a quarter of it."""
    model, data = network(context.device), batch(context.device)

    def run(scale: float) -> None:
        model.zero_grad(set_to_none=True)
        (LOSS(model, data) * scale).backward()

    peaks = [storages(lambda s=s: run(s), context.device).peak for s in (1.0, 0.25)]
    return Measured(*peaks, "MiB")


def jax_backward(context: Context) -> Measured:
    scaled = lambda s: jax.jit(jax.grad(lambda p, d: s * OBJECTIVE(p, d)))
    lower = lambda s: scaled(s).lower(parameters(), jax_batch()).compile()
    return Measured(of_program(lower(1.0)), of_program(lower(0.25)), "MiB")


def optimizer_state(context: Context) -> Measured:
    sizes = []
    for every in (1, 4):
        model = network(context.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        data = [batch(context.device)] * STEPS
        unfixed.train(model, optimizer, LOSS, data, every=every)
        held = [x for state in optimizer.state.values() for x in state.values()]
        sizes.append(sum(x.numel() * x.element_size() for x in held) / MIB)
    return Measured(*sizes, "MiB")


def jax_optimizer_state(context: Context) -> Measured:
    plain, accumulating = (
        jax.eval_shape(tx.init, parameters())
        for tx in (optax.adam(1e-3), jk.multi_steps(optax.adam(1e-3), every_k_schedule=4))
    )
    return Measured(tree_bytes(plain) / MIB, tree_bytes(accumulating) / MIB, "MiB")


def speed(context: Context) -> Measured:
    one = training(context.device)
    four = training(context.device, every=4, clear_cache_every=40)
    first, second = interleaved(one, four, runs=11)
    return Measured(1e3 * first / STEPS, 1e3 * second / STEPS, "ms a batch")


def jax_speed(context: Context) -> Measured:
    def running(every: int) -> Any:
        program, (params, state, data) = step_program(every)

        def run() -> None:
            nonlocal params, state
            for _ in range(STEPS):
                params, state = program(params, state, data)
            jax.block_until_ready(params)

        return run

    first, second = interleaved(running(1), running(4), runs=11)
    return Measured(1e3 * first / STEPS, 1e3 * second / STEPS, "ms a batch")


def equal_parts(x: Any, y: Any) -> list[Any]:
    """Four parts of a batch."""
    size = ROWS // 4
    return [(x[i : i + size], y[i : i + size]) for i in range(0, ROWS, size)]


def equivalence(context: Context) -> Measured:
    """Relative distance of the first update from the large batch's, of two loops.

    They are the documented one, whose counter begins at one here, and that of ``torch_ref``.
    """
    x, y = batch(context.device)
    parts = equal_parts(x, y)

    def update(run: Any) -> torch.Tensor:
        model = network(context.device)
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start

    def shown(model: Any, optimizer: Any) -> None:
        unfixed.train(model, optimizer, LOSS, parts, every=4, first=1)

    def counted(model: Any, optimizer: Any) -> None:
        terms = lambda part: len(part[1])
        list(accumulated_training(model, optimizer, LOSS, parts, every=4, loss_terms=terms))

    def large(model: Any, optimizer: Any) -> None:
        LOSS(model, (x, y)).backward()
        optimizer.step()

    expected = update(large)
    off = (float((update(run) - expected).norm() / expected.norm()) for run in (shown, counted))
    return Measured(*off, "relative")


def jax_equivalence(context: Context) -> Measured:
    """The same distances for ``optax.MultiSteps`` and ``jk.multi_steps``."""
    x, y = jax_batch()
    parts = equal_parts(x, y)
    params = parameters()
    expected = jax.tree.map(lambda g: -0.1 * g, jax.grad(OBJECTIVE)(params, (x, y)))

    def update(tx: Any, **terms: Any) -> Any:
        state = tx.init(params)
        for part in parts:
            grads = jax.grad(OBJECTIVE)(params, part)
            given = {name: len(part[1]) for name in terms}
            updates, state = tx.update(grads, state, params, **given)
        return updates

    def off(found: Any) -> float:
        difference = optax.tree.norm(optax.tree.sub(found, expected))
        return float(difference / optax.tree.norm(expected))

    plain = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=4)
    counted = jk.multi_steps(optax.sgd(0.1), every_k_schedule=4)
    return Measured(off(update(plain)), off(update(counted, terms=True)), "relative")


def default(context: Context) -> Measured:
    """Parameters that differ between accumulation over one batch and a plain loop."""
    model = training(context.device, every=1, steps=4, zero_grad=True)()
    plain, data = network(context.device), batch(context.device)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        LOSS(plain, data).backward()
        optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return Measured(float(sum(int((a != b).sum()) for a, b in pairs)), unit="parameters")


def jax_default(context: Context) -> Measured:
    found = []
    for tx in (optax.adam(1e-3), jk.multi_steps(optax.adam(1e-3), every_k_schedule=1)):
        params, data = parameters(), jax_batch()
        state = tx.init(params)
        for _ in range(4):
            grads = jax.grad(OBJECTIVE)(params, data)
            terms = {"terms": ROWS} if isinstance(state, jk.optim.MultiStepsState) else {}
            updates, state = tx.update(grads, state, params, **terms)
            params = optax.apply_updates(params, updates)
        found.append(params)
    differ = jax.tree.map(lambda a, b: jnp.abs(a - b).max() > 1e-6, *found)  # fused otherwise
    return Measured(float(sum(map(int, jax.tree.leaves(differ)))), unit="arrays")


def queries(context: Context) -> Measured:
    """Peak with 16 queries a class, and with 8; five classes and five shots."""
    peaks = [
        storages(training(context.device, every=1, rows=5 * (5 + n), steps=1), context.device).peak
        for n in (160, 80)
    ]
    return Measured(*peaks, "MiB")


def jax_queries(context: Context) -> Measured:
    sizes = [of_program(step_program(1, rows=5 * (5 + n))[0]) for n in (160, 80)]
    return Measured(*sizes, "MiB")


def smaller(context: Context) -> Measured:
    peaks = [
        storages(training(context.device, depth=depth, steps=1), context.device).peak
        for depth in (DEPTH, DEPTH // 2)
    ]
    return Measured(*peaks, "MiB")


def jax_smaller(context: Context) -> Measured:
    gradient = jax.jit(jax.grad(OBJECTIVE))
    sizes = (
        of_program(gradient.lower(parameters(depth=depth), jax_batch()).compile())
        for depth in (DEPTH, DEPTH // 2)
    )
    return Measured(*sizes, "MiB")


def episodes(context: Context) -> Measured:
    peaks = [
        storages(training(context.device, every=1, steps=n), context.device).peak for n in (16, 8)
    ]
    return Measured(*peaks, "MiB")


def _reserved(context: Context) -> Measured:
    """By the caching allocator after a training, without and with clearing it."""
    sizes = []
    for clear in (None, 40):
        torch.cuda.empty_cache()
        training("cuda", every=4, steps=81, clear_cache_every=clear)()
        sizes.append(torch.cuda.memory_reserved() / MIB)
    return Measured(*sizes, "MiB reserved")


def _fragmented(context: Context) -> Measured:
    """Reserved and not allocated, with fixed segments and with expandable ones."""
    from benchmarks._documents._allocator import reserved_beyond_allocated

    sides = (reserved_beyond_allocated(expandable=value) for value in (False, True))
    return Measured(*sides, "MiB")
