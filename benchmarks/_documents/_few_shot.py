"""Claims of few-shot training with accumulated gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch

import jaxkfac as jk
from benchmarks._documents._bytes import MIB, of_program, storages, tree_bytes
from benchmarks._documents._claim import Claim, Context, Measured
from benchmarks._documents._problems import (
    LOSS,
    OBJECTIVE,
    ROWS,
    batch,
    interleaved,
    jax_batch,
    network,
    parameters,
)
from benchmarks._documents._rules import Agrees, Lies, OnGPU, Saves, Slows, Unchanged
from torch_ref import unfixed

STEPS = 16  # batches of one training


def training(device: str, *, every: int, rows: int = ROWS, steps: int = STEPS, **options: Any):
    """The document's loop over batches of one size."""
    model, data = network(device), batch(device, rows=rows)
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
    one, four = (training(context.device, every=n) for n in (1, 4))
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


def equivalence(context: Context) -> Measured:
    """First update, against that of one batch four times as large; as shown, and put right."""
    x, y = batch(context.device)
    parts = [(x[i::4], y[i::4]) for i in range(4)]

    def update(run: Any) -> torch.Tensor:
        model = network(context.device)
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start

    def shown(model: Any, optimizer: Any) -> None:
        unfixed.train(model, optimizer, LOSS, parts, every=4)

    def large(model: Any, optimizer: Any) -> None:
        LOSS(model, (x, y)).backward()
        optimizer.step()

    expected, found = update(large), update(shown)
    return Measured(float((found - expected).norm() / expected.norm()), unit="relative")


