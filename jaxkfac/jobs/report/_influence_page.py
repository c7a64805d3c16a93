"""The page and the tables of an influence run."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from rich.table import Table

from jaxkfac._text import number
from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._page import terminal_table

# ---------------- results of an influence run, as plain records


class ScoredText(NamedTuple):
    """A training text and its score for a query.

    Attributes:
        row: Number of the row in its file, from 1.
        score: Influence; positive means that training on the text lowers the query's loss.
        text: The text as a string.
        tokens: ``(token, its share of the score)``, in order.
    """

    row: int
    score: float
    text: str
    tokens: Sequence[tuple[str, float]] = ()


class QueryRecord(NamedTuple):
    """A query with the texts of largest and of smallest scores.

    Attributes:
        row: Number of the row in its file, from 1.
        text: The query as a string.
        helpful: Texts with the largest scores, the largest first.
        harmful: Texts with the smallest scores, the smallest first.
        mean: Mean of all scores.
        spread: Standard deviation of all scores.
        lost: Relative error of the gradient due to the low rank, in the layer where it is largest,
            as a ratio of norms.
    """

    row: int
    text: str
    helpful: Sequence[ScoredText]
    harmful: Sequence[ScoredText]
    mean: float
    spread: float
    lost: float

    def to_plain(self) -> dict[str, Any]:
        """Plain values that survive JSON."""
        lists = {name: [x._asdict() for x in getattr(self, name)] for name in _LISTS}
        return self._asdict() | lists


_LISTS = ("helpful", "harmful")


# ---------------- the page


_HELPS, _HARMS = "31, 90, 146", "200, 117, 45"  # blue and orange
_SHOWN = 160  # characters of a text to show in a terminal
_QUOTED = 60  # characters of a text to quote in the answer
_ANSWERED = 3  # queries with a sentence in the answer
_NOTE = (
    "<p>A score estimates, to first order, how much training on a text lowers the loss of the "
    "query; if it is negative, the loss rises. Shades show what each token contributes to the "
    "score of its text: blue is positive, orange is negative. The contribution is measured at the "
    "position where the model reads the token.</p>"
)


def influence_page(*, queries: Sequence[QueryRecord], **page: Any) -> str:
    """The report of an influence run as one HTML page.

    Args:
        queries: The queries with their texts.
        **page: Arguments of :func:`report_page`.

    Returns:
        The page, self-contained.
    """
    first = [_NOTE, *map(_query, queries)]
    return report_page(**page, first=first, answer=_answer(queries))


def _answer(queries: Sequence[QueryRecord]) -> list[str]:
    """Which text raises the likelihood of each query most, and what its score does not tell."""
    sentences = [_most_helpful(query) for query in queries[:_ANSWERED] if query.helpful]
    if not sentences:
        return []
    if len(queries) > _ANSWERED:
        sentences.append(f"The other {len(queries) - _ANSWERED:,} queries are below.")
    return [
        *sentences,
        "A score is a first-order estimate without an interval: only training without the text "
        "shows how much the likelihood changes.",
    ]


def _most_helpful(query: QueryRecord) -> str:
    best = query.helpful[0]
    text = f"row {best.row} (“{_short(best.text, _QUOTED)}”)"
    name = f"query {query.row} (“{_short(query.text, _QUOTED)}”)"
    if best.score <= 0:
        return f"No text raises the likelihood of {name}: the largest score is that of {text}, " + (
            f"{number(best.score)}."
        )
    facts = f"score {number(best.score)}"
    if query.spread:
        deviations = (best.score - query.mean) / query.spread
        facts += f", {deviations:.1f} standard deviations above the mean of all texts"
    if query.lost:
        facts += f"; the low rank loses up to {query.lost:.2%} of the query's gradient in a layer"
    return f"Training on {text} raises the likelihood of {name} most: {facts}."


def influence_table(query: QueryRecord) -> Table:
    """A table of the texts of one query, for the terminal."""
    both = [*query.helpful, *reversed(query.harmful)]
    rows = [[number(x.score), str(x.row), _short(x.text)] for x in both]
    title = f"Query {query.row}: {_short(query.text)}"
    return terminal_table(title, ["score", "row", "text"], rows, text_columns=(2,))


def _short(text: str, most: int = _SHOWN) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= most else one_line[: most - 1] + "…"


def _query(query: QueryRecord) -> str:
    numbers = f"All texts: mean {number(query.mean)}, standard deviation {number(query.spread)}."
    if query.lost:
        numbers += f" Lost by low rank: {query.lost:.2%} of the gradient of a layer, at most."
    return (
        f"<h2>Query {query.row}</h2><p><b>{escape(query.text)}</b></p><p>{numbers}</p>"
        f"{_list('Most helpful', 'Least harmful', query.helpful, 1)}"
        f"{_list('Most harmful', 'Least helpful', query.harmful, -1)}"
    )


def _list(name: str, otherwise: str, texts: Sequence[ScoredText], sign: int) -> str:
    """The texts whose scores have this sign; all of them under another name if none has."""
    signed = [text for text in texts if sign * text.score > 0]
    return f"<h3>{name if signed else otherwise}</h3>{_texts(signed or texts)}"


def _texts(texts: Sequence[ScoredText]) -> str:
    rows = "".join(
        f'<tr><td class="n">{number(x.score)}</td><td class="n">{x.row}</td>'
        f"<td>{_shaded(x)}</td></tr>"
        for x in texts
    )
    head = '<th class="n">score</th><th class="n">row</th><th>text</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _shaded(text: ScoredText) -> str:
    if not text.tokens:
        return escape(text.text)
    largest = max(abs(share) for _, share in text.tokens) or 1.0
    spans = []
    for token, share in text.tokens:
        color, strength = _HELPS if share > 0 else _HARMS, 0.7 * abs(share) / largest
        shown_token = escape(token).replace("\n", "↵<br>")
        spans.append(
            f'<span style="background: rgba({color}, {strength:.2f})" '
            f'title="{escape(number(share))}">{shown_token}</span>'
        )
    return f'<span style="white-space: pre-wrap">{"".join(spans)}</span>'
