"""Records, figures and the page, from numbers made up here."""

import json
import math
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxkfac.interception import find_layers
from jaxkfac.jobs.report import (
    EpochRecord,
    RunRecords,
    SpectrumRecord,
    coverage_rows,
    race_record,
    race_sentence,
    report_page,
    runs_table,
    seeds_page,
    seeds_record,
    seeds_table,
    spectra_table,
    versions,
)
from jaxkfac.jobs.report._factor_figures import factor_figures
from jaxkfac.jobs.report._spectra import CoverageRow, _of_side


@pytest.fixture(scope="module")
def runs():
    epochs = [
        EpochRecord(4 * e, 128 * e, 0.5 * e, 1 / e, 0.5, 1.2 / e, 0.4, 1.2 / e, 0.4)
        for e in range(1, 6)
    ]
    losses = [2.0 / (i + 1) for i in range(20)]
    run = RunRecords(losses, epochs, 3.5, 1, [None, *losses[1:]], losses)
    return {"kfac": run, "adamw": run._replace(skipped=0)}


@pytest.fixture(scope="module")
def spectra():
    raw = np.array([[-1e-9, 1e-8, 0.5, 2.0], [0.1, 0.2, 0.3, 0.4]])
    clipped = np.maximum(raw, raw.max(-1, keepdims=True) / 100)
    return [
        *_of_side("blocks/up/kernel", "A", "blocks/up/kernel", raw, clipped),
        *_of_side("blocks/gate/kernel", "A", "blocks/up/kernel", raw, clipped),
        *_of_side("blocks/up/kernel", "G", "blocks/up/kernel", raw, clipped),
        *_of_side("norm/scale", "diagonal", "norm/scale", np.zeros(3), np.zeros(3)),
    ]


@pytest.fixture(scope="module")
def coverage():
    def loss(params, x):
        scaled = jnp.sin(x @ params["<w>"]) * params["scale"]
        return jnp.arctan2(scaled, params["free"].sum()).mean()

    params = {"<w>": jnp.ones((3, 2)), "scale": jnp.ones(2), "free": jnp.ones(2)}
    layers = find_layers(loss, params, jnp.ones((4, 3)))
    return coverage_rows(layers, {name: x.size for name, x in params.items()})


def test_run_records_survive_json(runs):
    plain = json.loads(json.dumps(runs["kfac"].to_plain()))
    assert RunRecords.from_plain(plain) == runs["kfac"]


def test_a_spectrum_is_descending_with_its_condition_before_and_after(spectra):
    first, second = spectra[:2]
    assert first.raw == sorted(first.raw, reverse=True)
    assert first.slice == (0,) and second.slice == (1,)
    assert first.top == 2.0 and first.condition_raw is None
    assert first.condition_clipped == pytest.approx(100.0)
    assert first.raised == 2 and second.raised == 0
    assert second.condition_raw == second.condition_clipped == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("values", "rank"), [([1.0, 1.0, 1.0], 3.0), ([5.0, 0.0, 0.0], 1.0), ([0.0, 0.0], 0.0)]
)
def test_the_entropy_rank_counts_equal_directions(values, rank):
    (record,) = _of_side("w", "A", "w", np.array(values), np.array(values))
    assert record.entropy_rank == pytest.approx(rank)


def test_shares_of_covered_and_uncovered_parameters_add_up_to_one(coverage):
    assert sum(row.share for row in coverage) == pytest.approx(1.0)
    (free,) = (row for row in coverage if row.kind == "uncovered")
    assert free.name == "free" and free.reason and free.inputs is None


def test_a_parameter_of_two_layers_is_covered_once():
    table = [
        CoverageRow("embed@embedding", "embedding", 9, 4, (), None, 36, 0.75),
        CoverageRow("embed", "dense", 4, 9, (), None, 36, 0.75),
        CoverageRow("free", "uncovered", None, None, (), None, 12, 0.25, "no layer reads it"),
    ]
    page = report_page(
        title="t", lead="l", runs={}, spectra=[], coverage=table, config={}, versions={}
    )
    assert "Factors cover 75.0% of the parameters." in page


