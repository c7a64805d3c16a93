"""What the document on the fine-tuning of FLAN-T5-XL claims."""

from benchmarks._documents import _layouts as layouts
from benchmarks._documents._budgets import (
    TOKENS,
    Columns,
    activations,
    at_the_example,
    lengths_that,
    saved,
)
from benchmarks._documents._budgets import total as planned_total
from benchmarks._documents._claim import Claim, Figure, Holds
from benchmarks._documents._flan_t5_xl import (
    LAYOUT,
    OVERHEAD,
    SAVINGS,
    _collected,
    cast_again,
    copies,
    effective_batch,
    half_the_rows,
    jax_cast_again,
    jax_effective_batch,
    jax_half_the_rows,
    jax_loading,
    jax_moved_again,
    jax_old_model,
    jax_padding,
    loading,
    moved_again,
    old_model,
    padding,
    total,
    wasted,
)
from benchmarks._documents._rules import Agrees, Lies, OnGPU, Saves


def needed(columns: Columns) -> float:
    """By PyTorch: the plan's rows and the document's overhead, in GB."""
    return planned_total(columns, leaving_out="accumulation") + OVERHEAD


def needed_by_jax(columns: Columns) -> float:
    """With an accumulator beside the gradients."""
    return planned_total(columns) + OVERHEAD


def left(columns: Columns) -> float:
    return 32 - needed(columns)


def left_by_jax(columns: Columns) -> float:
    return 32 - needed_by_jax(columns)