def jax_equivalence(context: Context) -> Measured:
    """``optax.MultiSteps`` and ``jk.multi_steps``, on parts of unequal numbers of terms."""
    x, y = jax_batch()
    cuts = [0, 100, 300, 600, ROWS]
    parts = [(x[a:b], y[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
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


def first_step(context: Context) -> Measured:
    """Micro-batches in the loop's first group."""
    model, steps = network(context.device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0

    def loss(model: Any, data: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return LOSS(model, data)

    optimizer.register_step_post_hook(lambda *_: steps.append(seen))
    unfixed.train(model, optimizer, loss, [batch(context.device, rows=8)] * 9, every=4)
    return Measured(float(steps[0]), float(steps[1] - steps[0]), "micro-batches")


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
    return Measured(float(sum(int((a != b).sum()) for a, b in pairs)), 0.0, "parameters")


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
    differ = jax.tree.map(lambda a, b: jnp.abs(a - b).max() > 1e-6, *found)
    return Measured(float(sum(map(int, jax.tree.leaves(differ)))), 0.0, "arrays")


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


def episodes(context: Context) -> Measured:
    peaks = [
        storages(training(context.device, every=1, steps=n), context.device).peak for n in (16, 8)
    ]
    return Measured(*peaks, "MiB")


def _needs(context: Context) -> Measured:
    """Reserved by the caching allocator after a training, with and without what is claimed."""
    sizes = []
    for clear in (None, 10):
        torch.cuda.empty_cache()
        training("cuda", every=4, steps=40, clear_cache_every=clear)()
        sizes.append(torch.cuda.memory_reserved() / MIB)
    return Measured(*sizes, "MiB reserved")


def _fragmented(context: Context) -> Measured:
    """Reserved and not allocated, with fixed segments and with expandable ones."""
    from benchmarks._documents._allocator import reserved_beyond_allocated

    sides = (reserved_beyond_allocated(expandable=value) for value in (False, True))
    return Measured(*sides, "MiB")


CLAIMS = (
    Claim(
        "few-shot/accumulate-4",
        "Accumulating over 4 steps takes away 75 % of the memory.",
        Saves(0.75),
        "false",
        "The loop keeps its batch and adds gradients that outlive the step; nothing becomes "
        "smaller. Cutting one batch into parts does save, and is this project's own lesson.",
        accumulated(4),
        jax_accumulated(4),
    ),
    Claim(
        "few-shot/accumulate-8",
        "Accumulating over 8 steps takes away 87.5 %.",
        Saves(0.875),
        "false",
        "The same as over 4 steps: only how often the optimizer steps has changed.",
        accumulated(8),
        jax_accumulated(8),
    ),
    Claim(
        "few-shot/memory-50-90",
        "Memory falls by 50 to 90 %, depending on the number of steps.",
        Saves(0.5),
        "false",
        "Over 16 steps; see the two rows above.",
        accumulated(16),
        jax_accumulated(16),
    ),
    Claim(
        "few-shot/gpu-table",
        "With 4 to 8 steps a GPU of 8 GB trains what needs 16 GB with one.",
        Saves(0.5),
        "false",
        "The table would follow from the rows above.",
        accumulated(8),
        jax_accumulated(8),
    ),
    Claim(
        "few-shot/backward",
        "The divided loss makes the backward pass smaller: 7.8 to 6.5 GB.",
        Saves(1.3 / 7.8),
        "false",
        "A number times the loss has no part in what is held.",
        backward,
        jax_backward,
    ),
    Claim(
        "few-shot/activations",
        "The peak of activations stays as it is.",
        Unchanged(0.02),
        "true",
        "One forward and backward pass of the divided loss holds what that of the whole one does.",
        backward,
        jax_backward,
    ),
    Claim(
        "few-shot/optimizer-state",
        "Accumulation makes optimizer state and gradients smaller.",
        Saves(0.1),
        "false",
        "Adam keeps two numbers a parameter however often it steps; in JAX the accumulator is one "
        "more copy of the gradient, in state.",
        optimizer_state,
        jax_optimizer_state,
    ),
    Claim(
        "few-shot/speed",
        "Training is at most 5 % slower.",
        Slows(0.05),
        "true",
        "The same passes and fewer optimizer steps.",
        speed,
        jax_speed,
        alone=True,
    ),
    Claim(
        "few-shot/equivalent",
        "The update is mathematically that of the larger batch.",
        Agrees(1e-5),
        "false",
        "The loop steps at step 0, so that its first group is one quarter of a gradient; JAX: "
        "parts of unequal size by optax.MultiSteps, and by jk.multi_steps.",
        equivalence,
        jax_equivalence,
    ),
    Claim(
        "few-shot/first-group",
        "A step is made every 4 batches.",
        Lies(4, 4),
        "false",
        "Zero is divisible by every number: the first group has one batch, the next four.",
        first_step,
        "`jk.multi_steps` counts micro-batches from one",
    ),
    Claim(
        "few-shot/default",
        "Accumulation over one step is training as before.",
        Unchanged(),
        "true",
        "Bit for bit.",
        default,
        jax_default,
    ),
    Claim(
        "few-shot/queries",
        "Half the queries take less memory.",
        Saves(0.2),
        "true",
        "Activations go with the rows of an episode; ten times the document's queries, so that "
        "they are not lost beside parameters and state.",
        queries,
        jax_queries,
    ),
    Claim(
        "few-shot/episodes",
        "Fewer episodes an epoch take less memory.",
        Saves(0.1),
        "false",
        "One episode is in memory at a time.",
        episodes,
        "does not arise: a step holds one batch",
    ),
    Claim(
        "few-shot/clear-cache",
        "Clearing the cache every 40 steps gives 1.2 GB back.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "Only a GPU's caching allocator keeps freed blocks; tensors are the same with and without.",
        _needs,
        "does not arise: a compiled program's temporaries are planned once",
    ),
    Claim(
        "few-shot/expandable-segments",
        "Expandable segments take away fragmentation.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "Reserved but not allocated, after tensors of growing sizes.",
        _fragmented,
        "`XLA_PYTHON_CLIENT_ALLOCATOR=vmm` or `cuda_async`; `jaxkfac doctor` says which is on",
    ),
)
