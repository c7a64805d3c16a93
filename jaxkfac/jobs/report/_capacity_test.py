"""Families of layers over depth, their figures, and the tables of capacity metrics."""

import json
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose
from jaxkfac.curvature.capacity import (
    capacity_interval,
    capacity_metrics,
    compare_capacity,
)
from jaxkfac.jobs.report import (
    CapacityReport,
    _factor_figures,
    print_curvature,
    report_page,
    spectrum_records,
)
from jaxkfac.jobs.report._capacity import (
    capacity_table,
    comparison_table,
    curvature_table,
    model_table,
)
from jaxkfac.jobs.report._factor_figures import conditions_figure, ranks_figure, spectra_figure
from jaxkfac.jobs.report._spectra import _of_side, families, joined

LAYERS = (layer("up/kernel", (2, 4, 3), stack=1), layer("down/kernel", (3, 2)))


def measure(seed, layers=LAYERS):
    factors = random_factors(layers, jax.random.key(seed))
    return capacity_metrics(eigendecompose(factors, vectors=False), num_examples=100)


@pytest.fixture(scope="module")
def report():
    metrics, other = measure(0), measure(1, LAYERS[:1])
    interval = capacity_interval([metrics, measure(2)])
    return CapacityReport(metrics, interval, compare_capacity(other, metrics), "update 7", "2 <b>")


def record(name, side="A", source=None, values=(1.0, 2.0), slices=1):
    raw = np.tile(np.asarray(values), (slices, 1)) if slices > 1 else np.asarray(values)
    return list(_of_side(name, side, source or name, raw, np.maximum(raw, raw.max() / 100)))


def text(*tables, width=120):
    console = Console(width=width)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_numbered_layers_are_one_family_in_the_order_of_their_numbers():
    names = ["net/10/w/kernel", "net/2/w/kernel", "block_3/w", "block_1/w", "a[1]/w", "a[0]/w"]
    found = families([r for name in names for r in record(name)], shared_once=True)
    assert {f.title: [r.layer for r in f.members] for f in found} == {
        "net/*/w": ["net/2/w/kernel", "net/10/w/kernel"],
        "block_*/w": ["block_1/w", "block_3/w"],
        "a[*]/w": ["a[0]/w", "a[1]/w"],
    }


def test_a_number_inside_a_word_and_a_lone_number_keep_the_name():
    found = families([*record("conv2d/kernel"), *record("layer_0/kernel")], shared_once=True)
    assert [f.title for f in found] == ["conv2d", "layer_0"]


def test_slices_of_a_stack_are_depths():
    (family,) = families(record("up/kernel", slices=3), shared_once=True)
    assert [r.slice for r in family.members] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("shared_once", [True, False])
def test_a_shared_input_is_drawn_once_with_its_readers_where_asked(shared_once):
    q = [f"{i}/q/kernel" for i in range(2)]
    records = [r for i in range(2) for n in "qk" for r in record(f"{i}/{n}/kernel", "A", q[i])]
    titles = [f.title for f in families(records, shared_once=shared_once)]
    assert titles == (["*/q, k"] if shared_once else ["*/q", "*/k"])


def test_readers_of_one_folder_are_listed_behind_it():
    assert joined(["a/q/kernel", "a/k/kernel"]) == "a/q, k"
    assert joined(["head/kernel"]) == "head"


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "records",
    [
        [],
        record("w", values=(0.0, 0.0)),
        record("w", values=(-1e-9, 1.0)),
        [*record("w", values=(1.0,)), *record("w", "G", values=(0.5, 1e9), slices=30)],
    ],
    ids=["none", "zero", "infinite", "deep"],
)
def test_figures_draw_what_is_degenerate(records):
    for figure in (spectra_figure, ranks_figure, conditions_figure):
        assert figure(records).startswith(b"<?xml")


def test_the_conditions_figure_shows_both_ends_and_the_infinite(monkeypatch):
    shown = []
    monkeypatch.setattr(_factor_figures, "svg_bytes", lambda f: shown.append(f) or b"")
    conditions_figure([*record("w", values=(1e-4, 1.0)), *record("v", values=(0.0, 1.0))])
    (axis,) = shown[0].axes
    points = {line.get_marker(): [] for line in axis.lines}
    for line in axis.lines:
        points[line.get_marker()].append(np.max(np.asarray(line.get_xdata(), float)))
    assert sorted(points["o"]) == pytest.approx([100.0, 100.0, 1e4])
    assert len(points[">"]) == 1 and points[">"][0] > 1e4
    assert max(axis.get_xticks()) < points[">"][0]


def test_the_ranks_figure_shows_the_rank_of_every_depth(monkeypatch):
    shown = []
    monkeypatch.setattr(_factor_figures, "svg_bytes", lambda f: shown.append(f) or b"")
    records = [*record("b/0/w", values=(1.0, 1.0)), *record("b/1/w", values=(1.0, 0.0))]
    dots = lambda axis: [line for line in axis.lines if line.get_marker() == "o"]
    ranks_figure(records)
    (row,) = dots(shown[0].axes[0])  # of two blocks: one row, not a line over depth
    np.testing.assert_allclose([row.get_xdata(), row.get_ydata()], [[2.0, 1.0], [0, 0]])
    ticks = [label.get_text() for label in shown[0].axes[0].get_xticklabels()]
    assert {"1", "2", "5"} <= {*ticks}  # not powers of ten with a factor
    ranks_figure([*records, *(r for i in (2, 3, 4) for r in record(f"b/{i}/w", values=(1.0, 0.0)))])
    (line,) = dots(shown[1].axes[0])
    np.testing.assert_allclose(line.get_ydata(), [2.0, 1.0, 1.0, 1.0, 1.0])


