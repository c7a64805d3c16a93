"""The comparison at equal steps: which runs are made, and what counts as won."""

import json

import numpy as np
import pytest

from benchmarks.optimizers._equal_steps import best_choice, ends_above_its_start, missing_at_steps
from benchmarks.optimizers._method import Method, Steps, constant, here
from benchmarks.optimizers._reach import OURS, defaults_table, reach_table
from benchmarks.optimizers._record import GRID, SEEDS, Record
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS

pytestmark = pytest.mark.standard_promotion


def line(method, setting, seed, ends, *, budget=0.0, steps=100, error=None, compile_cpu_s=1.0):
    """A run whose validation is ``ends[0]`` at the start and ``ends[-1]`` after all steps."""
    places = np.linspace(0, steps, len(ends))
    return {
        "method": method, "setting": dict(setting), "seed": seed, "budget": budget,
        "least_steps": steps, "steps": [*map(int, places)], "cpu_s": [*(places / 100)],
        "loss": [None, *ends[:-1]], "validation": [*ends], "error": error,
        "compile_cpu_s": compile_cpu_s,
    }  # fmt: skip


def test_documented_settings_run_on_every_seed_and_seed_0_chooses_among_the_others(tmp_path):
    problem = PROBLEMS["perceptron"]
    rates = ({"learning_rate": 1.0}, {"learning_rate": 2.0})
    usual = constant([{"learning_rate": 3.0}])
    method = Method("adamw", "A", (), dict, documented=usual, choices=rates)
    record, order = Record(tmp_path / "a.jsonl"), []
    while key := missing_at_steps(record, [method], problem):
        setting = json.loads(key.setting)
        order.append((setting["learning_rate"], key.seed))
        record.add(line("adamw", setting, key.seed, [9.0, 5.0, 1 / setting["learning_rate"]]))
    assert order == [
        *((3.0, seed) for seed in (0, *SEEDS)), (1.0, 0), (2.0, 0), *((2.0, seed) for seed in SEEDS)
    ]  # fmt: skip
    assert best_choice(record.lines, method, problem) == rates[1]


def test_a_costly_problem_takes_what_seed_0_chose_at_equal_time(tmp_path):
    problem, rates = PROBLEMS["decoder"], ({"learning_rate": 1.0}, {"learning_rate": 2.0})
    usual = constant([{"learning_rate": 3.0}])
    method = Method("soap", "A", rates, dict, documented=usual, choices=rates)
    record = Record(tmp_path / "a.jsonl")
    for rate in rates:
        worse = [9.0, rate["learning_rate"]]
        record.add(line("soap", rate, 0, worse, budget=GRID * problem.budget, steps=0))
    made = []
    while key := missing_at_steps(record, [method], problem):
        setting = json.loads(key.setting)
        made.append((setting["learning_rate"], key.seed))
        record.add(line("soap", setting, key.seed, [9.0, 5.0], steps=problem.steps))
    assert made == [*((3.0, s) for s in (0, *SEEDS)), *((1.0, s) for s in SEEDS)]
    assert best_choice(record.lines, method, problem) == rates[0]


def test_runs_of_ours_go_on_to_the_seconds_of_the_other_comparison(tmp_path):
    key = missing_at_steps(Record(tmp_path / "a.jsonl"), [METHODS["kfac"]], PROBLEMS["burgers"])
    assert key is not None and (key.budget, key.steps, key.seed) == (12.0, 1000, 0)
    key = missing_at_steps(Record(tmp_path / "a.jsonl"), [METHODS["adamw"]], PROBLEMS["burgers"])
    assert key is not None and (key.budget, key.steps) == (0.0, 1000)


@pytest.mark.slow
def test_rates_of_a_setting_share_its_program_and_only_annealed_ones_fall():
    from tests.optimizers_benchmark_test import regression

    problem, built, seen = regression(), [], []

    def build(problem, data, setting):
        built.append(setting["kind"])

        def step(carry, batch, key, progress):
            return ({"w": carry[0]["w"] + setting["rate"] * (1 - progress)},), 0.0

        return Steps(lambda params: (params,), step)

    run = here(build, traced=("rate",))
    for rate, stays in ((1.0, True), (2.0, True), (1.0, False)):
        setting = {"rate": rate, "kind": 1} | ({"constant": True} if stays else {})
        curve = run(problem, problem.data(), setting, seed=0, budget=0.0, steps=4)
        assert curve["steps"][0:2] == [0, 1] and curve["steps"][-1] == 4
        seen.append(curve["validation"][-1])
    assert built == [1, 1]  # once for its start, once traced
    x, y = problem.data()["x"], problem.data()["y"]
    moved = np.ones((3, 2), np.float32) * (1 + 0.75 + 0.5 + 0.25)
    assert seen[2] == pytest.approx(0.5 * np.square(x @ moved - y).sum(-1).mean(), rel=1e-5)
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("ends", "above"),
    [([2.0, 3.0, 1.0], True), ([2.0, 1.0, 3.0], False), ([2.0, None, None], True)],
)
def test_a_run_ends_above_its_start_by_the_loss_of_its_batches(ends, above):
    assert ends_above_its_start(line("kfac", {}, 0, ends)) is above


def test_wins_ties_and_losses_are_medians_of_five_seeds():
    """Ours are 1.5 and 1.9; AdamW's best is 2, but one seed of it is excellent."""
    problem, records = PROBLEMS["perceptron"], {"perceptron": []}
    for method, end in zip(OURS, (1.5, 1.9), strict=True):
        usual = method.documented[0]
        records["perceptron"] += [line(method.name, usual, s, [9, 5, end]) for s in (0, *SEEDS)]
    adamw = METHODS["adamw"]
    for setting in adamw.choices:
        end = 2.0 if setting == adamw.choices[1] else 3.0
        for seed in (0, *SEEDS) if end == 2.0 else (0,):
            ends = [9.0, 5.0, 0.1 if seed == 3 else end]
            records["perceptron"].append(line("adamw", setting, seed, ends))
    table = reach_table(records)
    missing = ", ".join(name for name in PROBLEMS if name != problem.name)
    said = f"| 1 wins, 0 ties; not run: {missing} | ≥ 8 of 12 |"
    assert f"`kfac(like=like)` against AdamW's best, equal steps {said}" in table
    assert "like=like), as documented | 0 of 1 run | 0 |" in table
    for run in records["perceptron"]:
        if run["method"] == "kfac":
            run["validation"][-1] = 2.03
    table = reach_table(records)
    assert "`kfac(like=like)` against AdamW's best, equal steps | 0 wins, 1 ties; tied" in table
    assert "`kfe_adam` against AdamW's best, equal steps | 1 wins" in table
    assert "| Perceptron, 64-64-64-10, digits, 100 | not run |" in defaults_table(records)
