"""What a help text offers by name is planned from shapes alone, and run to its first step."""

import dataclasses
import hashlib
import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._paths import MODEL_NAMES, PLANNED_NAMES
from jaxkfac.jobs.cli._plan import PlanArguments
from jaxkfac.jobs.cli.finetune import _encoder_decoder
from jaxkfac.jobs.cli.finetune._options import Finetuning, Preset
from jaxkfac.jobs.models import pretrained
from jaxkfac.planning import PRESETS

ROOM = ("--device-bytes", "2TB")


def names_in(options, field):
    """The names in the help text of an option: in the documentation below the field."""
    text = re.search(rf'    {field}: .*\n    """((?s:.)*?)"""', inspect.getsource(options))
    assert text is not None
    return set(re.findall(r"[a-z]\w*(?:-\w+)+|smollm2", text[1]))


def test_help_names_every_model_and_every_layout():
    offered = names_in(Finetuning, "model") - {"encoder-decoder"}
    assert offered == {*MODEL_NAMES}
    assert names_in(PlanArguments, "preset") == {*PRESETS}


SLOW = pytest.mark.slow
MODELS = ["t5-bytes", *(name for name in PLANNED_NAMES if name != "flan-t5-xl")]


@pytest.mark.parametrize("model", [*MODELS, pytest.param("flan-t5-xl", marks=SLOW)])
def test_finetune_plans_every_model_that_its_help_names(model, capsys):
    pairs = ("--data", "wordnet") if "t5" in model else ()
    assert main(["finetune", "--plan", "--model", model, *pairs, *ROOM]) == 0
    assert "It fits" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["wordnet-t5", "flan-t5-xl"])
def test_finetune_plans_every_preset(preset, capsys):
    assert {"wordnet-t5", "flan-t5-xl", "elements"} == {*get_args(Preset)}
    assert main(["finetune", "--preset", preset, "--plan", *ROOM]) == 0
    assert "It fits" in capsys.readouterr().out


@pytest.mark.parametrize("train", ["all", pytest.param("adapter", marks=SLOW)])
@pytest.mark.parametrize("preset", [*PRESETS])
def test_plan_plans_every_layout_and_what_it_trains(preset, train, capsys):
    words = ["--train", train, "--compiled", "none", "--options", "--curvature", "none"]
    assert main(["plan", "--preset", preset, *words, *ROOM]) == 0
    assert "it fits" in capsys.readouterr().out


def test_a_plan_refuses_what_the_run_refuses(capsys):
    for words, message in (
        (("--max-length", "5000", "--data", "x.jsonl"), "longer than the model's context, 4096"),
        (("--log-every", "0"), "log_every must be at least 1"),
        (("--patience", "2"), "--patience counts evaluations"),
    ):
        assert main(["finetune", "--plan", "--model", "llama-7b", *words, *ROOM]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_plan_prints_the_command_that_counts_the_same_training(capsys):
    words = ["--train", "adapter", "--optimizer", "adamw", "--batch", "2", "--tokens", "64"]
    fixed = ["--compiled", "none", "--options", "--curvature", "none"]
    assert main(["plan", "--preset", "llama-1b", *words, *fixed, *ROOM]) == 0
    shown = capsys.readouterr().out
    (command,) = re.findall(r"the training as it stands: jaxkfac (.*)", shown)
    assert main(command.split()) == 0
    counted = capsys.readouterr().out
    assert "2 × 1 rows" in counted and "rows of 64 tokens, activations kept" in counted
    (total,) = re.findall(r"sum +(.* GiB)", counted)
    assert total in shown


@pytest.fixture
def smollm2(small, tmp_path, monkeypatch):
    """A file of the same layout with few weights, where the downloaded one would be."""
    content = Path(small["gguf"]).read_bytes()
    known = dataclasses.replace(pretrained.SMOLLM2, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pretrained, "SMOLLM2", known)
    monkeypatch.setenv("JAXKFAC_CACHE", str(tmp_path / "cache"))
    file = pretrained.cached_file(known)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


BRIEF = ("--steps", "1", "--samples", "1", "--sample-tokens", "2", "--curvature", "None")
SCORED = ("--train", "{texts}", "--queries", "{texts}", "--max-length", "16")
STARTS = {
    "smollm2": ("finetune", *BRIEF, "--questions", "2", "--batch-size", "2"),
    "elements": ("finetune", "--preset", "elements", *BRIEF, "--questions", "2"),
    "wordnet-t5": ("finetune", "--preset", "wordnet-t5", *BRIEF, "--generate", "1"),
    "t5-bytes": (
        *("finetune", "--model", "t5-bytes", "--data", "wordnet", *BRIEF, "--generate", "1"),
        *("--batch-size", "2", "--max-length", "16", "--max-target-length", "16"),
    ),
    "influence of smollm2": ("influence", "smollm2", *SCORED, "--layers", ".*o_proj/kernel"),
    "analyze smollm2": (
        *("analyze", "smollm2", "--texts", "2", "--max-length", "16", "--lanczos", "1"),
        *("--lanczos-steps", "2", "--decompose", ".*o_proj/kernel.*"),
    ),
    "analyze t5-bytes": (
        *("analyze", "t5-bytes", "--texts", "2", "--max-length", "16", "--lanczos", "0"),
        *("--max-target-length", "16", "--decompose", ".*/wo/kernel.*"),
    ),
}


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adamw needs it
@pytest.mark.parametrize("name", STARTS)
def test_what_help_names_takes_its_first_step(name, small, smollm2, tmp_path, monkeypatch, capsys):
    few = dataclasses.replace(_encoder_decoder._BYTES, width=16, hidden=16, head_size=8)
    pairs = [learnt[:32] for learnt in _encoder_decoder.wordnet_pairs()]
    monkeypatch.setattr(_encoder_decoder, "wordnet_pairs", lambda: pairs)
    monkeypatch.setattr(_encoder_decoder, "_BYTES", few)
    monkeypatch.setitem(_encoder_decoder.ENCODER_DECODERS, "t5-bytes", few)
    words = [word.format(**small) for word in STARTS[name]]
    assert main([*words, "--output", str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "finetune" not in words or (shown["steps"] == 1 and shown["loss"][0] > 0)


@pytest.mark.parametrize("command", ["finetune", "influence", "analyze"])
@pytest.mark.parametrize("model", PLANNED_NAMES)
def test_a_model_that_is_known_by_its_sizes_is_run_from_a_folder(
    command, model, small, tmp_path, capsys
):
    words = {
        "finetune": ["--model", model, "--data", small["pairs" if "t5" in model else "chats"]],
        "influence": [model, "--train", small["texts"], "--queries", small["texts"]],
        "analyze": [model],
    }[command]
    assert main([command, *words, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{model} is known by its sizes" in said and "the folder of" in said
