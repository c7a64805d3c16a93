"""Claims of the fine-tuning of FLAN-T5-XL."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.flax
import safetensors.torch
import torch
from torch import nn

import jaxkfac as jk
from benchmarks._documents import _layouts as layouts
from benchmarks._documents._budgets import planned_gb
from benchmarks._documents._bytes import (
    MIB,
    compiled,
    resident,
    storages,
    tree_bytes,
)
from benchmarks._documents._claim import Claim, Context, Measured
from benchmarks._documents._kfac_7b import figure
from benchmarks._documents._problems import LOSS, OBJECTIVE, batch, jax_batch, network, parameters
from benchmarks._documents._rules import Agrees, Lies, OnGPU, Saves
from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.memory import Recomputed

LAYOUT = "t5-xl"
OVERHEAD = 2  # GB, the document's
SAVINGS = {  # GB
    "flan-t5-xl/cast-again": 6,
    "flan-t5-xl/move-again": 6,
    "flan-t5-xl/bfloat16": 6,
    "flan-t5-xl/padding": 2.5,
    "flan-t5-xl/recomputation": 3.5,
}
TOKENS = 256  # the document gives no length; recipes are about this long


def cast_again(context: Context) -> Measured:
    """Of a model that is bfloat16 already."""
    model = network(context.device).bfloat16()
    made = storages(
        lambda: unfixed.cast_again(model, torch.bfloat16, check=False), context.device
    ).peak
    return Measured(_in_gb(made, model), unit="GB")


def moved_again(context: Context) -> Measured:
    model = network(context.device)
    made = storages(
        lambda: unfixed.move_again(model, context.device, check=False), context.device
    ).peak
    return Measured(_in_gb(made, model), unit="GB")


def _in_gb(mib: float, model: nn.Module) -> float:
    """What it would come to for a bfloat16 copy of FLAN-T5-XL."""
    own = sum(p.numel() * p.element_size() for p in model.parameters()) / MIB
    return mib / own * layouts.parameter_gb(LAYOUT)


def jax_cast_again(context: Context) -> Measured:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters())
    return Measured(_new_bytes(params, jk.cast_once(params, jnp.bfloat16)), unit="GB")


def jax_moved_again(context: Context) -> Measured:
    params = parameters()
    here = jax.tree.leaves(params)[0].sharding
    return Measured(_new_bytes(params, jk.place_once(params, here)), unit="GB")


def _new_bytes(before: Any, after: Any) -> float:
    """Of arrays that are not those of before, scaled to a copy of FLAN-T5-XL."""
    known = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(before)}
    new = [x for x in jax.tree.leaves(after) if x.unsafe_buffer_pointer() not in known]
    return sum(x.nbytes for x in new) / tree_bytes(before) * layouts.parameter_gb(LAYOUT)


def copies(context: Context) -> Measured:
    """Copies of the parameters after load, cast and move, and the most at once."""
    model = network(context.device).bfloat16()

    def again() -> nn.Module:
        cast = unfixed.cast_again(model, torch.bfloat16, check=False)
        return unfixed.move_again(cast, context.device, check=False)

    seen = storages(again, context.device)
    own = sum(p.numel() * p.element_size() for p in model.parameters()) / MIB
    return Measured(1 + seen.peak / own, unit="times the model")


def old_model(context: Context) -> Measured:
    """Bytes freed by deleting the reference to the model before the cast."""
    left = []
    for check in (False, True):
        model = network(context.device)
        cast = lambda m=model, c=check: unfixed.cast_again(m, torch.bfloat16, check=c)
        left.append(storages(cast, context.device).left)
    return Measured(*left, "MiB")


def jax_old_model(context: Context) -> Measured:
    """Bytes alive after a whole cast that keeps its source, and after one leaf by leaf."""
    params = parameters()
    whole = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    kept = tree_bytes(params) + tree_bytes(whole)
    return Measured(kept / MIB, tree_bytes(jk.cast_once(params, jnp.bfloat16)) / MIB, "MiB")


def loading(context: Context) -> Measured:
    """Peak of storages when a float32 file becomes a bfloat16 model."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        safetensors.torch.save_file(network().state_dict(), file)
        load = lambda in_dtype: unfixed.load(network, file, dtype=torch.bfloat16, in_dtype=in_dtype)
        before, after = (storages(lambda x=x: load(x)).peak for x in (False, True))
    return Measured(before, after, "MiB")


