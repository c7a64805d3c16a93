"""The page and tables of an analysis, also of a model with very many layers."""

import json
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxkfac.curvature import eigendecompose
from jaxkfac.curvature.capacity import capacity_metrics
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.jobs.report import (
    AnalysisRecord,
    CapacityReport,
    MemoryRow,
    ModelMemory,
    analysis_page,
    coverage_rows,
    curvature_answer,
    memory_plan_table,
    spectrum_records,
)
from jaxkfac.jobs.report._analysis import (
    _MEASURES,
    DepthStack,
    _depth_panels,
    depth_table,
    exact_lines,
    spectra_summary_table,
    stacks_of,
    stage_sums,
)
from jaxkfac.memory import track

PLAN = [
    MemoryRow("always", "Python", 1 << 20),
    MemoryRow("gather, Lanczos", "the model", 2 << 20),
    MemoryRow("gather", "factors", 4 << 20),
    MemoryRow("decompose", "a matrix", 8 << 20),
]


def record_of(fn, params):
    rng = np.random.default_rng(0)
    batch = jnp.array(rng.standard_normal((8, 3)), jnp.float32), jnp.array(rng.integers(0, 3, 8))
    objective = Objective(fn, Categorical())
    factors = value_grad_and_factors(objective)(params, batch).factors
    bases = eigendecompose(factors, vectors=False)
    layers = {layer.name: layer for layer in factors.layers}
    table = type("Table", (dict,), {"uncovered": ()})(layers)
    sizes = {name: layer.num_parameters for name, layer in layers.items()}
    with track("analysis") as stages:
        pass
    return AnalysisRecord(
        model="models/made up",
        texts={"texts": 8, "tokens": 8, "left out": 0, "loss": 1.0},
        spectra=spectrum_records(bases),
        capacity=CapacityReport(capacity_metrics(bases, num_examples=8)),
        exact={"eigenvalues": [2.0, 1.0], "error_bounds": [0.1, 0.2], "steps": 4},
        plans=[ModelMemory("models/made up", PLAN, {"gather": 6 << 20}, passes=2, disk=1 << 20)],
        coverage=coverage_rows(table, sizes),
        config={"seed": 0},
        versions={"jaxkfac": "1"},
        stages=stages,
        host_memory={"resident": 1 << 20, "peak": 7 << 20},
    )


def weights(number):
    rng = np.random.default_rng(1)
    return [jnp.array(rng.standard_normal((3, 3)), jnp.float32) for _ in range(number)]


@pytest.fixture(scope="module")
def stacked():
    import jax

    def fn(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["model"]["layers"])[0]

    return record_of(fn, {"model": {"layers": jnp.stack(weights(5))}})


@pytest.fixture(scope="module")
def many():
    def fn(params, x):
        for w in params.values():
            x = x + 0.01 * jnp.tanh(x @ w["kernel"])
        return x

    return record_of(fn, {f"h/{i}": {"kernel": w} for i, w in enumerate(weights(64))})


def test_stages_are_sums_of_their_rows_and_of_what_is_always_there():
    sums = stage_sums(PLAN, on_device=True)
    assert sums == {"gather": 7 << 20, "Lanczos": 3 << 20, "decompose": 9 << 20}


def printed(*tables):
    console = Console(width=160)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


@pytest.mark.slow
def test_the_plan_stands_beside_what_was_measured(stacked):
    peaks = stacked.plans[0].peaks
    text = printed(memory_plan_table("m", PLAN, disk=1 << 20, peaks=peaks))
    line = next(line for line in text.splitlines() if line.startswith("gather, sum"))
    assert line.split()[-4:] == ["7", "MiB", "6", "MiB"]