def test_the_spectra_figure_lists_factors_with_fewer_than_five_eigenvalues(monkeypatch):
    shown = []
    monkeypatch.setattr(_factor_figures, "svg_bytes", lambda f: shown.append(f) or b"")
    five = record("a/w", values=(1.0, 2.0, 3.0, 4.0, 5.0))
    four, stack = record("b/w", "G", values=(1.0, 3.0, 2.0, 0.0)), record("c/w", slices=3)
    spectra_figure([*five, *four, *stack])
    above, below = shown[0].subfigs
    titles = [axis.get_title(loc="left") for axis in above.axes if axis.lines]
    assert titles == ["a/w\nA, inputs"]
    texts = [written.get_text() for written in below.texts]
    assert texts[6:] == ["c/w", "A, inputs", "3 factors of 2: 2 … 1"]
    assert texts[3:6] == ["b/w", "G, output gradients", "3, 2, 1, 0 (1 raised)"]
    spectra_figure(five)
    assert not shown[1].subfigs and len(shown[1].axes) == _factor_figures.COLUMNS
    spectra_figure(four)
    assert not shown[2].axes and len(shown[2].texts) == 6


@pytest.mark.slow
def test_tables_show_every_layer_and_every_metric(report):
    shown = text(capacity_table(report), model_table(report), comparison_table(report))
    for word in ("up/kernel", "whole model", "PAC-Bayes complexity", "quantile 0.5", "update 7"):
        assert word in shown
    assert "95% interval" in shown and "N = 100" in shown and "…" in shown
    assert text(model_table(CapacityReport(report.metrics))).count("update") == 0


def test_a_part_of_the_parameters_is_not_called_the_whole_model(report):
    measured = report.metrics.model.dimension
    shown = text(*(f(report._replace(parameters=13_352)) for f in (capacity_table, model_table)))
    part = f"{measured} of 13,352 parameters"
    assert shown.count(part) == 2 and "whole model" not in shown.lower()
    assert "whole model" in text(capacity_table(report._replace(parameters=measured)))


def test_changes_of_logarithms_are_differences(report):
    lines = text(model_table(report)).splitlines()
    (entropy,) = (line for line in lines if "spectral entropy" in line)
    (trace,) = (line for line in lines if line.strip().startswith("trace  "))
    assert ("+ " in entropy or "− " in entropy) and "×" in trace


def test_no_line_is_wider_than_a_terminal_of_80_columns(report):
    shown = text(capacity_table(report), width=80)
    assert max(map(len, shown.splitlines())) <= 80 and "up/kernel" in shown


def test_the_page_carries_the_tables_and_escapes_what_others_wrote(report):
    page = report_page(
        title="t", lead="l", runs={}, spectra=[], coverage=[], config={}, versions={},
        capacity=report._replace(before="<i>"),
    )  # fmt: skip
    assert "Capacity" in page and "whole model" in page and "&lt;i&gt;" in page
    assert "2 &lt;b&gt;" in page and "<i>" not in page and "<b>" not in page
    assert "Only in this checkpoint: down/kernel." in page


def test_the_report_is_json_with_only_what_was_asked_for(report):
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert set(plain) == {"capacity", "capacity_interval", "capacity_comparison"}
    assert set(CapacityReport(report.metrics).to_dict()) == {"capacity"}


def test_the_rank_of_a_product_is_the_product_of_the_ranks_in_the_spectra():
    factors = random_factors(LAYERS[1:], jax.random.key(0))
    bases = eigendecompose(factors, vectors=False)
    ranks = [r.entropy_rank for r in spectrum_records(bases)]
    metrics = capacity_metrics(bases, num_examples=10)
    assert metrics["down/kernel"].entropy_rank == pytest.approx(math.prod(ranks), rel=1e-5)


def test_a_terminal_of_80_columns_shows_what_was_found_and_then_the_layers(report):
    spectra = spectrum_records(
        eigendecompose(random_factors(LAYERS, jax.random.key(0)), vectors=False)
    )
    console = Console(width=80)
    for of_report in (report, report._replace(comparison=None, interval=None)):
        with console.capture() as capture:
            print_curvature(console, spectra, of_report)
        shown = capture.get()
        lines = shown.splitlines()
        assert lines[0].startswith("The curvature of ") and max(map(len, lines)) <= 80
        assert "of the trace, more than any other layer" in shown.replace("\n", " ")
        last = lines[-1].split()
        assert last[:2] == ["whole", "model"] and "100.0%" in last and len(last) == 6
        changed = of_report.comparison is not None
        assert ("that of update 7." in shown.replace("\n", " ")) == changed
        assert ("ratio" in shown) == changed


def test_layers_with_the_smallest_traces_share_a_row():
    layers = [layer(f"{i}/kernel", (2, 3)) for i in range(15)]
    metrics = measure(0, layers)
    rows = curvature_table(CapacityReport(metrics)).rows
    traces = [metrics.layers[name].trace for name, *_ in rows[:12]]
    assert traces == sorted((x.trace for x in metrics.layers.values()), reverse=True)[:12]
    assert rows[12][0] == "3 other layers" and len(rows) == 14
    shares = [float(row[1].rstrip("%")) for row in rows[:-1]]
    assert sum(shares) == pytest.approx(100, abs=1)