def jax_loading(context: Context) -> Measured:
    """Resident memory, as a file that is mapped is in no program."""
    params = parameters(width=2048)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        flat = {f"{n}.{leaf}": x for n, part in params.items() for leaf, x in part.items()}
        safetensors.flax.save_file(flat, file)
        del params, flat
        gc.collect()
        convert = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        before = resident(lambda: convert(safetensors.flax.load_file(file)))
        after = resident(lambda: jk.load_safetensors(file, dtype=jnp.bfloat16))
    return Measured(before, after, "MiB")


def blocks(device: str, *, recompute: bool) -> nn.Module:
    torch.manual_seed(0)
    made = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(6)]
    return nn.Sequential(*(Recomputed(block) if recompute else block for block in made)).to(device)


def gradients_of(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def padding(context: Context) -> Measured:
    """Peak of one step with rows padded to a fixed length, and to the longest of the batch."""
    lengths = np.random.default_rng(0).integers(20, 160, size=8)  # of at most 256
    peaks = []
    for longest in (TOKENS, int(lengths.max())):
        model = blocks(context.device, recompute=False)
        x = torch.randn(8, longest, 64, device=context.device)
        peaks.append(storages(lambda m=model, x=x: gradients_of(m, x), context.device).peak)
    return Measured(*peaks, "MiB")


def recomputation(context: Context) -> Measured:
    peaks = []
    for recompute in (False, True):
        model = blocks(context.device, recompute=recompute)
        x = torch.randn(8, TOKENS, 64, device=context.device)
        peaks.append(storages(lambda m=model, x=x: gradients_of(m, x), context.device).peak)
    return Measured(*peaks, "MiB")


def jax_blocks(*, tokens: int, recompute: bool) -> float:
    """Temporaries of a gradient of six scanned blocks of attention and two dense layers."""

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (x @ w[name] for name in ("q", "k", "v"))
        x = x + jax.nn.softmax(q @ k.mT / 8) @ v
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    body = jax.checkpoint(block) if recompute else block
    shape = lambda *sizes: jax.ShapeDtypeStruct((6, *sizes), jnp.float32)
    params = {name: shape(64, 64) for name in ("q", "k", "v")}
    params |= {"up": shape(64, 256), "down": shape(256, 64)}
    x = jax.ShapeDtypeStruct((8, tokens, 64), jnp.float32)
    loss = lambda params, x: jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)
    return compiled(jax.grad(loss), params, x)


def jax_padding(context: Context) -> Measured:
    longest = int(np.random.default_rng(0).integers(20, 160, size=8).max())
    sizes = (jax_blocks(tokens=n, recompute=False) for n in (TOKENS, longest))
    return Measured(*sizes, "MiB")


def jax_recomputation(context: Context) -> Measured:
    sizes = (jax_blocks(tokens=TOKENS, recompute=r) for r in (False, True))
    return Measured(*sizes, "MiB")


def total(context: Context) -> Measured:
    """What is left of the sum when only the rows that hold are added."""
    held = [gb for name, gb in SAVINGS.items() if context.rows[name].verdict == "true"]
    return Measured(sum(held), unit="GB")


def effective_batch(context: Context) -> Measured:
    """Update of 16 micro-batches of 8, against one batch of 128."""
    x, y = batch(context.device, rows=128)
    found = []
    for every in (1, 16):
        model = network(context.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = list(zip(x.chunk(every), y.chunk(every), strict=True))
        list(accumulated_training(model, optimizer, LOSS, parts, every=every))
        found.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    start = torch.nn.utils.parameters_to_vector(network(context.device).parameters()).detach()
    return Measured(
        float((found[1] - found[0]).norm() / (found[0] - start).norm()), unit="relative"
    )


def jax_effective_batch(context: Context) -> Measured:
    x, y = jax_batch(rows=128)
    params, tx = parameters(), jk.multi_steps(optax.sgd(0.1), every_k_schedule=16)
    state = tx.init(params)
    updates = params
    for i in range(16):
        part = x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]
        updates, state = tx.update(jax.grad(OBJECTIVE)(params, part), state, params, terms=8)
    expected = jax.tree.map(lambda g: -0.1 * g, jax.grad(OBJECTIVE)(params, (x, y)))
    difference = optax.tree.norm(optax.tree.sub(updates, expected))
    return Measured(float(difference / optax.tree.norm(expected)), unit="relative")


