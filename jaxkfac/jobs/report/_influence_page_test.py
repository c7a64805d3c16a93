"""The page of an influence run: its answer, and the names of its lists."""

import re

import pytest

from jaxkfac.jobs.report import QueryRecord, ScoredText, influence_page


def page_of(*scores, top=2, lost=0.0):
    """The page of one query whose texts have these scores, and the rows under each heading."""
    ordered = sorted(enumerate(scores, 1), key=lambda pair: -pair[1])
    texts = [ScoredText(row, score, f"text <{row}>") for row, score in ordered]
    helpful, harmful = texts[:top], texts[::-1][:top]
    mean = sum(scores) / len(scores)
    spread = (sum((x - mean) ** 2 for x in scores) / len(scores)) ** 0.5
    query = QueryRecord(1, "a query", helpful, harmful, mean, spread, lost)
    page = influence_page(title="t", lead="l", queries=[query], config={}, versions={})
    lists = re.findall(r"<h3>(.*?)</h3>(<table>.*?</table>)", page)
    rows = {name: re.findall(r'<td class="n">(\d+)</td><td>', table) for name, table in lists}
    answer = re.search(r'<p class="answer">(.*?)</p>', page)
    assert answer is not None
    return answer[1], rows


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((4.0, 3.0, 2.0), {"Most helpful": ["1", "2"], "Least helpful": ["3", "2"]}),
        ((4.0, 3.0, 0.0), {"Most helpful": ["1", "2"], "Least helpful": ["3", "2"]}),
        ((4.0, 3.0, -2.0), {"Most helpful": ["1", "2"], "Most harmful": ["3"]}),
        ((-4.0, -3.0, -2.0), {"Least harmful": ["3", "2"], "Most harmful": ["1", "2"]}),
    ],
)
def test_only_texts_with_a_negative_score_are_called_harmful(scores, expected):
    assert page_of(*scores)[1] == expected


def test_the_page_answers_which_text_raised_the_likelihood_most_and_how_sure_that_is():
    answer, _ = page_of(1.0, 7.0, 1.0, lost=0.02)
    assert answer.startswith(
        "Training on row 2 (“text &lt;2&gt;”) raises the likelihood of query 1 (“a query”) most: "
        "score 7, 1.4 standard deviations above the mean of all texts; the low rank loses up to "
        "2.00% of the query"
    )
    assert "first-order estimate without an interval" in answer
    assert page_of(-2.0, -1.0)[0].startswith("No text raises the likelihood of query 1")
