"""Factors of a model over texts, collected pass by pass, each over all batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks import Factors, Place
from jaxkfac.factors import Pass
from jaxkfac.interception import Layer
from jaxkfac.jobs.cli._progress import said_if_slow
from jaxkfac.jobs.cli.analysis._files import Folder, Part, StoredSums
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel, sums_dtype
from jaxkfac.jobs.cli.analysis._texts import Texts, on_device
from jaxkfac.linalg import pack, packed_shape

# ---------------- locating the first non-finite numbers


def raise_non_finite(
    analysis: AnalyzedModel,
    params: ArrayTree,
    batch: ArrayTree,
    exist: ArrayTree,
    bad: Part,
    texts: Sequence[int],
) -> NoReturn:
    """Raise with the name of the first layer with non-finite inputs, or else of the bad part.

    Raises:
        NonFiniteFactorError: always.
    """
    where = f"texts {texts[0] + 1} to {texts[-1] + 1}"
    for path, leaf in leaves_by_path(params).items():
        if not bool(jnp.isfinite(leaf).all()):
            count = int((~jnp.isfinite(leaf)).sum())
            raise NonFiniteFactorError(
                f"{count} weights of {path} are not finite: the checkpoint is damaged, or "
                f"{leaf.dtype} is too narrow for it"
            )
    dtype = jax.tree.leaves(params)[0].dtype
    remedy = "" if dtype == jnp.float32 else "; --dtype float32 reaches further"
    first_layer = _first_inputs(analysis, params, batch, exist)
    if first_layer is None:
        raise NonFiniteFactorError(
            f"{bad} is not finite over {where}, though the inputs of every layer are: the loss "
            f"or its gradient overflows in {dtype}{remedy}"
        )
    raise NonFiniteFactorError(
        f"the inputs of layer {first_layer} are not finite over {where}, the first such in the "
        f"model: something before it overflows in {dtype}{remedy}"
    )


def _first_inputs(
    analysis: AnalyzedModel, params: ArrayTree, batch: ArrayTree, exist: ArrayTree
) -> str | None:
    """The first layer with non-finite inputs in program order, from the diagonals of all A."""
    collect = jk.value_grad_and_factors(
        analysis.objective, fisher="forward", max_dense=1, uncovered="ignore"
    )
    squares = collect(params, batch, positions=exist).factors
    bad_layers = []
    for number, layer in enumerate(squares.layers):
        if layer.is_diagonal:
            continue
        finite = np.isfinite(np.asarray(squares.side(Place("a", layer.input)).data))
        bad = np.flatnonzero(~finite.reshape(*layer.stack[:1], -1).all(-1))
        if bad.size:
            block = int(bad[0]) if layer.stack else None
            run = _run(squares.layers, number)
            name = layer.name + ("" if block is None else f"[{block}]")
            bad_layers.append((run, block or 0, number, name))
    return min(bad_layers)[-1] if bad_layers else None


def _run(layers: Sequence[Layer], number: int) -> int:
    """Number of changes of stack depth before a layer: the blocks of one stack run in sequence."""
    depths = [layer.stack[:1] for layer in layers[: number + 1]]
    return sum(depth != next_depth for depth, next_depth in zip(depths, depths[1:], strict=False))


# ---------------- the passes


def gather(
    analysis: AnalyzedModel,
    params: ArrayTree,
    texts: Texts,
    folder: Folder,
    *,
    every: int,
    advance: Callable[[int, str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Write every factor to the folder; passes and batches that are done are skipped.

    Args:
        analysis: Programs and passes.
        params: Parameters of the model.
        texts: Texts to collect the factors over.
        folder: Folder for the factors.
        every: Batches between two saves of an unfinished pass.
        advance: Called with the number of finished batches over all passes, and a description.
        stopped: Called after each batch; if it returns true, the pass is saved as it is.

    Returns:
        ``{"loss": nats a token, "terms": tokens}``.

    Raises:
        NonFiniteFactorError: names the first layer whose inputs are not finite.
        OSError: the disk is full.
        KeyboardInterrupt: ``stopped`` returned true.
    """
    total = len(texts.batches)
    totals: dict[str, float] = {}
    for number in range(len(analysis.passes)):
        done = f"pass-{number}.json"
        if not folder.has(f"factors/{done}"):
            totals = _one_pass(analysis, params, texts, folder, number, every, advance, stopped)
            folder.write(f"factors/{done}", totals)
            if stopped():
                raise KeyboardInterrupt
        folder.drop_sums(f"pass-{number}")  # only now: nobody reads the sums of a finished pass
        totals = folder.read(f"factors/{done}")
        advance((number + 1) * total, f"pass {number + 1}, loss {totals['loss']:.3f}")
    return totals