def _collected(context: Context) -> Measured:
    """Reserved after a cast, with and without collecting and emptying the cache."""
    sizes = []
    for clean in (False, True):
        torch.cuda.empty_cache()
        model = network("cuda", width=4096)
        unfixed.cast_again(model, torch.bfloat16, check=clean)
        sizes.append(torch.cuda.memory_reserved() / MIB)
        del model
    return Measured(*sizes, "MiB reserved")


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
        "The same: nothing is made for a tensor that is there.",
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
        "flan-t5-xl/old-model",
        "Deleting the old model after the conversion frees a float32 copy.",
        Saves(0.1),
        "false",
        "Both names are the same object. The float32 tensors are freed one by one, as each is "
        "replaced. In JAX a converted tree is a second one, and `cast_once` goes leaf by leaf.",
        old_model,
        jax_old_model,
    ),
    Claim(
        "flan-t5-xl/bfloat16",
        "bfloat16 saves 6 GB of parameters.",
        Lies(6, 6),
        "true",
        "2.85 billion parameters of two bytes less.",
        figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/load-once",
        "Loading in the target dtype avoids the copy that a later conversion makes.",
        Saves(0.3),
        "true",
        "Built in float32, a whole file beside it, then converted; against tensor by tensor. JAX: "
        "resident memory of 96 MiB of parameters, a larger model than PyTorch's.",
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
    ),
    Claim(
        "flan-t5-xl/padding",
        "Padding to the longest of a batch saves 2 to 3 of 11 GB.",
        Saves(2 / 11),
        "true",
        "Activations go with the padded length: 8 rows of 20 to 160 tokens, against 256. How much "
        "it is depends on the lengths alone.",
        padding,
        jax_padding,
    ),
    Claim(
        "flan-t5-xl/recomputation",
        "Recomputing activations saves 3 to 4 GB, about half of them.",
        Saves(0.5),
        "true",
        "Six blocks; the peak is one block's activations and the inputs of all.",
        recomputation,
        jax_recomputation,
    ),
    Claim(
        "flan-t5-xl/total-24gb",
        "All savings together are 24 to 27 GB.",
        Lies(24, 27),
        "partly",
        "The sum of those that hold: two copies that never were are left out.",
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
        figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the plan's row “parameters”",
    ),
    Claim(
        "flan-t5-xl/gradients-6gb",
        "Gradients take 6 GB.",
        Lies(6, 6),
        "true",
        "As many as parameters, in their dtype.",
        figure(lambda: layouts.parameter_gb(LAYOUT)),
        "the plan's row “gradients”",
    ),
    Claim(
        "flan-t5-xl/optimizer-6gb",
        "AdamW's state takes 6 GB.",
        Lies(6, 6),
        "partly",
        "It has two moments: twice the model in bfloat16, four times in float32.",
        figure(lambda: 2 * layouts.parameter_gb(LAYOUT)),
        "the plan's row “optimizer”",
    ),
    Claim(
        "flan-t5-xl/activations-8gb",
        "Activations of 8 examples take 8 GB.",
        Lies(8, 8),
        "false",
        f"With every block recomputed, {TOKENS} tokens an example, as compiled for a CPU: a "
        "quarter of it. Without recomputation the plan says 23 GB.",
        figure(lambda: planned_gb(row="activations")),
        "the plan's row “activations”",
    ),
    Claim(
        "flan-t5-xl/total-28gb",
        "Training takes 28 of 32 GB.",
        Lies(28, 28),
        "true",
        "The plan's rows and the document's 2 GB: its optimizer is twice what it says and its "
        "activations a quarter. JAX: with an accumulator in float32 beside the gradients, which is "
        "beyond 32 GB; `accumulator_dtype` halves it.",
        figure(lambda: planned_gb(leaving_out="accumulation") + OVERHEAD),
        figure(lambda: planned_gb() + OVERHEAD),
    ),
    Claim(
        "flan-t5-xl/effective-128",
        "8 examples times 16 accumulated steps are a batch of 128.",
        Agrees(1e-4),
        "true",
        "By `torch_ref`'s loop, which steps after the sixteenth; the float32 sums differ in their "
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
        figure(lambda: 6_000_000 / 8, "batches"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/epoch-5h",
        "An epoch takes 5 to 8 hours at 3 to 5 batches a second.",
        Lies(5, 8),
        "false",
        "750,000 batches at 5 a second; at 3 a second it is 69 hours.",
        figure(lambda: 750_000 / 5 / 3600, "hours"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/training-25h",
        "Five epochs take 25 to 40 hours.",
        Lies(25, 40),
        "false",
        "With the right number of batches, at 5 a second.",
        figure(lambda: 5 * 750_000 / 5 / 3600, "hours"),
        "the same arithmetic",
    ),
    Claim(
        "flan-t5-xl/samples-24",
        "3 to 5 batches of 8 are 24 to 40 samples a second.",
        Lies(24, 40),
        "true",
        "At 4 batches.",
        figure(lambda: 4 * 8, "samples/s"),
        "the same arithmetic",
    ),
)
