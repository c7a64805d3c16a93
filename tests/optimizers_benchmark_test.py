"""The comparison of optimizers: all of them train, and runs go on where they stopped."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.optimizers import _loop
from benchmarks.optimizers._kfac import marked
from benchmarks.optimizers._method import Method, Steps, here
from benchmarks.optimizers._peer import error_of, in_peer
from benchmarks.optimizers._problem import Problem, unmarked
from benchmarks.optimizers._record import GRID, SEEDS, Key, Record, chosen, target
from benchmarks.optimizers._report import section, write_report
from benchmarks.optimizers._runs import missing, run_of
from benchmarks.optimizers._summary import at, at_edge, middle, rows_of, time_to
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS
from jaxkfac import value_grad_and_factors

pytestmark = pytest.mark.standard_promotion


def line(method, setting, seed, budget, validation, error=None):
    steps = list(range(len(validation)))
    curve = dict.fromkeys(("steps", "cpu_s", "wall_s"), steps) | {"validation": validation}
    about = {"method": method, "setting": setting, "seed": seed, "budget": budget}
    made = {"date": "2026-01-02", "versions": {"jax": "1"}, "run_cpu_s": 6.0}
    return about | curve | made | {"error": error, "compile_cpu_s": 1.0}


def regression(name="regression"):
    """Least squares of a layer, with everything a problem has."""
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    y = x @ np.ones((3, 2), np.float32)

    def loss(params, batch, mark):
        outputs = mark("gaussian", batch[0] @ params["w"], batch[1])
        return 0.5 * jnp.square(outputs - batch[1]).sum(-1).mean()

    return Problem(
        name=name,
        title="Regression",
        measure="loss",
        fisher="exact",
        budget=0.3,
        data=lambda: {"x": x, "y": y},
        initial=lambda seed: {"w": np.zeros((3, 2), np.float32)},
        batch=lambda data, seed, step: (data["x"], data["y"]),
        loss=loss,
        validate=lambda params, data: loss(params, (data["x"], data["y"]), unmarked),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "lbfgs", "kfac_fixed", "kfac_adaptive"])
def test_every_optimizer_lowers_the_loss(name):
    problem, method = regression(), METHODS[name]
    key = Key(name, json.dumps(dict(method.settings[-1])), 1, 0.02)
    found = run_of(problem, method, problem.data(), key)
    assert found["error"] is None
    assert found["validation"][-1] < found["validation"][0]
    assert found["cpu_s"][-1] >= 0.02 and found["compile_cpu_s"] > 0


def random_images():
    """In place of the ResNet's data, which are downloaded."""
    rng, module = np.random.default_rng(0), sys.modules["benchmarks.optimizers.problems.resnet"]

    def of(count):
        images = rng.random((count, 28, 28, 1), np.float32)
        return images, rng.integers(10, size=count, dtype=np.int32)

    names = ("images", "labels", "validation_images", "validation_labels")
    return dict(zip(names, (*of(module.TRAIN), *of(module.HELD_OUT)), strict=True))


@pytest.mark.default(3, slow=3)
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_losses_with_marks_are_those_without_and_data_are_as_described(name):
    problem = PROBLEMS[name]
    params, data = problem.initial(0), random_images() if name == "resnet" else problem.data()
    kinds = []

    def seen(kind, outputs, targets, weight=1.0):
        kinds.append(kind)
        return outputs

    for step in (0, 7):
        batch = problem.batch(data, 0, step)
        shape = jax.eval_shape(lambda p, b: problem.loss(p, b, seen), params, batch)
        assert shape.shape == ()
    assert set(kinds) <= {"gaussian", "bernoulli", "categorical"}
    assert jax.eval_shape(problem.validate, params, data).shape == ()
    again = problem.batch(data, 0, 7)
    assert all(map(np.array_equal, jax.tree.leaves(batch), jax.tree.leaves(again)))


