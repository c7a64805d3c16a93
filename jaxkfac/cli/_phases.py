"""What a command was doing when memory ran out."""

import contextlib
from collections.abc import Iterator

_NOTE = "while "


@contextlib.contextmanager
def phase(doing: str) -> Iterator[None]:
    """Name what is done inside, on an error that leaves the block; blocks may be nested."""
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + doing)
        raise


def phases_of(error: BaseException) -> str:
    """The blocks that an error has left, outermost first; empty if there were none."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_NOTE)]
    return ": ".join(note.removeprefix(_NOTE) for note in reversed(notes))