CLAIMS = (
    Claim(
        "flan-t5-xl/cast-again",
        "Converting a bfloat16 model to bfloat16 again makes a copy: 6 GB.",
        Lies(6, 6),
        "false",
        "A module converts in place and returns itself; a tensor that has the dtype is returned.",
        cast_again,
        jax_cast_again,
    ),
    Claim(
        "flan-t5-xl/move-again",
        "Moving a model to the device that it is on makes another: 6 GB.",
        Lies(6, 6),
        "false",
        "Nothing is made for a tensor that is already there.",
        moved_again,
        jax_moved_again,
    ),
    Claim(
        "flan-t5-xl/three-copies",
        "After loading, converting and moving there are three copies.",
        Lies(3, 3),
        "false",
        "There is one, at every moment.",
        copies,
        "`jk.memory.duplicate_report()` finds arrays that are held twice",
    ),
    Claim(
        "flan-t5-xl/wasted-18gb",
        "The copies waste 18 GB.",
        Lies(18, 18),
        "false",
        "What is made beside the model, as a share of it, for FLAN-T5-XL. Three copies of 5.7 GB "
        "would be 17, of which one is needed.",
        wasted,
        jax_cast_again,
    ),
    Claim(
        "flan-t5-xl/old-model",
        "Deleting the old model after the conversion frees a float32 copy.",
        Saves(0.1),
        "false",
        "Both names are the same object. The float32 tensors are freed one by one, as each is "
        "replaced. In JAX a conversion makes a second tree; `cast_once` converts one leaf at a "
        "time.",
        old_model,
        jax_old_model,
    ),
    Claim(
        "flan-t5-xl/bfloat16",
        "bfloat16 saves 6 GB of parameters.",
        Lies(6, 6),
        "true",
        "2.85 billion parameters take two bytes less each.",
        Figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/load-once",
        "Loading in the target dtype avoids the copy that a later conversion makes.",
        Saves(0.1),
        "true",
        "A model built in float32 and then converted is compared with one built in bfloat16. Both "
        "count the whole file; torch_ref's load_once reads it tensor by tensor. JAX: resident "
        "memory of a larger model, 96 MiB of parameters, by load_safetensors.",
        loading,
        jax_loading,
        alone=True,
    ),
    Claim(
        "flan-t5-xl/collect",
        "Deleting, collecting garbage and emptying the cache frees 1 to 2 GB.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "No tensor is freed by it (see the row on the old model); blocks of the caching allocator "
        "may be.",
        _collected,
        "does not arise: a buffer is freed with its last array",
        remark="the code shown skips these lines for a model that is loaded in bfloat16, as it is "
        "there.",
    ),
    Claim(
        "flan-t5-xl/padding",
        "Padding to the longest of a batch saves 2 to 3 GB beside 8 GB of activations.",
        Saves(2 / 11),
        "not decidable",
        "Activations are proportional to the padded length, so that the share depends on the "
        "lengths alone. Measured with lengths of ours: 8 rows of 20 to 160 tokens, against 256.",
        padding,
        jax_padding,
        holds=lambda context: Holds(
            f"where the longest row of a batch has on average {100 * 8 / 11:.0f} to "
            f"{100 * 8 / 10:.0f} % of the length that rows were padded to"
        ),
    ),
    Claim(
        "flan-t5-xl/recomputation",
        "Recomputing activations saves 3 to 4 GB, about half of them.",
        Lies(3, 4),
        None,
        f"`jaxkfac plan` counts this for {TOKENS} tokens an example. On six small blocks "
        f"recomputation "
        "took away about two thirds of the activations (notebook 07), so half is not too much.",
        Figure(lambda: at_the_example(saved)),
        "the same plan",
        holds=lengths_that(saved, Lies(3, 4)),
    ),
    Claim(
        "flan-t5-xl/total-24gb",
        "All savings together are 24 to 27 GB.",
        Lies(24, 27),
        "partly",
        "This adds the upper ends of the document's own rows, without the two copies that are "
        "never made.",
        total,
        "the plan below",
        needs=tuple(SAVINGS),
    ),
    Claim(
        "flan-t5-xl/parameters-6gb",
        "The model takes 6 GB.",
        Lies(6, 6),
        "true",
        "2.85 billion parameters in bfloat16.",
        Figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the plan's row “parameters”",
    ),
    Claim(
        "flan-t5-xl/gradients-6gb",
        "Gradients take 6 GB.",
        Lies(6, 6),
        "true",
        "There are as many gradients as parameters, in the same dtype.",
        Figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the plan's row “gradients”",
    ),
    Claim(
        "flan-t5-xl/optimizer-6gb",
        "AdamW's state takes 6 GB.",
        Lies(6, 6),
        "partly",
        "AdamW keeps two moments: twice the model in bfloat16, four times in float32. Moments of 8 "
        "bits would take 5.7 GB, but the document names AdamW alone.",
        Figure(lambda: 2 * layouts.parameter_gb(LAYOUT)),
        "the plan's row “optimizer”",
    ),
    Claim(
        "flan-t5-xl/activations-8gb",
        "Activations of 8 examples take 8 GB.",
        Lies(8, 8),
        None,
        f"`jaxkfac plan` counts this for {TOKENS} tokens an example, with every block recomputed.",
        Figure(lambda: at_the_example(activations)),
        "the same plan",
        holds=lengths_that(activations, Lies(8, 8)),
    ),
    Claim(
        "flan-t5-xl/total-28gb",
        "Training takes 28 of 32 GB.",
        Lies(28, 28),
        None,
        "The rows of `jaxkfac plan` without accumulated gradients, and the document's 2 GB of "
        f"overhead, for {TOKENS} tokens an example. JAX: with an accumulator in float32 beside the "
        "gradients; `accumulator_dtype` halves it.",
        Figure(lambda: at_the_example(needed)),
        Figure(lambda: at_the_example(needed_by_jax)),
        holds=lengths_that(needed, Lies(28, 28)),
    ),
    Claim(
        "flan-t5-xl/margin-4gb",
        "4 GB, 12.5 %, are left for the rest.",
        Lies(4, 4),
        None,
        "This is 32 GB minus the row above.",
        Figure(lambda: at_the_example(left)),
        Figure(lambda: at_the_example(left_by_jax)),
        holds=lengths_that(left, Lies(4, 4)),
    ),
    Claim(
        "flan-t5-xl/batch-4",
        "Batches of 4 and 32 accumulated steps take less memory than 8 and 16.",
        Saves(0.3),
        "true",
        "A pass has half the rows, measured on the small network: here the batch does become "
        "smaller.",
        half_the_rows,
        jax_half_the_rows,
    ),
    Claim(
        "flan-t5-xl/effective-128",
        "8 examples times 16 accumulated steps are a batch of 128.",
        Agrees(1e-4),
        "true",
        "Checked with `torch_ref`'s loop, which steps after the sixteenth; the float32 sums "
        "differ in their "
        "order.",
        effective_batch,
        jax_effective_batch,
    ),
    Claim(
        "flan-t5-xl/batches-93750",
        "Six million examples make 93,750 batches of 8 an epoch.",
        Lies(93_750, 93_750),
        "false",
        "They make eight times as many: 750,000 is the number of batches already.",
        Figure(lambda: 6_000_000 / 8, "batches"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/steps-5859",
        "That is 5,859 optimizer steps an epoch, and 29,295 in five.",
        Lies(5_859, 5_859),
        "false",
        "The division is right, but starts from the 93,750 of the row above: 750,000 batches make "
        "eight times as many steps.",
        Figure(lambda: 750_000 / 16, "steps an epoch"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/epoch-5h",
        "An epoch takes 5 to 8 hours at 3 to 5 batches a second.",
        Lies(5, 8),
        "false",
        "The time of 93,750 batches. 750,000 take 42 hours at 5 a second and 69 hours at 3.",
        Figure(lambda: 750_000 / 5 / 3600, "hours"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/training-25h",
        "Five epochs take 25 to 40 hours.",
        Lies(25, 40),
        "false",
        "Five times the row above: the same batches are missing. Computed for 750,000 an epoch, at "
        "5 a second.",
        Figure(lambda: 5 * 750_000 / 5 / 3600, "hours"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/samples-24",
        "3 to 5 batches of 8 are 24 to 40 samples a second.",
        Lies(24, 40),
        "true",
        "Computed for 4 batches a second.",
        Figure(lambda: 4 * 8, "samples/s"),
        "the same arithmetic",
    ),
)