@pytest.mark.exhaustive
def test_the_resnet_with_marks_has_the_loss_and_gradient_of_the_one_without():
    problem, data = PROBLEMS["resnet"], random_images()
    params, batch = problem.initial(0), problem.batch(data, 0, 0)
    few = jax.tree.map(lambda x: x[:16], batch)
    ours = value_grad_and_factors(
        lambda params, batch: problem.loss(params, batch, marked), fisher=problem.fisher
    )
    value, grads, factors = jax.jit(ours)(params, few, key=jax.random.key(0))
    expected = jax.value_and_grad(lambda params: problem.loss(params, few, unmarked))
    plain, slopes = jax.jit(expected)(params)
    assert value == pytest.approx(float(plain), rel=1e-5) and factors.terms == 16
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), grads, slopes)


@pytest.mark.parametrize("name", ["poisson", "burgers"])
def test_the_solution_solves_its_equation(name):
    """The residual of the true solution is zero, by differences of its values."""
    module = sys.modules[f"benchmarks.optimizers.problems.{name}"]
    with jax.enable_x64(True):
        points = np.array([[0.31, 0.42], [0.72, 0.13], [0.55, 0.9]])
        e, (dx, dy) = 1e-3, np.eye(2) * 1e-3
        if name == "poisson":
            u = lambda p: np.asarray(module.solution(jnp.asarray(p)))
            laplace = sum(u(points + d) + u(points - d) - 2 * u(points) for d in (dx, dy)) / e**2
            np.testing.assert_allclose(laplace, -2 * np.pi**2 * u(points), rtol=1e-4)
        else:
            u = lambda p: module.solution(p[:, 0], p[:, 1])
            first = [(u(points + d) - u(points - d)) / (2 * e) for d in (dx, dy)]
            second = (u(points + dx) + u(points - dx) - 2 * u(points)) / e**2
            residual = first[1] + u(points) * first[0] - module.VISCOSITY * second
            np.testing.assert_allclose(residual, 0, atol=1e-3 * np.abs(first[1]).max())


def test_the_grid_comes_first_and_then_the_seeds_of_what_it_has_chosen(tmp_path):
    problem, settings = regression(), ({"learning_rate": 1.0}, {"learning_rate": 2.0})
    ends = {1.0: [3.0, None], 2.0: [3.0, 2.0]}

    def run(problem, data, setting, *, seed, budget):
        return line("", {}, 0, 0, ends[setting["learning_rate"]])

    def fails(problem, data, setting, *, seed, budget):
        raise ValueError("no\nmore")

    methods = [Method("adamw", "A", settings, run), Method("never", "N", settings, fails)]
    order, record = [], Record(tmp_path / "problem.jsonl")
    while key := missing(record, methods, problem):
        order.append(key)
        found = run_of(problem, {m.name: m for m in methods}[key.method], {}, key)
        found |= {"method": key.method, "setting": json.loads(key.setting)}
        record.add(found | {"seed": key.seed, "budget": key.budget})
    first, second = (json.dumps(x) for x in settings)
    grid = [Key(name, s, 0, GRID * 0.3) for name in ("adamw", "never") for s in (first, second)]
    assert order == grid + [Key("adamw", second, seed, 0.3) for seed in SEEDS]
    assert record.lines[2]["error"] == "ValueError: no"
    assert chosen(record.lines, methods[0], problem) == settings[1]
    assert target(record.lines, methods[0], problem) == 2.0
    goal, equal, rows = rows_of(record.lines, {"adamw": methods[0], "n": methods[1]}, problem)
    row = rows["adamw"]
    assert (goal, equal, row.final, row.seeds) == (2.0, None, (2.0, 2.0, 2.0), 5)
    assert "2 of 2 runs failed: ValueError: no" in rows["never"].remark


