"""`--plan` counts a run's bytes before anything is loaded."""

import dataclasses
import itertools
import json
import math

import pytest

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._main import COMMANDS, _parse
from jaxkfac.jobs.cli._out_of_memory import accumulations, flags, smallest_sets
from jaxkfac.jobs.cli._plan import PlanArguments, run_plan
from jaxkfac.jobs.cli.finetune import _run as run_module
from jaxkfac.jobs.cli.finetune._decoder import DECODERS
from jaxkfac.jobs.cli.finetune._encoder_decoder import ENCODER_DECODERS
from jaxkfac.jobs.cli.finetune._options import (
    PRESETS,
    FinetuneArguments,
    Finetuning,
    default_arguments,
)
from jaxkfac.jobs.cli.finetune._plan import planned_shapes
from jaxkfac.jobs.models import DecoderConfig, EncoderDecoderConfig

CONFIG = EncoderDecoderConfig(
    vocabulary=128, width=16, hidden=24, encoder_depth=2, decoder_depth=2, num_heads=2, head_size=8,
    tied_head=False,
)  # fmt: skip
DECODER = DecoderConfig(
    vocabulary=128, width=16, hidden=24, depth=2, num_heads=2, num_kv_heads=1, head_size=8,
    context=64,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hugging_face()))
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", ["adapter", "all"])
def test_a_config_is_enough(train, folder, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "load_model", None)
    words = ["--model", str(folder), "--train", train, "--max-length", "32"]
    assert main(["finetune", "--plan", "--device-bytes", "1GB", *words]) == 0
    shown = capsys.readouterr().out
    assert "8 × 1 rows an update, adamw, float32" in shown and "It fits" in shown
    assert ("base model" in shown) is (train == "adapter")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


@pytest.mark.exhaustive
def test_what_does_not_fit_is_said_with_options_by_which_it_does(folder, capsys):
    words = ["--model", str(folder), "--data", "nowhere", "--train", "all", "--batch-size", "64"]
    assert main(["finetune", "--plan", "--device-bytes", "16MB", *words]) == 0
    shown = capsys.readouterr().out
    assert "By the plan it fits with" in shown and "--gradient-accumulation-steps" in shown


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "train", "optimizer", "steps"),
    [("flan-t5-xl", "all", "adamw", 4), ("llama-7b", "adapter", "adafactor", 1)],
)
def test_both_commands_count_the_same_bytes(model, train, optimizer, steps, monkeypatch, capsys):
    monkeypatch.setitem(ENCODER_DECODERS, "flan-t5-xl", CONFIG)
    monkeypatch.setitem(DECODERS, "llama-7b", DECODER)
    same = {
        "train": train,
        "dtype": "bfloat16",
        "gradient_accumulation_steps": steps,
        "accumulator_dtype": "bfloat16",
        "optimizer": optimizer,
    }
    plan = PlanArguments(
        preset=model,
        batch=2,
        tokens=8,
        remat=True,
        curvature="none",
        compiled="none",
        options=(),
        device_bytes="1GB",
        json=True,
        **same,
    )
    run_plan(plan)
    now = json.loads(capsys.readouterr().out)["now"]
    lengths = {"max_length": 8, "max_target_length": 8}
    experiment = Finetuning(model=model, data="nowhere", batch_size=2, **lengths, **same)
    need = planned_shapes("h100").need(FinetuneArguments(experiment=experiment))
    rows = {row: nbytes for row, nbytes in need.rows.items() if row != "base model"}
    rows["parameters"] += need.rows.get("base model", 0)
    assert need.total == now["device_total"] and not need.not_traced
    assert all(now["device"][row] == nbytes for row, nbytes in rows.items())
    assert bool(rows["accumulation"]) == (steps > 1)


@pytest.mark.exhaustive  # a plan for every set of changes: minutes
@pytest.mark.standard_promotion
def test_a_remedy_that_is_printed_fits_when_it_is_taken(monkeypatch, capsys):
    monkeypatch.setitem(ENCODER_DECODERS, "flan-t5-xl", CONFIG)
    words = ["finetune", "--preset", "flan-t5-xl", "--max-length", "8", "--max-target-length", "8"]

    def shown(*more):
        assert main([*words, "--plan", "--device-bytes", "150kB", *more]) == 0
        return capsys.readouterr().out

    remedies = [line for line in shown().splitlines() if line.startswith("  --")]
    assert remedies
    for remedy in remedies:
        assert "It fits 146 KiB." in shown(*remedy.split())


