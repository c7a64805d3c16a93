"""What a row of a data set may look like, by its keys."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxkfac.data.text._records import Record

Row = Mapping[str, Any]


class RecordFormat(NamedTuple):
    """A format.

    Attributes:
        keys: That a row of it has.
        parse: ``parse(row) -> record``; raises ``ValueError`` saying what is wrong.
    """

    keys: tuple[str, ...]
    parse: Callable[[Row], Record]


_FORMATS: list[RecordFormat] = []


def record_format(*keys: str) -> Callable[[Callable[[Row], Record]], Callable[[Row], Record]]:
    """Make a function known as the format of rows that have all of ``keys``; a decorator.

    The first format that fits is taken, in the order in which they were made known.
    """

    def register(parse: Callable[[Row], Record]) -> Callable[[Row], Record]:
        _FORMATS.append(RecordFormat(keys, parse))
        return parse

    return register


def parse_record(plain: Any) -> Record:
    """A record from what JSON gives.

    Args:
        plain: ``{"messages": [{"role": ..., "content": ...}, ...]}``, with ``"tools"`` if there
            are any; ``{"prompt": ..., "completion": ...}``, of strings or of turns;
            ``{"instruction": ..., "input": ..., "output": ...}`` as in Alpaca;
            ``{"conversations": [{"from": ..., "value": ...}, ...]}`` as in ShareGPT; or
            ``{"text": ...}``. Other keys are ignored, and keys without a value are no keys.

    Returns:
        A :class:`Chat` or :class:`Completion`.

    Raises:
        ValueError: none of these forms, a role that is not known, no turn of the assistant, or
            nothing to learn.

    Example:
        >>> parse_record({"prompt": "Fe is ", "completion": "iron"})
        Completion(prompt='Fe is ', completion='iron')
    """
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object with keys, got {type(plain).__name__}")
    row = {key: value for key, value in plain.items() if value is not None}
    for form in _FORMATS:
        if all(key in row for key in form.keys):
            return form.parse(row)
    known = "; ".join(" and ".join(f'"{key}"' for key in form.keys) for form in _FORMATS)
    raise ValueError(f"expected the keys {known}; got {sorted(plain)}")


def text_of(row: Row, key: str, *, default: str | None = None) -> str:
    """A string of a row.

    Raises:
        ValueError: it is no string.
    """
    value = row.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"expected {key} to be a string, got {type(value).__name__}")
    return value