def _one_pass(
    analysis: AnalyzedModel,
    params: ArrayTree,
    texts: Texts,
    folder: Folder,
    number: int,
    every: int,
    advance: Callable[[int, str], None],
    stopped: Callable[[], bool],
) -> dict[str, float]:
    one, total = analysis.passes[number], len(texts.batches)
    sums, dtype = folder.load_sums(f"pass-{number}"), sums_dtype(total)
    while sums.batches < total:
        index = sums.batches
        batch, exist = on_device((texts.batches[index], texts.exist[index]))
        call = analysis.call(batch, exist, analysis.key_of(index))
        # The plan has compiled the programs of full batches.
        quiet = exist.shape == texts.exist[0].shape
        with said_if_slow("gather: compiling for the last texts", quiet=quiet):
            value, factors = analysis.program(number, exist)(params, call, np.int32(one.start))
        terms = float(factors.terms)
        sums.terms += terms
        sums.loss += float(value) * terms
        if bad := _add(sums, factors, one, analysis.stacks, dtype):
            raise_non_finite(analysis, params, batch, exist, bad, _rows(index, texts))
        del factors
        sums.batches += 1
        advance(number * total + sums.batches, f"pass {number + 1}, loss {float(value):.3f}")
        if sums.batches == total:
            break  # a complete pass is written even when it was stopped
        if (stop := stopped()) or sums.batches % every == 0:
            folder.save_sums(f"pass-{number}", sums)
        if stop:
            raise KeyboardInterrupt
    for part in sums.arrays:
        folder.save_part(part, sums)
    return {"loss": sums.loss / max(sums.terms, 1.0), "terms": sums.terms}


def _add(
    sums: StoredSums, factors: Factors, one: Pass, stacks: dict[str, int], dtype: np.dtype
) -> Part | None:
    """Add a batch's factors, one block at a time; return the first part that is not finite."""
    bad: Part | None = None
    for place, side in factors.sides.items():
        for part, block in _blocks(place, side.data, one, stacks):
            host = np.asarray(block)
            if side.is_matrix:
                sums.sizes[part] = host.shape[-1]
                host = _triangle(host)
            if not np.isfinite(host).all():
                bad = bad or part
                continue
            total_so_far = sums.arrays.get(part)
            sums.arrays[part] = (
                host.astype(dtype)
                if total_so_far is None
                else np.add(total_so_far, host, out=total_so_far)
            )
        side.data.delete()
        if place.table == "a":
            for part, count in _blocks(place, side.count, one, stacks):
                total = sums.counts.get(part, 0) + np.asarray(count, np.float64)
                sums.counts[part] = np.asarray(total)
    return bad


def _blocks(place: Place, array: Any, one: Pass, stacks: dict[str, int]) -> list[tuple[Part, Any]]:
    """The blocks of an array; for a window, only those that exist in the model."""
    if place.table == "diagonals" or place.key not in stacks:
        return [(Part(*place, None), array)]
    start = one.start if one.has_window_of(place.key) else 0
    stop = min(start + array.shape[0], stacks[place.key])
    host = np.asarray(array)  # a view on the CPU
    return [(Part(*place, i), host[i - start]) for i in range(start, stop)]


def _triangle(matrix: np.ndarray) -> np.ndarray:
    stack, size = matrix.shape[:-2], matrix.shape[-1]
    flat = matrix.reshape(math.prod(stack), size, size)
    out = np.empty((len(flat), *packed_shape(size)), matrix.dtype)
    for one, target in zip(flat, out, strict=True):
        pack(one, target)
    return out.reshape(*stack, *out.shape[1:])


def _rows(index: int, texts: Texts) -> Sequence[int]:
    """Indices of the texts in a batch, from 0."""
    sizes = [len(exist) for exist in texts.exist]
    start = sum(sizes[:index])
    return range(start, start + sizes[index])
