"""What became of the rows of a data set."""

import dataclasses
from typing import Any

_SHOWN, _WORDS = 100, 400  # bad rows whose numbers are kept, and characters of each


@dataclasses.dataclass
class Tally:
    """Counts of the first pass so far; reading is a window ahead of training.

    Attributes:
        rows: Read.
        bad: Left out, because they are no records.
        bad_rows: Where the first hundred of them are, and what is wrong.
        examples: Made of the others.
        tokens: In them.
        learnt: Of the tokens, in the loss.
        truncated: Examples that lost their end.
        dropped: Examples left out, because nothing to learn was left of them.
        longest: Tokens of the longest, before it was cut.
    """

    rows: int = 0
    bad: int = 0
    bad_rows: list[str] = dataclasses.field(default_factory=list)
    examples: int = 0
    tokens: int = 0
    learnt: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0

    def leave_out(self, bad: str) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.bad_rows) < _SHOWN:
            self.bad_rows.append(bad[:_WORDS])

    def to_plain(self) -> dict[str, Any]:
        """As it comes back from JSON."""
        return {**vars(self), "bad_rows": list(self.bad_rows)}

    def restore(self, plain: dict[str, Any]) -> None:
        """Count on from :meth:`to_plain`."""
        vars(self).update(plain, bad_rows=list(plain["bad_rows"]))

    def __str__(self) -> str:
        words = f"{self.rows} rows read, {self.examples} examples, {self.tokens} tokens, "
        words += f"{self.learnt} of them learnt"
        if self.truncated or self.dropped:
            words += f"; {self.truncated} cut, {self.dropped} left out (nothing to learn fits)"
        if self.bad:
            words += f"; {self.bad} bad rows left out, the first {self.bad_rows[0]}"
        return words
