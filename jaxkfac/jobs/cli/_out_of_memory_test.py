"""Every command answers when memory runs out, and says what would fit."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tyro

from jaxkfac.jobs.cli import _main, main
from jaxkfac.jobs.cli import _out_of_memory as module
from jaxkfac.jobs.cli._main import COMMANDS, imported
from jaxkfac.jobs.cli._options import TrainArguments
from jaxkfac.jobs.cli._out_of_memory import (
    Need,
    RunShapes,
    accumulations,
    flags,
    remedy,
    smallest_sets,
)
from jaxkfac.jobs.cli._progress import phase, phases_of
from jaxkfac.jobs.cli.finetune._options import PRESETS, FinetuneArguments
from jaxkfac.jobs.models.checkpoint._tokenizer_test import folder_with
from jaxkfac.jobs.models.decoder._load_test import tensors_of

GIB = 2**30
# Limits its own address space when everything is imported, then runs a command.
CHILD = """
import re, resource, sys, jax
import jaxkfac.jobs.cli._train, jaxkfac.jobs.cli.finetune._run
jax.devices()
used = int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
sys.exit(jaxkfac.jobs.cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_is_behind_the_answer(command, monkeypatch, capsys):
    def runs_out(arguments):
        with phase("at work"):
            raise MemoryError("std::bad_alloc")

    where, name = command.run.split(":")
    assert callable(getattr(importlib.import_module(where), name))
    assert command.shapes is None or callable(imported(command.shapes))
    monkeypatch.setattr(f"{where}.{name}", runs_out)
    given = object.__new__(imported(command.arguments))  # what is required need not be given
    monkeypatch.setattr(tyro, "cli", lambda *_, **__: given)
    monkeypatch.setattr(_main, "_check", lambda arguments: None)  # there are no values to check
    monkeypatch.setattr(module, "_advice", lambda arguments, _: f"advice for {type(arguments)}")
    assert main([command.name]) == module.EXIT_CODE == 3
    shown = capsys.readouterr().err
    assert "jaxkfac: while at work: out of memory; " in shown and "Traceback" not in shown
    assert (
        f"advice for {imported(command.arguments)}" in shown and "docs/troubleshooting.md" in shown
    )
    with pytest.raises(MemoryError):
        main([command.name, "--debug"])


def test_an_answer_without_a_plan_is_general(monkeypatch, capsys):
    def fails(arguments, shapes_of):
        raise FileNotFoundError

    monkeypatch.setattr(module, "_advice", fails)
    assert module.answer(MemoryError(), None) == 3
    assert "could not be planned (FileNotFoundError). In general: " in capsys.readouterr().err


def test_arrays_of_the_failed_run_are_gone_before_the_plan(monkeypatch):
    class Array:
        alive = 0

        def __init__(self):
            Array.alive += 1

        def __del__(self):
            Array.alive -= 1

    def run():
        array = Array()
        raise MemoryError(str(id(array)))

    def advice(arguments, shapes_of):
        assert Array.alive == 0
        return "planned"

    monkeypatch.setattr(module, "_advice", advice)
    try:
        run()
    except MemoryError as error:
        assert Array.alive == 1
        module.answer(error, None)


def test_phases_are_read_from_the_outside_in():
    with (
        pytest.raises(MemoryError) as caught,
        phase("training with kfac"),
        phase("compiling"),
    ):
        raise MemoryError
    assert phases_of(caught.value) == "training with kfac: compiling"
    assert phases_of(MemoryError()) == ""


def run_of(size, **changes):
    experiment = dataclasses.replace(FinetuneArguments().experiment, batch_size=size, **changes)
    return FinetuneArguments(experiment=experiment)


def test_accumulation_keeps_the_examples_of_an_update():
    found = [x.experiment for x in accumulations(run_of(6, gradient_accumulation_steps=2))]
    assert [(x.batch_size, x.gradient_accumulation_steps) for x in found] == [
        (3, 4), (2, 6), (1, 12),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"devices": "2"}, {"mesh": "data=2,model=3"}, {"mesh": "model=2,data=2"}]
)
def test_micro_batches_can_be_divided_over_the_devices(options):
    found = accumulations(dataclasses.replace(run_of(12), **options))
    assert [x.experiment.batch_size for x in found] == [6, 4, 2]


def quantized(arguments):
    return dataclasses.replace(
        arguments, experiment=dataclasses.replace(arguments.experiment, quantize="all")
    )


def need(arguments):
    """10 for each row, and a base of 100, of 25 when it is quantised."""
    experiment = arguments.experiment
    base = 25 if experiment.quantize else 100
    return Need({"base model": base, "activations": 10 * experiment.batch_size})


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (180, "it should fit, so that something else holds memory"),
        (140, "  --batch-size 4 --gradient-accumulation-steps 2\nor with\n  --quantize all"),
        (110, "  --batch-size 1 --gradient-accumulation-steps 8\nor with\n  --quantize all"),
        (105, "fits with\n  --quantize all"),
        (45, "--batch-size 2 --gradient-accumulation-steps 4 --quantize all"),
        (34, "--quantize all it would still need 35 B (base model, 25 B): take a smaller model"),
    ],
)
def test_the_smallest_set_of_options_that_fits_is_said(room, expected):
    shown = remedy(run_of(8), RunShapes(need, [quantized]), room)
    assert expected in shown and "The plan counts 180 B for it (base model, 100 B)" in shown
    assert ("--quantize" in shown) == ("--quantize" in expected)


