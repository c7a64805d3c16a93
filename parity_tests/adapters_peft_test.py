"""Adapters on disk between jaxkfac, torch_ref and stock PEFT, where that is installed."""

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from jaxkfac import lslora
from parity_tests.adapters import Setting, linked
from parity_tests.adapters_files_test import (
    PROBLEM,
    TOLERANCES,
    base,
    bit_for_bit,
    equal_outputs,
    narrow,
    our_outputs,
    outputs,
    same_settings,
)
from parity_tests.cases import cases, over
from parity_tests.compare import Pair
from parity_tests.packages import imported
from parity_tests.sides import Sides
from torch_ref import lslora as reference


def with_the_plug_in(placement: Any) -> Callable[[Sides], Iterable[Pair]]:
    """PEFT reads what was written here, computes the same, and writes it again."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        peft, pair = imported("peft"), linked(sides, Setting(placement))
        plugin = importlib.import_module("torch_ref.lslora.peft_plugin")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lslora.save(folder / "ours", narrow(pair.adapters), pair.config, dialect="peft")
            settings = plugin.read_config(folder / "ours")
            model = peft.PeftModel.from_pretrained(
                base(sides).float(), folder / "ours", config=settings
            )
            model.save_pretrained(folder / "theirs")
            adapters, read = lslora.load(folder / "theirs", like=pair.adapters)
        ours = our_outputs(sides, pair.config, pair.adapters)
        yield from equal_outputs(sides, ours, outputs(sides, model))
        yield from bit_for_bit(adapters, narrow(pair.adapters))
        yield from same_settings(read, pair.config, adapters)

    return pairs


def plain(sides: Sides) -> Iterable[Pair]:
    """Plain rsLoRA of stock PEFT with ranks by module, read on both sides, and taken back."""
    peft = imported("peft")
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=3,
        target_modules=["q_proj", "o_proj"],
        rank_pattern={"o_proj": 2},
        alpha_pattern={"o_proj": 10},
        use_rslora=True,
        init_lora_weights=False,  # B other than zero
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(base(sides).float(), settings)
    like = lslora.init(
        sides.problem.apply(),
        lslora.Config(rank=4, target=r".*(q|o)_proj/kernel", rank_pattern={".*o_proj.*": 2}),
        sides.params,
        sides.our_batch()[0],
        key=jax.random.key(0),
    )
    with tempfile.TemporaryDirectory() as name:
        folder, theirs = Path(name), base(sides)
        model.save_pretrained(folder / "theirs")
        adapters, config = lslora.load(folder / "theirs", like=like)
        reference.load(folder / "theirs", theirs)
        lslora.save(folder / "ours", adapters, config, dialect="peft")
        again = peft.PeftModel.from_pretrained(base(sides).float(), folder / "ours")
    linear = all(adapter.is_linear for adapter in adapters.values())
    placement = config.fourier_placement == "none"
    yield Pair("settings", "plain LoRA", linear and placement, True)
    ours = our_outputs(sides, config, adapters)
    for found in (model, again):
        yield from equal_outputs(sides, ours, outputs(sides, found))
    yield from equal_outputs(sides, ours, outputs(sides, theirs))


def saved_whole(sides: Sides) -> Iterable[Pair]:
    """Modules that stock PEFT trains and saves whole."""
    peft = imported("peft")
    settings = peft.LoraConfig(r=2, target_modules=["up"], modules_to_save=["down"])
    model = peft.get_peft_model(base(sides), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    apply, inputs = sides.problem.apply(), sides.our_batch()[0]
    config = lslora.Config(rank=2, target=("up",), modules_to_save="down/.*")
    like = lslora.init(apply, config, sides.params, inputs, key=jax.random.key(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "theirs")
        adapters, config = lslora.load(folder / "theirs", like=like)
        lslora.save(folder / "ours", adapters, config, dialect="peft")
        again = peft.PeftModel.from_pretrained(base(sides), folder / "ours")
    theirs = outputs(sides, model)
    yield Pair("down", "is read", {"down/kernel", "down/bias"} <= adapters.keys(), True)
    yield from equal_outputs(sides, our_outputs(sides, config, adapters), theirs)
    same = torch.equal(outputs(sides, again), theirs)
    yield Pair("model", "PEFT's outputs again, bit for bit", same, True)


# ---------------------------------------------------------------- the table

COVERS = ("load", "save", "Adapter", "Config")
FLOAT64 = {"float64": TOLERANCES["float64"]}

CASES = [
    *(
        case
        for placement in ("output", "bottleneck")
        for case in cases(
            "adapter files",
            f"stock PEFT with the plug-in, {placement}",
            PROBLEM,
            with_the_plug_in(placement),
            covers=COVERS,
            tolerances=FLOAT64,
        )
    ),
    *cases(
        "adapter files",
        "plain rsLoRA of stock PEFT",
        PROBLEM,
        plain,
        covers=COVERS,
        tolerances=FLOAT64,
    ),
    *cases(
        "adapter files",
        "modules that stock PEFT saves whole",
        "classifier",
        saved_whole,
        covers=COVERS,
        tolerances=TOLERANCES,
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_files_of_stock_peft_agree(case, check):
    check(case)
