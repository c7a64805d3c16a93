"""Few-shot models: what a training of them is made of, beside the factors of factors_test."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxkfac as jk
from jaxkfac.models import Conv4, ResNet
from parity_tests.accumulation_test import ADAM, CPU, OPTIMIZERS
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import in_mode, layer_table, value_and_gradient
from parity_tests.fisher_types_test import sampled
from parity_tests.problem import EVERY
from parity_tests.reference_training import parameters_of
from parity_tests.sides import Sides
from torch_ref import models as ref

STEPS = 5
MODELS = ["prototypes", "cosine transformer"]


def logits(sides: Sides) -> Iterable[Pair]:
    ours = jax.jit(sides.objective.apply_fn)(sides.params, *sides.our_batch()[0])
    yield Pair("model", "logits", ours, sides.outputs())


def five_steps(sides: Sides) -> Iterable[Pair]:
    """Parameters after each step of Adam, an episode's images normalised by themselves."""
    ours, theirs = OPTIMIZERS["Adam"]
    tx, params, model = ours(), sides.params, copy.deepcopy(sides.model)
    state, optimizer = tx.init(params), theirs(model.parameters())

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.grad(sides.objective)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(STEPS):
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and its count
            params, state = step(params, state, sides.our_batch(seed))
        optimizer.zero_grad()
        sides.loss(model, sides.batch(seed)).backward()
        optimizer.step()
        expected = parameters_of(sides, model)
        paths = jax.tree_util.tree_leaves_with_path(params)
        for (path, leaf), other in zip(paths, jax.tree.leaves(expected), strict=True):
            yield Pair(jax.tree_util.keystr(path), f"after step {seed + 1}", leaf, other)


BACKBONES: dict[str, tuple[Callable, Callable, int]] = {
    "Conv-4": (lambda rngs: Conv4(16, width=3, rngs=rngs), lambda: ref.Conv4(1, 3), 16),
    "ResNet-18": (
        lambda rngs: ResNet(18, 1, width=2, rngs=rngs),
        lambda: ref.ResNet((2, 2, 2, 2), 1, 2, large=True),
        35,
    ),
    "ResNet-34": (
        lambda rngs: ResNet(34, 1, width=2, stem="small", rngs=rngs),
        lambda: ref.ResNet((3, 4, 6, 3), 1, 2, large=False),
        9,
    ),
}


def running_statistics(name: str) -> Callable[[Sides], Iterable[Pair]]:
    """Features in training and in evaluation, and what two batches leave behind."""
    ours, theirs, side = BACKBONES[name]

    def pairs(sides: Sides) -> Iterable[Pair]:
        torch.manual_seed(0)
        reference = theirs().to(sides.device, sides.tensor_dtype)
        model = ours(nnx.Rngs(0))
        apply_fn, params = jk.from_nnx(model, mutable=nnx.BatchStat)
        params = _as_ours(params, dict(reference.named_parameters()))
        state = jax.tree.map(lambda x: x.astype(sides.dtype), apply_fn.state)
        images = np.random.default_rng(3).normal(size=(3, 1, 12, side, side, 1))
        call = jax.jit(apply_fn)
        for batch in images[:2]:
            found, state = call(params, batch.astype(sides.dtype), state=state)
            yield Pair("backbone", "features", found[0], reference(_channels_first(sides, batch)))
        running = _as_ours(state, dict(reference.named_buffers()))
        pairs_of = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(running))
        for (path, leaf), expected in pairs_of:
            yield Pair(jax.tree_util.keystr(path), "running", leaf, expected)
        model.eval()
        evaluated, _ = jk.from_nnx(model, mutable=nnx.BatchStat)
        found, _ = jax.jit(evaluated)(params, images[2].astype(sides.dtype), state=state)
        expected = reference.eval()(_channels_first(sides, images[2]))
        yield Pair("backbone", "features in evaluation", found[0], expected)

    return pairs


def _channels_first(sides: Sides, images: np.ndarray) -> torch.Tensor:
    return sides.tensor(images[0].transpose(0, 3, 1, 2))


_NAMES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


def _as_ours(like: Any, arrays: dict[str, Any]) -> Any:
    """PyTorch's arrays in the structure of ours."""

    def leaf(path: Any, _: Any) -> np.ndarray:
        *module, name = (str(key.key) for key in path)
        array = arrays[".".join([*module, _NAMES.get(name, name)])].detach().cpu().numpy()
        return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array

    return jax.tree_util.tree_map_with_path(leaf, like)


# ---------------------------------------------------------------- the table

NORMALISED = exact(times32=1e-4, why="layer after layer, each divided by a deviation")

CASES = [
    *(
        case
        for name, pairs in (
            ("logits", logits),
            ("value and gradient", value_and_gradient),
            ("names and sizes", layer_table),
            ("factors", in_mode(EVERY[0])),
            ("factors of given labels", sampled),
        )
        for case in cases("few-shot", name, MODELS[1], pairs, tolerances=NORMALISED)
    ),
    *cases(
        "few-shot",
        "five steps of Adam",
        MODELS,
        five_steps,
        tolerances={dtype: ADAM[dtype] for dtype in CPU},
    ),
    *(
        case
        for name in BACKBONES
        for case in cases(
            "few-shot", f"{name} and its running statistics", MODELS[1], running_statistics(name),
            tolerances=NORMALISED,
        )
    ),
]  # fmt: skip


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_few_shot_models_agree(case, check):
    check(case)
