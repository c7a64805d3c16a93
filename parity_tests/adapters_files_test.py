"""Adapters on disk: what one side writes, the other reads and computes, number by number.

The model is scanned here and a list of blocks there; what crosses is what lies on disk. Files
hold float32, and so do the numbers, so that nothing is rounded on the way.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jaxkfac import lslora
from parity_tests.adapters import PARTS, Setting, leaf_pairs, linked
from parity_tests.adapters_test import POLYNOMIALS
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.sides import Sides
from torch_ref import lslora as reference

Dialect = Literal["lslora", "peft"]
# The last two are not in a file of plain LoRA, where they mean nothing.
SETTINGS = ("rank", "alpha", "dropout", "rslora", "init_sigma", "reg_weight")


def narrow(adapters: dict[str, lslora.Adapter]) -> dict[str, lslora.Adapter]:
    """In float32, as they are written."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), adapters)


def our_outputs(sides: Sides, config: lslora.Config, adapters: Any) -> Any:
    """Outputs of jaxkfac in the problem's dtype."""
    wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, sides.dtype), dict(adapters))
    adapted = jax.jit(lslora.attach(sides.problem.apply(), config))
    return adapted(sides.params, wide, sides.our_batch()[0])


def outputs(sides: Sides, model: nn.Module) -> torch.Tensor:
    """PyTorch's outputs in the problem's dtype, which the model has from here on.

    Its base weights, which float32 rounded, are the problem's own again.
    """
    weights = dict(sides.model.named_parameters())
    model.to(sides.tensor_dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if own in weights:
                parameter.copy_(weights[own])
        return model(sides.batch()[0])


def base(sides: Sides) -> nn.Module:
    return copy.deepcopy(sides.model)


def equal_outputs(sides: Sides, ours: Any, theirs: torch.Tensor) -> Iterable[Pair]:
    yield Pair("model", "outputs", ours, theirs)
    change = (theirs - sides.outputs()).abs().max().item()
    yield Pair("model", "the adapter does something", change > 0.1, True)


def bit_for_bit(ours: Any, expected: Any) -> Iterable[Pair]:
    """Every leaf is the same; not within a tolerance."""
    for name, adapter in expected.items():
        for part in PARTS:
            x, y = getattr(ours[name], part), getattr(adapter, part)
            same = (x is None and y is None) or np.array_equal(np.asarray(x), np.asarray(y))
            yield Pair(name, f"{part}, bit for bit", same, True)


# ---------------------------------------------------------------- between the two


def written_here(setting: Setting, dialect: Dialect) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        pair, model = linked(sides, setting), base(sides)
        with tempfile.TemporaryDirectory() as folder:
            lslora.save(folder, narrow(pair.adapters), pair.config, name="task", dialect=dialect)
            read = reference.load(folder, model, name="task")
        for key in SETTINGS[: len(SETTINGS) - 2 * setting.is_linear]:
            yield Pair("settings", key, getattr(pair.config, key), getattr(read, key))
        placement = read.fourier_placement == pair.config.fourier_placement
        yield Pair("settings", "fourier_placement", placement, True)
        ours = our_outputs(sides, pair.config, pair.adapters)
        yield from equal_outputs(sides, ours, outputs(sides, model))
        yield from leaf_pairs(sides, pair.adapters, model, "read", name="task")

    return pairs


def written_by_torch_ref(setting: Setting, dialect: Dialect) -> Callable[[Sides], Iterable[Pair]]:
    """Then read here, for a model whose layers ``init`` names."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        pair, config = linked(sides, setting), setting.config(sides.problem)
        with tempfile.TemporaryDirectory() as folder:
            reference.save(folder, pair.model.float(), dialect=dialect)
            adapters, read = lslora.load(folder, like=pair.adapters)
        yield from bit_for_bit(adapters, narrow(pair.adapters))
        yield from equal_outputs(
            sides, our_outputs(sides, read, adapters), outputs(sides, pair.model)
        )
        yield from same_settings(read, config, adapters)

    return pairs


def same_settings(read: lslora.Config, config: lslora.Config, adapters: Any) -> Iterable[Pair]:
    """All of them; the target is put in the reader's own words, and names the same layers."""
    own = ("target", "rank_pattern", "alpha_pattern")
    own += SETTINGS[-2:] if config.fourier_placement == "none" else ()
    same = dataclasses.replace(read, **{key: getattr(config, key) for key in own}) == config
    yield Pair("settings", "all", same, True)
    for name in adapters:
        yield Pair(name, "is a target", read.targets(name), True)
        yield Pair(name, "rank", read.rank_of(name), config.rank_of(name))
        yield Pair(name, "scaling", read.scaling(name), config.scaling(name))


def there_and_back(sides: Sides) -> Iterable[Pair]:
    """Written here, read and written there, read here: every bit is as it was."""
    pair, model = linked(sides, Setting("bottleneck")), base(sides)
    with tempfile.TemporaryDirectory() as folder:
        lslora.save(Path(folder, "ours"), narrow(pair.adapters), pair.config, dialect="peft")
        reference.load(Path(folder, "ours"), model)
        reference.save(Path(folder, "theirs"), model.float(), dialect="peft")
        adapters, read = lslora.load(Path(folder, "theirs"), like=pair.adapters)
    yield from bit_for_bit(adapters, narrow(pair.adapters))
    yield from same_settings(read, pair.config, adapters)


# ---------------------------------------------------------------- the table

PROBLEM = "projections"
CPU = ("float64", "float32")
TOLERANCES = {dtype: exact(why=POLYNOMIALS)[dtype] for dtype in CPU}
COVERS = ("load", "save", "Adapter", "Config")
FORMS: list[tuple[str, Setting, Dialect]] = [
    *(
        (f"{placement}, dialect {dialect}", Setting(placement), dialect)
        for placement in ("output", "bottleneck")
        for dialect in ("lslora", "peft")
    ),
    ("rsLoRA, ranks by layer, dialect lslora", Setting(rslora=True, by_layer=True), "lslora"),
    ("plain rsLoRA, ranks by layer", Setting("none", rslora=True, by_layer=True), "peft"),
]

CASES = [
    *(
        case
        for name, setting, dialect in FORMS
        for who, pairs in (("jaxkfac", written_here), ("torch_ref", written_by_torch_ref))
        for case in cases(
            "adapter files",
            f"written by {who}, {name}",
            PROBLEM,
            pairs(setting, dialect),
            covers=COVERS,
            tolerances={dtype: TOLERANCES[dtype] for dtype in CPU[: 1 + (name[-1] == "a")]},
        )
    ),
    *cases(
        "adapter files",
        "there and back",
        PROBLEM,
        there_and_back,
        covers=COVERS,
        tolerances={"float64": TOLERANCES["float64"]},
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_files_agree(case, check):
    check(case)