def test_what_fails_twice_in_one_way_is_not_tried_again(tmp_path):
    problem, method = PROBLEMS["poisson"], METHODS["kfac_jax_fixed"]
    record, errors = Record(tmp_path / "poisson.jsonl"), ["E: x", "E: x"]
    for setting, error in zip(method.settings, errors, strict=False):
        assert missing(record, [method], problem) is not None
        record.add(line(method.name, dict(setting), 0, GRID * problem.budget, [], error))
    assert missing(record, [method], problem) is None
    assert "- kfac-jax, fixed: 2 of 2 runs failed: E: x; 3 of 5 runs of the grid are left out" in (
        section(record.lines, problem)
    )
    record.lines[1]["error"] = "E: y"
    assert missing(record, [method], problem) is not None


def test_the_error_of_a_peer_is_the_line_that_names_it():
    text = "Traceback:\n  File x\njax.errors.OneError: bad shape\n----\nFor simplicity, JAX\n"
    assert error_of(text) == "jax.errors.OneError: bad shape"
    bare = (
        "Traceback:\n  File x, line 3\n    assert same(x)\nAssertionError\n----\nFor simplicity\n"
    )
    assert error_of(bare) == "AssertionError: assert same(x)"
    assert error_of("Killed\n\n") == "Killed" and error_of("") == ""


def test_a_record_goes_on_behind_its_last_whole_line(tmp_path):
    path, whole = tmp_path / "a.jsonl", line("adamw", {"a": 1.0}, 0, 1.0, [1.0])
    Record(path).add(whole)
    with path.open("a") as file:
        file.write('{"method": "ada')
    record = Record(path)
    assert record.lines == [whole] and Key("adamw", '{"a": 1.0}', 0, 1.0) in record
    record.add(whole | {"seed": 1})
    assert [x["seed"] for x in Record(path).lines] == [0, 1]


def test_a_setting_at_the_edge_of_its_grid_is_told():
    settings = [{"rate": rate, "period": 20} for rate in (0.1, 0.2, 0.4)]
    assert at_edge(settings[1], settings) == [] == at_edge({}, settings)
    assert at_edge(settings[0], settings) == ["rate 0.1 is the least that was tried"]
    assert at_edge(settings[2], settings) == ["rate 0.4 is the greatest that was tried"]


@pytest.mark.slow
def test_the_seeds_of_a_setting_share_its_program():
    """And are the runs that they are without it: the seed is an argument of the program."""
    problem, built = regression(), []

    def build(problem, data, setting):
        built.append(setting["learning_rate"])

        def step(carry, batch, key, progress):
            noise = setting["learning_rate"] * jax.random.normal(key, (3, 2))
            return ({"w": carry[0]["w"] + noise},), 0.0

        return Steps(lambda params: (params,), step)

    run = here(build)
    call = lambda rate, seed: run(
        problem, problem.data(), {"learning_rate": rate}, seed=seed, budget=1e-9
    )
    ends = [call(*x)["validation"][1] for x in ((1.0, 1), (1.0, 2), (1.0, 1), (2.0, 1), (1.0, 1))]
    assert built == [1.0, 2.0, 1.0] and len({ends[0], ends[1], ends[3]}) == 3
    assert ends[0] == ends[2] == ends[4]
    key = jax.random.fold_in(jax.random.key(2), 0)
    params = {"w": jax.random.normal(key, (3, 2))}
    assert ends[1] == pytest.approx(float(problem.validate(params, problem.data())), rel=1e-5)


PEER = """
import sys
for line in sys.stdin:
    seed, budget = line.split()
    if seed == "3":
        assert False
    print('{"validation": [%s, %s]}' % (seed, budget), flush=True)
"""


