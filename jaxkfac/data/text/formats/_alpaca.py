"""Instructions with an optional input, as in Alpaca."""

from jaxkfac.data.text._records import Chat, Message
from jaxkfac.data.text.formats._format import Row, record_format, text_of


@record_format("instruction", "output")
def parse_alpaca(row: Row) -> Chat:
    """``{"instruction": ..., "input": ..., "output": ..., "system": ...}`` as a chat of two turns.

    The input, where there is one, stands below the instruction.
    """
    asked = [text_of(row, "instruction"), text_of(row, "input", default="")]
    system, answer = text_of(row, "system", default=""), text_of(row, "output")
    if not answer:
        raise ValueError("the output is empty: there is nothing to learn")
    first = (Message("system", system),) if system else ()
    question = Message("user", "\n\n".join(filter(None, asked)))
    return Chat((*first, question, Message("assistant", answer)))