VALUES = {
    "optimizer": ("adamw", "adafactor"),
    "train": ("adapter", "all"),
    "quantize": (None, "all"),
    "dtype": ("float32", "bfloat16"),
    "accumulator_dtype": ("float32", "bfloat16"),
    "remat": (True, False),
}
T5_BASE = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048,
    "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def words_with(words, remedy):
    """The command line with a remedy taken: what it adds, and without what it leaves out."""
    left_out = [word.removeprefix("without ") for word in remedy if word.startswith("without ")]
    added = [word for word in remedy if not word.startswith("without ")]
    return [word for word in words if word not in left_out] + " ".join(added).split()


def grid_of(arguments):
    """Every choice of values, with the micro-batch that is asked for and with the smallest."""
    for chosen in itertools.product(*VALUES.values()):
        values = dict(zip(VALUES, chosen, strict=True))
        experiment = dataclasses.replace(arguments.experiment, **values)
        changed = dataclasses.replace(arguments, experiment=experiment)
        yield from [changed, *list(accumulations(changed))[-1:]]


@pytest.mark.exhaustive  # a hundred plans for each model: minutes
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "words",
    [
        ["--preset", "flan-t5-xl"],
        ["--model", "llama-7b", "--no-remat"],
        ["--model", "phi-3-mini", "--no-remat"],
        ["--preset", "wordnet-t5"],
        ["--model", T5_BASE, "--train", "all", "--no-remat"],
        ["--model", SMOLLM2, "--no-remat"],
    ],
    ids=["FLAN-T5-XL", "Llama 7B", "Phi-3 mini", "T5 of bytes", "T5 base", "SmolLM2"],
)
def test_remedies_fit_when_they_are_taken_and_none_is_missed_that_a_grid_has(words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(words[1]))
    words = [str(tmp_path) if isinstance(word, dict) else word for word in words]
    (command,) = (command for command in COMMANDS if command.name == "finetune")
    shapes, arguments = planned_shapes("h100"), _parse(command, words)

    def bytes_of(count, changed):
        try:
            return count(changed)
        except ValueError:  # this model refuses the values
            return math.inf

    now = least = shapes.need(arguments).total
    bounds = [(bytes_of(shapes.least, changed), changed) for changed in grid_of(arguments)]
    for bound, changed in sorted(bounds, key=lambda pair: pair[0]):
        if bound <= least:  # few are planned, as the smallest bounds come first
            least = min(least, bytes_of(lambda x: shapes.need(x).total, changed))
    assert least < now
    for room in (int(0.6 * now), int(0.25 * now), least):
        fitting, _ = smallest_sets(arguments, shapes, room)
        assert fitting or room < least
        for changed in fitting:
            taken = _parse(command, words_with(words, flags(arguments, changed)))
            assert taken == changed and shapes.need(taken).total <= room
    assert not smallest_sets(arguments, shapes, least - 1)[0]


@pytest.mark.slow
def test_parameters_gradients_and_optimizer_are_counted_to_the_byte(folder):
    experiment = Finetuning(model=str(folder), data="nowhere", train="all", dtype="bfloat16")
    rows = planned_shapes().need(FinetuneArguments(experiment=experiment)).rows
    inner, blocks = 16 * 16, 2
    block = 4 * inner + 16 + 2 * 16 * 24 + 16  # attention and its norm, feed-forward and its norm
    cross = 4 * inner + 16
    numbers = 2 * 128 * 16 + blocks * (2 * block + cross) + 2 * (32 * 2) + 2 * 16
    assert rows["parameters"] == 2 * numbers


def test_options_that_do_not_go_together_are_refused(folder, capsys):
    words = ["--model", str(folder), "--attention", "cudnn"]
    assert main(["finetune", "--plan", *words]) == 2
    assert "--attention cudnn has no relative positions" in capsys.readouterr().err


def test_a_preset_is_where_options_begin(folder):
    for words in (["--preset", "wordnet-t5"], ["--steps", "3", "--preset=wordnet-t5"]):
        assert default_arguments(["finetune", *words]) is PRESETS["wordnet-t5"]
    assert default_arguments(["finetune"]) == FinetuneArguments()
    assert default_arguments(["--preset"]) == FinetuneArguments()
    assert {name: found.preset for name, found in PRESETS.items()} == {x: x for x in PRESETS}


@pytest.mark.slow
def test_the_documented_run_is_planned_by_its_name(capsys):
    words = ["finetune", "--preset", "flan-t5-xl", "--plan", "--device-bytes", "80GB"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "8 × 16 rows an update" in shown and "5.31 GiB" in shown  # 2.85e9 parameters