def test_a_remedy_is_found_wherever_a_grid_finds_one():
    """Also where a change saves bytes beside another one and costs some alone."""

    def change(**values):
        def changed(arguments):
            experiment = arguments.experiment
            if all(getattr(experiment, name) == value for name, value in values.items()):
                return None
            return dataclasses.replace(
                arguments, experiment=dataclasses.replace(experiment, **values)
            )

        return changed

    fewer = {"dtype": "bfloat16", "remat": True, "optimizer": "adafactor"}
    changes = [change(**{name: value}) for name, value in fewer.items()]
    start = run_of(2, remat=False)
    grid = [start]
    for each in changes:
        grid += [each(arguments) for arguments in grid]
    grid += [divided for arguments in grid for divided in accumulations(arguments)]
    assert len(set(grid)) == 16
    rng = np.random.default_rng(0)
    for room in (3, 30, 300):
        for _ in range(10):
            sizes = {arguments: int(rng.integers(1000)) for arguments in grid} | {start: 2000}
            shapes = RunShapes(lambda x, sizes=sizes: Need({"all": sizes[x]}), changes)
            fitting = {arguments for arguments in grid if sizes[arguments] <= room}
            found, least = smallest_sets(start, shapes, room)
            assert bool(found) == bool(fitting) and set(found) <= fitting
            if not found:
                assert least[0].total == min(sizes.values())


def test_of_sets_that_their_lower_bounds_exclude_the_nearest_is_named():
    """Without it the message would name the first set, and a device four times as large."""
    least = lambda arguments: 20 if arguments.experiment.quantize else 90
    planned = []

    def counted(arguments):
        planned.append(arguments)
        return need(arguments)

    shown = remedy(run_of(8), RunShapes(counted, [quantized], least), 10)
    assert "with --batch-size 1 --gradient-accumulation-steps 8 --quantize all it would" in shown
    assert "still need 35 B (base model, 25 B)" in shown and len(planned) == 3


def test_flags_are_those_of_the_command_line():
    before = TrainArguments()
    model = dataclasses.replace(before.experiment.model, hidden=64)
    experiment = dataclasses.replace(before.experiment, model=model, batch_size=4)
    after = dataclasses.replace(before, experiment=experiment, optimizer="adamw", json=True)
    words = flags(before, after)
    assert words == ["--batch-size 4", "--model.hidden 64", "--optimizer adamw", "--json"]
    options = (tyro.conf.FlagCreatePairsOff,)
    read = tyro.cli(TrainArguments, args=" ".join(words).split(), config=options)
    assert read == after


@pytest.mark.parametrize(
    ("preset", "remat", "expected"),
    [
        ("elements", False, ["without --no-remat"]),
        ("elements", True, ["--no-remat"]),
        ("wordnet-t5", False, ["--remat"]),
        ("wordnet-t5", True, ["without --remat"]),
    ],
)
def test_a_switch_is_named_that_the_command_line_has(preset, remat, expected):
    """`--remat` is no option where recomputation is the default, nor `--no-remat` elsewhere."""

    def with_remat(value):
        experiment = dataclasses.replace(PRESETS[preset].experiment, remat=value)
        return dataclasses.replace(PRESETS[preset], experiment=experiment)

    assert flags(with_remat(remat), with_remat(not remat)) == expected
    (finetune,) = (command for command in COMMANDS if command.name == "finetune")
    added = [word for word in expected if not word.startswith("without")]
    assert _main._parse(finetune, ["--preset", preset, *added]) == with_remat(not remat)


def in_a_child(*words):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits need Linux")


@pytest.mark.exhaustive
@linux
def test_finetune_in_too_little_memory_names_what_fits(tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors_of(config, fused=False), tmp_path / "model.safetensors")
    folder_with(tmp_path)
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join([json.dumps({"text": "iron and copper " * 125})] * 64))
    shown = in_a_child(
        *("finetune", "--model", str(tmp_path), "--data", str(data), "--loss-on", "all"),
        *("--max-length", "2048", "--batch-size", "64", "--samples", "0", "--steps", "1"),
        *("--output", str(tmp_path / "run"), "--curvature", "None"),
    )
    assert re.search(r"while training: examining: out of memory: 1\d.* GiB were asked for", shown)
    (size, steps) = re.search(
        r"it fits with\n  --batch-size (\d+) --gradient-accumulation-steps (\d+)\n", shown
    ).groups()
    assert int(size) * int(steps) == 64 and int(size) < 16


@pytest.mark.exhaustive
@linux
def test_train_in_too_little_memory_is_planned_with_smaller_micro_batches(tmp_path):
    shown = in_a_child(
        *("train", "--optimizer", "adamw", "--batch-size", "1000", "--model.hidden", "131072"),
        *("--model.depth", "1", "--gradient-accumulation-steps", "1"),
        *("--output", str(tmp_path)),
    )
    assert re.search(r"while training with adamw: out of memory: \d\d.* GiB were asked for", shown)
    assert "The plan counts " in shown and "can be counted on" in shown
    # With them it fits, or still does not, by what this machine's compiler makes of it.
    words = re.search(r"--batch-size (\d+) --gradient-accumulation-steps (\d+)", shown)
    size, steps = map(int, words.groups())
    assert size * steps == 1000 and size < 500