@pytest.mark.exhaustive
def test_figures_are_the_same_bytes_for_the_same_numbers(spectra):
    figures = factor_figures(spectra)
    assert figures == factor_figures(spectra) and set(figures) == {"spectra", "ranks", "conditions"}
    assert all(figure.startswith(b"<?xml") for figure in figures.values())


def test_the_page_needs_nothing_from_elsewhere_and_escapes_names(runs, spectra, coverage):
    page = report_page(
        title="A <title>",
        lead="One line & more.",
        runs=runs,
        spectra=spectra,
        coverage=coverage,
        config={"seed": 0, "kfac": {"damping": 1e-3}},
        versions=versions(),
    )
    sources, tags = [], set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.add(tag)
            sources.extend(v for k, v in attributes if k in ("src", "href"))

    Reader().feed(page)
    assert "svg" in tags and not sources and not tags & {"img", "link", "iframe"}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    assert "A &lt;title&gt;" in page and "&lt;w&gt;" in page and "kfac.damping" in page


def test_a_page_without_runs_leaves_their_part_out(spectra):
    page = report_page(
        title="t", lead="l", runs={}, spectra=spectra, coverage=[], config={}, versions={}
    )
    assert "Training" not in page and "Spectra" in page


def test_a_page_on_factors_has_the_runs_after_them(runs, spectra):
    page = report_page(
        title="t", lead="l", runs=runs, spectra=spectra, coverage=[], config={}, versions={},
        answer=["The factors."], runs_last=True,
    )  # fmt: skip
    assert page.index("The factors.") < page.index("Spectra of") < page.index(">Training<")
    assert "K-FAC reaches" not in page and "test accuracy, K-FAC" in page


def test_the_headlines_metric_is_drawn_first_by_updates_and_by_seconds(runs):
    page = report_page(
        title="t", lead="l", runs=runs, spectra=[], coverage=[], config={}, versions={}
    )
    assert "error on the validation images" in page
    titles = re.findall(r'<figure class="panel"><figcaption>(.*?)</figcaption>', page)
    assert titles[:2] == ["Validation error, by updates", "Validation error, by training time, s"]
    assert page.count("target, 3 %") == 2


def test_tables_print_every_record(runs, spectra):
    console = Console(width=200)
    with console.capture() as capture:
        for table in (runs_table(runs), spectra_table(spectra)):
            console.print(table)
    text = capture.get()
    for word in ("K-FAC", "AdamW", "blocks/gate/kernel", "diag."):
        assert word in text


def run_with(*errors, accuracy=0.9):
    """A run of 2 updates and half a second an epoch, with these errors on the validation set."""
    epochs = [
        EpochRecord(2 * i, 64 * i, 0.5 * i, 1.0, 0.9, 1.0, accuracy, 1.0, 1 - error)
        for i, error in enumerate(errors, 1)
    ]
    return RunRecords([], epochs)


def test_the_sentence_says_who_is_first_in_updates_and_who_in_seconds():
    early, late = run_with(0.5, 0.03, 0.01), run_with(0.5, 0.04, 0.03)
    slow = late._replace(epochs=[x._replace(step=1, seconds=9.0) for x in late.epochs])
    assert race_sentence({"kfac": [early], "adamw": [late]}) == (
        "K-FAC reaches 3% error on the validation images after 4 updates and 1.0 s; AdamW reaches "
        "3% error on the validation images after 6 updates and 1.5 s. K-FAC is faster in updates "
        "and in seconds."
    )
    parted = race_sentence({"kfac": [slow], "adamw": [late]})
    assert parted.endswith("K-FAC is faster in updates, AdamW is faster in seconds.")
    equal = race_sentence({"kfac": [late], "adamw": [late]})
    assert equal.endswith("Neither is faster in updates or in seconds.")
    assert race_sentence({"adamw": [run_with(0.5)]}).startswith("AdamW does not reach 3% error")


STUDENT = 4.302652729911275  # 97.5 % of two degrees of freedom


