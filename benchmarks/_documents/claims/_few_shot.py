"""What the document on few-shot training with accumulated gradients claims."""

from benchmarks._documents._claim import Claim, Holds
from benchmarks._documents._few_shot import (
    _fragmented,
    _reserved,
    accumulated,
    backward,
    default,
    episodes,
    equivalence,
    jax_accumulated,
    jax_backward,
    jax_default,
    jax_equivalence,
    jax_optimizer_state,
    jax_queries,
    jax_smaller,
    jax_speed,
    optimizer_state,
    queries,
    smaller,
    speed,
)
from benchmarks._documents._rules import Agrees, Lies, OnGPU, Saves, Slows, Unchanged


def queries_before(shots: int) -> int:
    """The fewest queries a class that 8 in their place leave three tenths of what was held.

    Four fifths of the claimed 87.5 % are then taken away, by which the rule calls it true.
    """
    return -(-10 * (shots + 8) // 3) - shots


CLAIMS = (
    Claim(
        "few-shot/accumulate-4",
        "Accumulating over 4 steps takes away 75 % of the memory.",
        Saves(0.75),
        "false",
        "The loop keeps its batch, and the document's own forward pass takes 5.1 GB before and "
        "after, so nothing becomes smaller. In JAX, the sums take memory too.",
        accumulated(4),
        jax_accumulated(4),
        remark="cutting one batch into parts does save memory: see the lessons.",
    ),
    Claim(
        "few-shot/accumulate-8",
        "Accumulating over 8 steps with 8 queries a class takes away 87.5 %.",
        Saves(0.875),
        "not decidable",
        "The numbers are those of the 8 steps alone, which take nothing away. Fewer queries do, "
        "but the document says neither how many there were before nor how many shots. What is held "
        "shrinks at most as shots and queries together do.",
        accumulated(8),
        jax_accumulated(8),
        holds=lambda context: Holds(
            f"only if there were at least {queries_before(1)} queries a class beside one shot, "
            f"{queries_before(5)} beside five"
        ),
    ),
    Claim(
        "few-shot/memory-50-90",
        "Memory falls by 50 to 90 %, depending on the number of steps.",
        Saves(0.5),
        "false",
        "Measured over 16 steps; see the rows above.",
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
        "Training with accumulation is at most 5 % slower, for clearing the cache.",
        OnGPU(Slows(0.05)),
        "needs a GPU",
        "Only a GPU has a cache to clear; the passes are the same, with fewer optimizer steps. "
        "`jk.multi_steps` adds sums up in a program that is as short as the plain one.",
        speed,
        jax_speed,
        alone=True,
    ),
    Claim(
        "few-shot/equivalent",
        "The update is mathematically that of the larger batch.",
        Agrees(1e-5),
        "true",
        "Four equal parts, counted from one, are compared with one batch of all their rows. After: "
        "`torch_ref`'s loop. JAX: `optax.MultiSteps` and `jk.multi_steps`, around SGD.",
        equivalence,
        jax_equivalence,
        remark="parts of unequal size weigh alike in this loop. `jk.multi_steps` weighs them by "
        "their counts, and `optax.MultiSteps` around K-FAC is wrong with equal parts too.",
    ),
    Claim(
        "few-shot/default",
        "Accumulation over one step is training as before.",
        Lies(0, 0),
        "true",
        "No parameters differ from a plain loop's. JAX: arrays, by more than 1e-6.",
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
        "few-shot/smaller-model",
        "A smaller backbone takes less memory.",
        Saves(0.3),
        "true",
        "The smaller backbone has half the layers.",
        smaller,
        jax_smaller,
    ),
    Claim(
        "few-shot/clear-cache",
        "Clearing the cache every 40 steps gives 1.2 GB back.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "Only a GPU's caching allocator keeps freed blocks; tensors are the same with and without.",
        _reserved,
        "does not arise: a compiled program's temporaries are planned once",
    ),
    Claim(
        "few-shot/expandable-segments",
        "Expandable segments reduce fragmentation.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "Reserved but not allocated, after tensors of growing sizes.",
        _fragmented,
        "`XLA_PYTHON_CLIENT_ALLOCATOR=vmm` or `cuda_async`; `jaxkfac doctor` says which is on",
    ),
)
