"""The page in a browser: nothing fails, nothing overlaps, values and layers are found."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxkfac.jobs.report import EpochRecord, RunRecords, report_page
from jaxkfac.jobs.report._factor_figures import _over_depth
from jaxkfac.jobs.report._html import newcombe, train_answer, wilson
from jaxkfac.jobs.report._layer_table import TableOfLayers
from jaxkfac.jobs.report._page import Axis, Line, panel_html, terminal_table
from jaxkfac.jobs.report._spectra import CoverageRow, _of_side


def _run(scale=1.0, accuracy=0.9, count=6):
    epochs = [
        EpochRecord(4 * e, 128 * e, 0.5 * e, scale / e, 0.5, 1.2 / e, accuracy, 1.2 / e, accuracy)
        for e in range(1, count)
    ]
    losses = [scale / (i + 1) for i in range(4 * (count - 1))]
    return RunRecords(losses, epochs, 3.5, 0, [2.0, None, *losses[2:]], losses)


def _page(num_layers):
    generator, spectra, coverage = np.random.default_rng(0), [], []
    for i in range(num_layers):
        name = f"blocks_{i}/<w>/kernel"
        for side in ("A", "G"):
            values = np.sort(generator.exponential(size=(1 + i % 2, 12))) - 1e-3
            clipped = np.maximum(values, 1e-2)
            stacked = (values, clipped) if i % 2 else (values[0], clipped[0])
            spectra += _of_side(name, side, name, *stacked)
        coverage.append(CoverageRow(name, "dense", 12, 12, (), None, 144, 1 / num_layers))
    runs = {"kfac": _run(accuracy=0.98), "adamw": _run(2.0)}
    return report_page(
        title="A page with a_rather_long_name_that_must_not_make_a_telephone_scroll_sideways",
        lead="Lead.",
        runs=runs,
        spectra=spectra,
        coverage=coverage,
        config={"seed": 0},
        versions={},
        num_test=400,
    )


_PROBE_FIRST = """<script>window.bad = [];
addEventListener("error", (e) => bad.push(e.message));
for (const name of ["error", "warn"]) console[name] = (...x) => bad.push(x.join(" "));
</script>"""
_PROBE_LAST = """<script>
const panels = [...document.querySelectorAll(".panel")];
const boxes = panels.map((p) => p.getBoundingClientRect());
const over = boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
const empty = panels.filter((p) => !p.querySelector("path.line")).length;
const texts = panels.filter((p) => [...p.querySelectorAll("text")].some((t) => {
  const r = t.getBoundingClientRect(), s = p.getBoundingClientRect();
  return r.left < s.left - 1 || r.right > s.right + 1; })).length;
const svg = document.querySelector(".panel svg"), box = svg.getBoundingClientRect();
const [, x, y] = svg.querySelector("path.line:not(.faint)").getAttribute("d")
  .match(/M(-?[\\d.]+) (-?[\\d.]+)/);
const unit = box.width / svg.viewBox.baseVal.width;
svg.dispatchEvent(new PointerEvent("pointermove",
  { clientX: box.left + x * unit, clientY: box.top + y * unit }));
const said = tip.textContent, shown = getComputedStyle(tip).display;
let kept = null;
if (filter) {
  filter.value = "blocks_3/"; filter.dispatchEvent(new Event("input"));
  kept = [...document.querySelectorAll("[data-layer]")].filter((e) => !e.hidden)
    .map((e) => e.dataset.layer);
}
const out = document.createElement("pre"); out.id = "found";
out.textContent = JSON.stringify({ bad, over: over.length, empty, texts, said, shown, kept,
  panels: panels.length, wide: document.documentElement.scrollWidth - innerWidth,
  paper: getComputedStyle(document.body).backgroundColor });