def test_of_several_seeds_the_sentence_has_means_with_their_intervals():
    quick, slow = [run_with(0.5, 0.03), run_with(0.03), run_with(0.5, 0.5, 0.03)], run_with(0.5)
    logs = [math.log(x) for x in (4, 2, 6)]  # updates
    mean = sum(logs) / 3
    half = STUDENT * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    middle, low, high = (f"{math.exp(x):.0f}" for x in (mean, mean - half, mean + half))
    said = race_sentence({"kfac": quick})
    assert f"after {middle} [{low}, {high}] updates and 0.9 [0.2, 3.6] s" in said
    assert said.endswith("s (geometric means of 3 seeds, 95% intervals).")
    missed = race_sentence({"kfac": quick, "adamw": [*quick[:2], slow]})
    assert missed.endswith(
        "AdamW does not reach 3% error on the validation images in 1 of 3 seeds."
    )


def test_of_several_seeds_one_is_faster_where_the_interval_of_the_ratio_leaves_one_out():
    later = [run_with(*[0.5] * n, 0.03) for n in (1, 3, 5)]  # 4, 8 and 12 updates
    halves = [run_with(*[0.5] * n, 0.03) for n in (0, 1, 2)]
    ratio = race_record({"kfac": halves, "adamw": later})["ratios"]["updates"]
    assert ratio == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5})
    said = race_sentence({"kfac": later, "adamw": halves})
    shown = "AdamW is faster in updates (K-FAC's over AdamW's: 2.00 [2.00, 2.00]) and in seconds"
    assert shown in said
    uneven = race_record({"kfac": halves, "adamw": later[::-1]})
    logs = [math.log(x) for x in (2 / 12, 4 / 8, 6 / 4)]
    mean = sum(logs) / 3
    half = STUDENT * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    expected = {"mean": mean, "low": mean - half, "high": mean + half}
    found = uneven["ratios"]["updates"]
    assert found == pytest.approx({name: math.exp(x) for name, x in expected.items()})
    assert "Neither is shown to be faster in updates" in uneven["sentence"]


def test_the_record_of_a_race_keeps_the_seeds_that_do_not_reach_the_target():
    record = race_record({"kfac": [run_with(0.03), run_with(0.5)], "adamw": [run_with(0.03)] * 2})
    json.dumps(record, allow_nan=False)
    kfac, adamw = record["optimizers"]["kfac"], record["optimizers"]["adamw"]
    assert kfac["updates"] == {"each": [2, None], "interval": None}
    assert adamw["seconds"]["interval"] == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5})
    assert record["ratios"] == {"updates": None, "seconds": None}


def test_several_seeds_are_means_and_intervals():
    runs = {"kfac": [run_with(0.5, 0.03), run_with(0.02)], "adamw": [run_with(0.02), run_with(0.5)]}
    page = seeds_page(runs, folders={"0": "seed-0/report.html", "1": "seed-1/report.html"})
    assert '<td class="n">3 [0, 231]</td><td class="n">0.7 [0.0, 57.8]</td>' in page
    assert (
        page.count('<td class="n">1 of 2 seeds</td>') == 2 and 'href="seed-1/report.html"' in page
    )
    assert page.index("K-FAC reaches") < page.index("<table>")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(seeds_table(runs))
    assert "3 [0, 231]" in capture.get() and "…" not in capture.get()
    final = seeds_record(runs)["final"]["kfac"]
    assert final["seconds"]["mean"] == 0.75 and final["test_accuracy"]["low"] == 0.9


def test_intervals_end_where_accuracies_and_seconds_do_but_not_in_the_record():
    runs = {"kfac": [run_with(0.5, accuracy=0.95), run_with(0.5, 0.5, accuracy=1.0)]}
    page = seeds_page(runs, folders={})
    assert ">97.50 [65.73, 100.00]<" in page and ">0.8 [0.0, 3.9]<" in page
    assert "cut off at 0 and at 100 % accuracy" in page
    final = seeds_record(runs)["final"]["kfac"]
    assert final["test_accuracy"]["high"] > 1 and final["seconds"]["low"] < 0


def test_records_hold_plain_numbers(spectra):
    json.dumps([record._asdict() for record in spectra], allow_nan=False)
    assert all(isinstance(r, SpectrumRecord) and math.isfinite(r.top) for r in spectra)
