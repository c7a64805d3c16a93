"""What rows of data sets look like; a new format is one function here, under its keys.

The first format whose keys a row has is its own, in the order of these imports.
"""

from jaxkfac.data.text.formats._messages import parse_messages  # isort: skip
from jaxkfac.data.text.formats._prompt import parse_completion, parse_text  # isort: skip
from jaxkfac.data.text.formats._alpaca import parse_alpaca  # isort: skip
from jaxkfac.data.text.formats._sharegpt import parse_sharegpt  # isort: skip
from jaxkfac.data.text.formats._format import RecordFormat, parse_record, record_format

__all__ = [
    "RecordFormat",
    "parse_alpaca",
    "parse_completion",
    "parse_messages",
    "parse_record",
    "parse_sharegpt",
    "parse_text",
    "record_format",
]
