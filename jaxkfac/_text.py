"""Text: tables, names of alternatives, how objects print themselves, and texts as tokens."""

import inspect
from collections.abc import Collection, Sequence
from html import escape
from typing import Any, NamedTuple, Protocol, runtime_checkable

# ---------------- tables as text


WIDTH = 120  # columns of a page
_LEAST = 12  # of a first column that is cut


def aligned(
    rows: Sequence[Sequence[str]], *, width: int | None = None, words: Collection[int] = (0,)
) -> list[str]:
    """Lines of a table: columns of words to the left, of numbers to the right.

    Args:
        rows: Cells; a row that ends early is filled up with empty ones.
        width: Characters of a line. The first column is cut to it, at its front.
        words: Which columns are of words.
    """
    full = max(map(len, rows))
    cells = [[*row, *[""] * (full - len(row))] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    if width is not None:
        first = min(first, max(width - sum(others) - 2 * len(others), _LEAST))
    sizes = [first, *others]
    return [
        "  ".join(
            cell.ljust(size) if i in words else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in ([shortened(name, first), *rest] for name, *rest in cells)
    ]


def ruled(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: bool = False,
    width: int | None = WIDTH,
    words: Collection[int] = (0,),
) -> list[str]:
    """Lines of a table with a rule below its head.

    Args:
        head: Headings; line breaks in them are kept.
        rows: As for :func:`aligned`.
        total: Whether the last row is one, with a rule above it.
        width: As for :func:`aligned`.
        words: As for :func:`aligned`.
    """
    broken = [heading.split("\n") for heading in head]
    height = max(map(len, broken))
    lowered = [[""] * (height - len(parts)) + parts for parts in broken]
    heads = [list(line) for line in zip(*lowered, strict=True)]
    lines = aligned([*heads, *rows], width=width, words=words)
    rule = "-" * max(map(len, lines))
    lines.insert(height, rule)
    if total:
        lines.insert(-1, rule)
    return lines


def shortened(name: str, width: int) -> str:
    """The end of a name that is too long: it says which layer, the front which block."""
    return name if len(name) <= width else "…" + name[1 - width :]


def number(value: float | int | None) -> str:
    """Three significant digits, whole below 100,000; a dash for undefined or infinite."""
    if value is None:
        return "–"
    if isinstance(value, int) or 999.5 <= abs(value) < 99_999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ---------------- how a result is displayed
#
# How a result shows itself: in one line where it is printed, as a table in a notebook.


def array_text(value: Any) -> str:
    """Dtype and shape of an array or of its ``ShapeDtypeStruct``; the ``repr`` of anything else.

    Example:
        >>> array_text(jnp.zeros((8, 3)))
        'float32[8, 3]'
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return repr(value)
    return f"{dtype}[{', '.join(map(str, shape))}]"


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a NamedTuple of arrays: the arrays would fill the screen."""
    parts = ", ".join(f"{name}={array_text(x)}" for name, x in self._asdict().items())
    return f"{type(self).__name__}({parts})"


def table_html(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    notes: Sequence[str] = (),
) -> str:
    """A table for ``_repr_html_``, in the page's own colours; a long one scrolls.

    Args:
        title: Above it.
        head: Headings.
        rows: Cells, which are escaped.
        words: Which columns are of words: to the left, numbers to the right.
        notes: Lines below it.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        sides = ["left" if i in words else "right" for i in range(len(row))]
        return "".join(
            f'<{tag} style="text-align:{side};white-space:nowrap;padding:.1em .6em">'
            f"{escape(cell)}</{tag}>"
            for side, cell in zip(sides, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    below = "".join(f'<div style="opacity:.75">{escape(note)}</div>' for note in notes)
    return (
        f'<div style="font-size:.9em"><strong>{escape(title)}</strong>'
        '<div style="max-height:30em;overflow:auto">'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{below}</div>"
    )


# ---------------- a text as a row of tokens: which special tokens stand around it
#
# Training, generation, evaluation and influence all build their rows here, so that a model is asked
# with the very tokens that it was taught with.


@runtime_checkable
class Encodes(Protocol):
    """The part of a tokenizer that rows of tokens are built from."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Ids of a text, by default with the special tokens that the tokenizer adds."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a text or a turn."""
        ...


class AddedTokens(NamedTuple):
    """Special tokens that a tokenizer adds around every single text.

    Attributes:
        before: Ids in front of the text, such as BOS.
        after: Ids behind it, such as EOS.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


_PROBES = ("a", "0", " ")


def added_tokens(tokenizer: Encodes) -> AddedTokens:
    """Compare a short text with and without special tokens.

    A short text shows this even where the text itself contains special tokens: ``<s>`` written
    in a prompt is then not mistaken for one that the tokenizer adds.

    Example:
        >>> from jaxkfac.models import byte_tokenizer
        >>> added_tokens(byte_tokenizer())
        AddedTokens(before=(), after=(1,))
    """
    for probe in _PROBES:
        bare = _bare_ids(tokenizer, probe)
        full = list(tokenizer.encode(probe))
        spans = [(i, i + len(bare)) for i in range(len(full) - len(bare) + 1)]
        places = [(i, j) for i, j in spans if full[i:j] == bare]
        if bare and len(places) == 1:
            start, stop = places[0]
            return AddedTokens(tuple(full[:start]), tuple(full[stop:]))
    # A vocabulary without these letters: an empty text has nothing but special tokens.
    full, ends = list(tokenizer.encode("")), set(tokenizer.eos_ids)
    stop = len(full)
    while stop and full[stop - 1] in ends:
        stop -= 1
    return AddedTokens(tuple(full[:stop]), tuple(full[stop:]))


def prompt_ids(tokenizer: Encodes, text: str) -> list[int]:
    """Ids of a text that goes on: the tokens that begin a text once, and none that end it.

    Args:
        tokenizer: Tokenizer of the model.
        text: Any text. If it begins with the tokens that begin a text, they are not added again.

    Example:
        >>> from jaxkfac.models import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("Fe"), prompt_ids(tokenizer, "Fe")
        ([39, 70, 1], [39, 70])
    """
    before, _ = added_tokens(tokenizer)
    return _opened(_bare_ids(tokenizer, text), before)


def continuation_ids(tokenizer: Encodes, prompt: str, text: str) -> list[int]:
    """Ids of a text behind a prompt, whose ids stay those of :func:`prompt_ids`.

    A tokenizer that puts a space before every text (SentencePiece) would put a second one between
    the two. They are therefore encoded together where that leaves the prompt's ids as they are,
    else behind a line break, else the text alone.
    """
    for before in (prompt, "\n"):
        start, both = _bare_ids(tokenizer, before), _bare_ids(tokenizer, before + text)
        if start and both[: len(start)] == start:
            return both[len(start) :]
    return _bare_ids(tokenizer, text)


def answer_ids(tokenizer: Encodes, prompt: str, text: str) -> list[int]:
    """Ids of a text behind a prompt, with one end at its end."""
    return closed_ids(tokenizer, continuation_ids(tokenizer, prompt, text))


def text_ids(tokenizer: Encodes, text: str) -> list[int]:
    """Ids of a full text: the tokens that begin a text once, and one end at its end."""
    return closed_ids(tokenizer, prompt_ids(tokenizer, text))


def closed_ids(tokenizer: Encodes, ids: list[int]) -> list[int]:
    """The ids, and the end of a text behind them unless they already have one.

    The end is what the tokenizer adds behind a text, else its own EOS (``eos_id``), else the first
    of ``eos_ids``.
    """
    ends = tokenizer.eos_ids
    if ids and ids[-1] in ends:
        return ids
    _, after = added_tokens(tokenizer)
    if after and (not ends or after[-1] in ends):
        return [*ids, *after]
    eos_id: int | None = getattr(tokenizer, "eos_id", None)
    end = ends[:1] if eos_id is None or eos_id not in ends else (eos_id,)
    return [*ids, *after, *end]


def source_ids(tokenizer: Encodes, text: str) -> list[int]:
    """Ids of a text for an encoder: with the tokens that the tokenizer adds, each of them once."""
    before, after = added_tokens(tokenizer)
    ids = _opened(_bare_ids(tokenizer, text), before)
    return ids if after and tuple(ids[-len(after) :]) == after else [*ids, *after]


def _bare_ids(tokenizer: Encodes, text: str) -> list[int]:
    """Ids of a text alone; an ``encode`` without the option is one that adds nothing."""
    parameters = inspect.signature(tokenizer.encode).parameters.values()
    if any(p.name == "add_special_tokens" or p.kind is p.VAR_KEYWORD for p in parameters):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


def _opened(ids: list[int], before: tuple[int, ...]) -> list[int]:
    return ids if tuple(ids[: len(before)]) == before else [*before, *ids]
