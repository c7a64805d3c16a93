"""A prompt and its completion, or text alone."""

from jaxkfac.data.text._records import Completion, Record
from jaxkfac.data.text.formats._format import Row, record_format, text_of
from jaxkfac.data.text.formats._messages import chat_of, turns_of


@record_format("completion")
def parse_completion(row: Row) -> Record:
    """``{"prompt": ..., "completion": ...}``: both strings, or both lists of turns."""
    prompt, completion = row.get("prompt", ""), row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = [*turns_of(prompt, "prompt"), *turns_of(completion, "completion")]
        return chat_of(turns, row)
    return _nonempty(text_of(row, "prompt", default=""), text_of(row, "completion"))


@record_format("text")
def parse_text(row: Row) -> Completion:
    """``{"text": ...}``: all of it is learnt."""
    return _nonempty("", text_of(row, "text"))


def _nonempty(prompt: str, completion: str) -> Completion:
    if not completion:
        raise ValueError("the completion is empty: there is nothing to learn")
    return Completion(prompt, completion)