def test_depth_has_a_row_for_each_block_whose_shares_are_one(stacked):
    (stack,) = stacks_of(stacked.capacity)
    rows = list(stack.rows())
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert sum(float(row[-1].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)
    assert "model/layers: entropy rank" in printed(depth_table(stacked.capacity))


def test_depth_has_a_row_of_panels_for_each_part_of_a_block():
    blocks = [
        SimpleNamespace(entropy_rank=1.0 + i, participation_ratio=2.0, trace=3.0) for i in range(5)
    ]
    layers = dict.fromkeys(("attention/q", "attention/k", "mlp/up"), blocks)
    panels = _depth_panels(DepthStack("model/layers", layers))
    titles = [
        f"{part}: {measure}" for part in ("attention", "mlp") for measure in _MEASURES.values()
    ]
    assert re.findall("<figcaption>(.*?)</figcaption>", panels) == titles
    drawn = re.findall(r'class="line (\w+)" data-label="(\w+)"', panels)
    assert drawn == [("a", "q"), ("adamw", "k")] * 3 + [("a", "up")] * 3
    assert re.findall(r'key (\w+)"></i>(\w+)', panels) == [("a", "q"), ("adamw", "k"), ("a", "up")]


def test_conditions_that_are_all_infinite_have_no_range(stacked):
    infinite = [record._replace(condition_raw=None) for record in stacked.spectra]
    _, said, *_ = curvature_answer(infinite, stacked.capacity)
    assert said.startswith("Before clipping, the condition numbers of all its 10 factors are infi")
    _, said, *_ = curvature_answer([*infinite[1:], stacked.spectra[0]], stacked.capacity)
    assert "range over" in said and ", and 9 are infinite" in said


@pytest.mark.slow
def test_the_summary_has_one_line_for_all_depths_of_a_factor(many):
    text = printed(spectra_summary_table(many.spectra))
    assert len(text.splitlines()) == 4 and " 64 " in text
    assert depth_table(many.capacity) is None


@pytest.mark.slow
def test_a_page_of_very_many_layers_is_short_and_folds_its_tables(many):
    page = analysis_page(many)
    assert len(page) < 4_000_000
    open_part = re.sub(r"<(details|figure)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert open_part.count("<tr") < 90 < page.count("<tr")
    assert "64 layers" in page


@pytest.mark.slow
def test_the_exact_eigenvalues_and_the_plan_are_on_the_page_and_in_json(stacked):
    page = analysis_page(stacked)
    for word in ("Plan and peaks", "Exact Fisher", "Depth: model/layers", "6 MiB"):
        assert word in page
    assert "2 ± 0.1" in exact_lines(stacked)[0]
    assert exact_lines(stacked._replace(exact=None)) == []
    plain = json.loads(json.dumps(stacked.to_dict(), allow_nan=False))
    assert plain["peaks"] == {"gather": 6 << 20} and len(plain["plan"]) == 4
    assert plain["model"] == "models/made up" and plain["compared"] is None


@pytest.mark.slow
def test_the_page_of_a_model_begins_with_its_curvature_and_ends_with_memory(stacked):
    page = analysis_page(stacked)
    answer = 'class="answer">The curvature of 45 parameters has an entropy rank'
    order = (answer, ">Factors<", ">Capacity<", ">Plan and peaks<", ">Memory<")
    places = [page.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.slow
def test_plan_and_peaks_of_both_models_are_kept(stacked):
    other = ModelMemory("models/<other>", PLAN[:3], {"gather": 5 << 20}, passes=1, disk=1 << 20)
    both = stacked._replace(plans=[*stacked.plans, other])
    page = analysis_page(both)
    for word in (
        "The model that it is compared with, models/&lt;other&gt;",
        "2 backward passes",
        "a backward pass",
        "5 MiB",
    ):
        assert word in page
    plain = json.loads(json.dumps(both.to_dict(), allow_nan=False))
    assert plain["peaks"] == {"gather": 6 << 20}
    assert plain["compared"]["peaks"] == {"gather": 5 << 20}
    assert plain["compared"]["model"] == "models/<other>" and len(plain["compared"]["plan"]) == 3
