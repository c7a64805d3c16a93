import json
import re

import pytest
from rich.console import Console

from jaxkfac.jobs.report._finetune_html import finetune_page, running_mean
from jaxkfac.jobs.report._finetune_records import (
    ExamRecord,
    FinetuneRecords,
    FourierRecord,
    SampleRecord,
    exam_rows,
    finetune_table,
)
from jaxkfac.lslora import Nonlinearity, register
from jaxkfac.memory import Stage


def fourier(step, size):
    values = {"coefficients": [[0.0, 1.0, size, 0.0]] * 2}
    values |= {name: [size, 2 * size] for name in ("sigma", "deviation", "nonlinearity")}
    return FourierRecord(step, {"layers/q_proj/kernel": values | {"saturated": [0.1, 0.3]}})


RECORDS = FinetuneRecords(
    losses=[4.0, 3.0, 2.0],
    penalties=[0.0, 0.1, 0.2],
    tokens=[10, 20, 30],
    learnt=[1, 2, 3],
    examples=[2, 2, 6],
    seconds=[1.0, 1.0, 2.0],
    gradient_norms=[2.0, None, 1.0],
    learning_rates=[0.1, 0.2, 0.1],
    exams=[
        ExamRecord(0, 3.5, {"per_token": [0.25, 0.1, 0.5]}, {"per_token": [True, False]}),
        ExamRecord(3, 2.5, {"per_token": [0.5, 0.3, 0.7]}, {"per_token": [True, True]}),
    ],
    fourier=[fourier(0, 0.0), fourier(3, 0.4)],
    samples=[SampleRecord(0, "Fe <is>", "tin"), SampleRecord(3, "Fe <is>", "iron")],
)
LONG = RECORDS._replace(
    exams=[RECORDS.exams[0]._replace(step=step) for step in range(5)],
    fourier=[fourier(step, 0.1 * step) for step in range(5)],
)
COMPARISON = {"per_token": {"gained": 1, "lost": 0, "p_value": 1.0}}


def page(records, comparison=COMPARISON, **options):
    return finetune_page(
        title="A <title>", lead="A <lead>.", records=records, comparison=comparison, spectra=[],
        capacity=None, coverage=[], config={"steps": 3}, versions={"jax": "1"}, stages=Stage("run"),
        host_memory={"resident": 3 << 20, "peak": None}, **options,
    )  # fmt: skip


def test_records_survive_json():
    plain = json.loads(json.dumps(RECORDS.to_plain()))
    assert FinetuneRecords.from_plain(plain) == RECORDS


def test_the_page_shows_what_was_measured_and_escapes_it():
    text = page(RECORDS)
    assert text.count("<h2>Training</h2>") == text.count("</html>") == 1
    assert text.index("A &lt;lead&gt;") < text.index("Training") < text.index("Configuration")
    for words in ("50.0% [30%, 70%]", "after 3 updates", "iron", "Fe &lt;is&gt;", ">0.6</td>",
                  ">2.5</td>", "Main memory: resident 3 MiB.</p>"):  # fmt: skip
        assert words in text, words
    assert "Loss on held-out text" in text
    assert "<is>" not in text and text.count("<script") == 1


def test_every_drawing_takes_the_colours_of_the_page_and_says_its_values():
    text = page(LONG)
    assert "<img" not in text and "data:image" not in text  # whose colours no night would change
    titles = re.findall(r'<figure class="panel"><figcaption>(.*?)</figcaption>', text)
    assert titles[0] == "Loss, by updates" and len(titles) == 3 + 4 + 4
    labels = re.findall(r'data-label="(.*?)"', text)
    for words in ("one update", "training", "validation", "layers/q_proj",
                  "layers/q_proj, least", "layers/q_proj, largest"):  # fmt: skip
        assert words in labels, words
    look = text[text.index("<style>") : text.index("</style>")]
    drawn = set(re.findall(r'<path class="line (\w+)', text))
    assert drawn and all(look.count(f"--{name}:") == 3 for name in drawn)  # day, night, paper


def test_fewer_than_five_points_are_a_table():
    text = page(RECORDS)
    assert len(re.findall(r'<figure class="panel">', text)) == 3
    assert 'data-label="validation"' not in text and ">validation loss</td>" in text
    assert "Training moved c2 of layers/q_proj most: by 0.4 on average" in text
    assert "The largest nonlinearity is 0.8." in text
    assert "Lines are means" not in text  # there are none


class Cubic(Nonlinearity):
    name, initial = "report_cubic", (1.0, 0.0)
    formula, strength_formula = "φ = c0 u + c1 u³ with u = z / σ", "|c1|"
    apply = derivative = strength = None  # nothing is computed here


def test_the_page_speaks_of_the_nonlinearity_that_the_adapter_has():
    register(Cubic())
    values = {"coefficients": [[1.0, 0.0]] * 2}
    values |= {name: [0.5, 1.0] for name in ("sigma", "deviation", "nonlinearity", "saturated")}
    own = RECORDS._replace(fourier=[FourierRecord(i, {"layers/q": values}) for i in range(2)])
    text = page(own, nonlinearity="report_cubic")
    assert Cubic.formula in text and "Nonlinearity: |c1|. Saturated: nowhere." in text
    assert ">c1</th>" in text and ">c2</th>" not in text
    assert "tanh" not in text and "tanh" in page(RECORDS)


def test_what_was_not_measured_is_left_out():
    text = page(RECORDS._replace(exams=(), fourier=(), samples=()), {})
    for words in ("Questions", "Nonlinearity", "Samples", "Capacity"):
        assert f"<h2>{words}" not in text


def test_the_table_shows_both_ends():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(finetune_table(RECORDS, COMPARISON))
    for words in ("4.0000", "2.0000", "3.5000", "2.5000", "per token", "25.0%"):
        assert words in capture.get()


def test_exam_rows_have_no_comparison_where_there_is_none():
    assert exam_rows(RECORDS, {}) == [["per token", "25.0% [10%, 50%]", "50.0% [30%, 70%]"]]
    assert exam_rows(RECORDS._replace(exams=()), {}) == []


def test_the_ends_of_the_loss_are_means_over_a_tenth():
    losses = [float(i) for i in range(20)]
    assert RECORDS._replace(losses=losses).mean_losses == [0.5, 18.5]
    assert RECORDS._replace(losses=[3.0]).mean_losses == [3.0, 3.0]


def test_speed_is_of_all_updates():
    assert RECORDS.tokens_per_second == 15.0
    assert RECORDS.samples_per_second == 2.5
    assert FinetuneRecords().tokens_per_second == FinetuneRecords().samples_per_second == 0.0


def test_the_running_mean_begins_at_the_first_loss_and_keeps_a_constant():
    assert running_mean([2.0, 2.0, 2.0]) == pytest.approx([2.0] * 3)
    assert running_mean([4.0, 0.0])[0] == pytest.approx(4.0)
