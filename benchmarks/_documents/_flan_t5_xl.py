"""Measurements for the fine-tuning of FLAN-T5-XL."""

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
from benchmarks._documents._budgets import TOKENS
from benchmarks._documents._bytes import (
    MIB,
    compiled,
    parameter_bytes,
    resident,
    storages,
    tree_bytes,
)
from benchmarks._documents._claim import Context, Measured
from benchmarks._documents._problems import (
    LOSS,
    OBJECTIVE,
    ROWS,
    batch,
    jax_batch,
    network,
    parameters,
)
from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.memory import Recomputed

LAYOUT = "t5-xl"
OVERHEAD = 2  # GB, the document's
SAVINGS = {  # GB, the rows of the document's table; the upper end of a range
    "flan-t5-xl/cast-again": 6,
    "flan-t5-xl/move-again": 6,
    "flan-t5-xl/collect": 2,
    "flan-t5-xl/padding": 3,
    "flan-t5-xl/recomputation": 4,
    "flan-t5-xl/bfloat16": 6,
}


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
    return mib * MIB / parameter_bytes(model) * layouts.parameter_gb(LAYOUT)


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
    return Measured(1 + seen.peak * MIB / parameter_bytes(model), unit="times the model")


def wasted(context: Context) -> Measured:
    return Measured((copies(context).before - 1) * layouts.parameter_gb(LAYOUT), unit="GB")


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
    """The document's own sum, without its rows that are false."""
    rows = context.rows
    return Measured(
        sum(gb for name, gb in SAVINGS.items() if rows[name].verdict != "false"), unit="GB"
    )


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


def half_the_rows(context: Context) -> Measured:
    peaks = []
    for rows in (ROWS, ROWS // 2):
        model, data = network(context.device), batch(context.device, rows=rows)
        step = lambda m=model, d=data: LOSS(m, d).backward()
        peaks.append(storages(step, context.device).peak)
    return Measured(*peaks, "MiB")


def jax_half_the_rows(context: Context) -> Measured:
    gradient = jax.grad(OBJECTIVE)
    sizes = (compiled(gradient, parameters(), jax_batch(rows=n)) for n in (ROWS, ROWS // 2))
    return Measured(*sizes, "MiB")


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
