"""The record of the defaults of `jaxkfac train`: what is chosen, and what its page says."""

import dataclasses
import json
import math

import pytest

from benchmarks.digits.__main__ import RESULTS
from benchmarks.digits._page import page
from benchmarks.digits._settings import CHOOSING, RACING, SETTINGS, SHARED, chosen, cost
from jaxkfac.jobs.cli._options import Experiment

ABOUT = {"command": "python -m benchmarks.digits", "date": "now", "jax": "0", "cores": 2}


def run(name, setting, *seconds, error=0.03, seed=CHOOSING):
    """Epochs of 22 updates, of these CPU seconds; the last has the error."""
    errors = [0.5] * (len(seconds) - 1) + [error]
    epochs = [[22 * i, sum(seconds[:i]), 1.0, errors[i - 1]] for i in range(1, len(seconds) + 1)]
    known = {"optimizer": name, "setting": setting, "seed": seed, "epochs": epochs}
    return ABOUT | known | {"train_loss": 0.1, "test_accuracy": 0.97}


def test_the_cost_is_that_of_the_quickest_epoch_times_the_epochs():
    assert cost(run("adamw", {}, 3.0, 1.0, 2.0)) == 3.0
    assert cost(run("adamw", {}, 1.0, 1.0, error=0.031)) == math.inf
    settings = [{"b2": 0.9}, {"b2": 0.99}, {"b2": 0.999}]
    runs = [
        run("adamw", settings[0], 1.0, 1.0, 1.0),
        run("adamw", settings[1], 1.2, 1.2),
        run("adamw", settings[2], 0.1, error=0.04),
    ]
    assert chosen(runs) == settings[1]


def test_both_optimizers_have_as_many_settings_and_the_page_has_all_of_them():
    assert len(SETTINGS["kfac"]) == len(SETTINGS["adamw"])
    lines = []
    for name, settings in SETTINGS.items():
        lines += [run(name, setting, 1.0, 1.0) for setting in settings[1:]]
        lines.append(run(name, settings[0], 1.0))
        lines += [run(name, settings[0], 1.0 + (name == "kfac"), seed=seed) for seed in RACING]
    found = page(lines)
    assert found.count("| 44 | 2.0 |") == 2 * len(SETTINGS["kfac"]) - 2
    assert found.count("**") == 2 * 2
    assert "Neither is shown to be faster in updates" in found
    assert (
        "AdamW is faster in CPU seconds" in found and " CPU s (geometric means of 3 seeds" in found
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_train_has_the_settings_that_the_record_chose(name):
    lines = [json.loads(line) for line in (RESULTS / "digits.jsonl").read_text().splitlines()]
    runs = [x for x in lines if x["optimizer"] == name and x["seed"] == CHOOSING]
    best = chosen([x for x in runs if x["setting"] in SETTINGS[name]])
    defaults = dataclasses.asdict(getattr(Experiment(), name))
    wanted = dataclasses.asdict(dataclasses.replace(SHARED[name], **best))
    assert defaults == pytest.approx(wanted)