document.body.append(out);
</script>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """What the page says of itself, after it was opened in a window of a width."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    folder = tmp_path_factory.mktemp("pages")

    def opened(page, width, *options):
        page = page.replace("<head>", f"<head>{_PROBE_FIRST}")
        file = folder / "page.html"
        file.write_text(page.replace("</body>", f"{_PROBE_LAST}</body>"))
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                   f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
                   *options, file.as_uri()]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        found = run.stdout.split('<pre id="found">')[1].split("</pre>")[0]
        return json.loads(html.unescape(found))

    return opened


@pytest.mark.parametrize(
    ("num_layers", "width"),
    [
        (20, 1200),
        pytest.param(200, 1200, marks=pytest.mark.slow),
        (20, 500),  # narrower windows are not opened headless
    ],
)
def test_panels_are_full_and_apart_and_say_their_values(browse, num_layers, width):
    found = browse(_page(num_layers), width)
    assert found["bad"] == [] and found["panels"] >= 2 * num_layers + 6
    assert found["over"] == found["empty"] == found["texts"] == 0
    assert found["wide"] <= 0  # nothing makes the page scroll sideways
    assert found["shown"] == "block" and found["said"] == "K-FAC · 4: 2"  # its error, %
    assert len(found["kept"]) >= 4 and all("blocks_3/" in layer for layer in found["kept"])


def test_a_page_of_few_layers_has_no_filter_and_follows_the_night(browse):
    page = report_page(
        title="t", lead="l", runs={"kfac": _run()}, spectra=[], coverage=[], config={}, versions={}
    )
    dark = browse(page, 1200, "--blink-settings=preferredColorScheme=0")
    light = browse(page, 1200, "--blink-settings=preferredColorScheme=1")
    assert dark["kept"] is None and dark["bad"] == light["bad"] == []
    assert (dark["paper"], light["paper"]) == ("rgb(20, 25, 30)", "rgb(251, 251, 249)")


def test_the_answer_says_who_won_by_how_much_and_when():
    runs = {"adamw": _run(2.0), "kfac": _run(accuracy=0.98)}
    held_out, loss = train_answer(runs, 400)
    assert held_out == (
        "K-FAC has won on the test examples: 98.0% against 90.0% of the test examples for "
        "AdamW (8.0 points, 95 % interval 4.8 to 11.5)."
    )
    assert loss == (
        "K-FAC ends with the lower training loss, 0.2 against 0.4 nats. It reached AdamW's "
        "final loss after 12 updates and 1.5 s; AdamW needed 20 updates and 2.5 s."
    )
    assert "neither has won" in train_answer({**runs, "kfac": _run(accuracy=0.91)}, 400)[0]
    (alone,) = train_answer({"kfac": _run()}, 400)
    assert "90.0% (95 % interval 86.7% to 92.6%)" in alone
    assert train_answer({"kfac": RunRecords([], [])}) == []


def test_intervals_are_those_of_the_books():
    low, high = newcombe(56 / 70, 56 / 70, 70)
    assert low == pytest.approx(-high)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998
    assert wilson(0.0, 20)[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[], [None], [0.0], [3.0], [-1.0, 2.0], [float("nan"), 1.0, float("inf")], [1e-300, 1e300]],
)
def test_any_values_are_drawn_without_a_number_that_is_none(values, log):
    line = Line("<one>", range(len(values)), values, names=["<n>"] * len(values))
    panel = panel_html("<t>", [line], Axis("x", log), Axis("y", log), layer='"<l>"')
    assert "nan" not in panel and "inf" not in panel and "<t>" not in panel and "<l>" not in panel
    drawable = [v for i, v in enumerate(values) if v is not None and np.isfinite(v)
                and (not log or (v > 0 and i > 0))]  # fmt: skip
    assert ("no value to draw" in panel) == (not drawable)


def test_names_stand_below_a_panel_as_many_as_fit():
    names = [f"layer_{i}/<w>" for i in range(60)]
    line = Line("A", range(60), [1.0 + i for i in range(60)], names=names)
    panel = panel_html("t", [line], Axis("layer", names=names), Axis("condition", log=True))
    shown = [int(x) for x in re.findall(r">layer_(\d+)/&lt;w&gt;<", panel)]
    assert shown == list(range(0, 60, 3))
    places = [float(x) for x in re.findall(r'translate\((\S+) \S+\) rotate\(-90\)" dy', panel)]
    assert len(places) == 20 and min(np.diff(places)) > 11


def test_a_drawing_of_fewer_than_five_points_is_a_table():
    level = Line("target", range(5), [3.0] * 5, "muted", level=True)
    short, long = (Line("K-FAC", range(n), [2.5 + i for i in range(n)]) for n in (4, 5))
    drawn = [panel_html("t", [line, level], Axis("updates"), Axis("%")) for line in (short, long)]
    assert "<svg" not in drawn[0] and drawn[0].count("<td>K-FAC</td>") == 4 and ">5.5<" in drawn[0]
    assert "target" not in drawn[0] and "<svg" in drawn[1] and "<table" not in drawn[1]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.01, 5.0, ["0.01", "0.1", "1"]),
        (7.0, 44.0, ["10", "20", "50"]),
        (1.4, 1.6, ["1.5", "2"]),
    ],
)
def test_a_logarithmic_axis_has_several_ticks(low, high, ticks):
    line = Line("K-FAC", range(5), [low, low, low, low, high])
    panel = panel_html("t", [line], Axis("updates"), Axis("%", log=True))
    shown = re.findall(r'dy=".32em" text-anchor="end">([\d.e-]+)<', panel)
    assert shown[: len(ticks)] == ticks


def test_a_column_without_a_cell_is_left_out():
    rows = [["a", "", "1"], ["b", "", ""]]
    table = TableOfLayers("t", ["layer", "note", "size"], rows, text_columns=(0, 1))
    assert [c.header for c in terminal_table("t", table.head, rows).columns] == ["layer", "size"]
    assert [c.header for c in table.at(80).columns] == ["layer", "size"]


def test_both_factors_of_a_layer_stand_above_its_name():
    values, names = np.array([2.0, 1.0]), [f"{i}/w" for i in ("one", "two", "3", "4", "5")]
    records = [r for name in names for side in ("A", "G")
               for r in _of_side(name, side, name, values, values)]  # fmt: skip
    ranks, *_ = _over_depth(records)
    assert ">one/w<" in ranks and ">two/w<" in ranks
    first, second = (re.findall(r"[ML](\S+) ", path) for path in re.findall(r' d="(.*?)"', ranks))
    assert first == second and len(first) == 5
