"""What a help text offers by name is planned, from shapes alone."""

import inspect
import re
from typing import get_args

import pytest

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._paths import MODEL_NAMES, PLANNED_NAMES
from jaxkfac.jobs.cli._plan import PlanArguments
from jaxkfac.jobs.cli.finetune._options import Finetuning, Preset
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