def test_the_process_of_a_peer_is_kept_and_its_failure_named(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{PEER}")
    script.chmod(0o755)
    monkeypatch.setenv("KFAC_JAX_PYTHON", str(script))
    problem, run = regression(), in_peer("_kfac_jax")
    call = lambda seed: run(problem, problem.data(), {"a": 1.0}, seed=seed, budget=0.5)
    assert [call(1), call(2)] == [{"validation": [seed, 0.5]} for seed in (1, 2)]
    for _ in range(2):  # the second time in a process of its own
        with pytest.raises(RuntimeError, match="status 1: AssertionError: assert False"):
            call(3)
    assert call(4) == {"validation": [4, 0.5]}


def test_time_to_a_target_lies_between_evaluations():
    run = line("adamw", {}, 1, 1.0, [8.0, 4.0, None, 2.0, 3.0])
    assert time_to(run, 6.0) == 0.5 and time_to(run, 2.5) == 3.0 and time_to(run, 9.0) == 0.0
    assert time_to(run, 1.0) == float("inf")
    assert at(run, "steps", 0.25) == 7.0 and at(run, "steps", 5.0) == float("inf")
    assert middle([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_the_page_names_what_is_missing_and_what_failed():
    problem = PROBLEMS["autoencoder"]
    setting = dict(METHODS["adamw"].settings[0])
    ended = line("adamw", setting, 0, GRID * problem.budget, [2.0, 1.0])
    failed = line("muon", dict(METHODS["muon"].settings[0]), 0, GRID * problem.budget, [], "E: x")
    page = section([ended, failed], problem)
    assert "- AdamW: 4 of 5 runs of the grid are to be made" in page
    assert "- Muon: 1 of 1 runs failed: E: x" in page and "L-BFGS" not in page


@pytest.mark.slow
def test_a_report_has_a_table_and_a_figure(tmp_path):
    problem, record = PROBLEMS["poisson"], Record(tmp_path / "poisson.jsonl")
    for name, end in (("adamw", 20.0), ("lbfgs", 1.0), ("kfac_adaptive", 1.4)):
        for i, setting in enumerate(METHODS[name].settings):
            record.add(line(name, dict(setting), 0, GRID * problem.budget, [90.0, end + i]))
        best = dict(METHODS[name].settings[0])
        for seed in SEEDS:
            record.add(line(name, best, seed, problem.budget, [90.0, 50.0, end + seed / 10]))
    write_report(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert (
        "Target, AdamW's median at the end: 20.3." in page
        and "with jax 1, no XLA flags: 29 runs, 2.9 CPU minutes" in page
        and "(poisson.svg)" in page
    )
    # L-BFGS's third seed falls from 50 to 1.3 in its second step: 29.7 / 48.7 of it is 0.61.
    row = "| L-BFGS | memory_size 10 | 1.3 (1.1 to 1.5) | 1.3 (1.1 to 1.5) | 1.61 (1.607 to 1.612)"
    assert row in page and "- L-BFGS: memory_size 10: 1; memory_size 30: 2;" in page
    assert "at most 0.1 x AdamW's: reached, 1.7 against 2.03" in page
    assert "at most L-BFGS's: NOT reached, 1.7 against 1.3" in page
    assert (tmp_path / "poisson.svg").read_bytes().startswith(b"<?xml")
    assert page.count("No run has been made yet.") == len(PROBLEMS) - 1


def test_the_clock_stands_still_while_the_loss_is_evaluated(monkeypatch):
    """A clock that every reading moves by one: two readings a step, whatever is evaluated."""
    problem, ticks = regression(), iter(range(10**6))
    monkeypatch.setattr(_loop.time, "process_time", lambda: next(ticks))
    carry = ({"w": jnp.zeros((3, 2))},)
    curve = _loop.train(
        lambda carry, batch, number, progress: (carry, jnp.float32(1)),
        carry, problem, problem.data(), seed=0, budget=10.0,
    )  # fmt: skip
    assert curve["cpu_s"][-1] == curve["steps"][-1] == 10


@pytest.mark.slow
def test_problems_need_nothing_of_ours_to_be_read_by_a_peer():
    code = (
        "import sys; sys.modules['jaxkfac'] = None\n"
        "from benchmarks.optimizers.problems import PROBLEMS; import benchmarks.optimizers._loop\n"
        "print(len(PROBLEMS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(PROBLEMS)
