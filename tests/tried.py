"""What was tried of kills, signals and damage: ``python -m tests.tried`` prints it.

``--write`` puts it into docs/repository.md. Numbers are those of the tests' own parameters.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxkfac.jobs.cli import _killed_test, _several_processes_test
from jaxkfac.jobs.cli.analysis import _run_test as _analysis_test
from jaxkfac.jobs.cli.analysis import _stopped_test
from jaxkfac.jobs.cli.influence import _run_test as _influence_test
from jaxkfac.memory import _join_test
from tests import damaged_files_test

PAGE = Path(__file__).parents[1] / "docs" / "repository.md"
BEGIN, END = "<!-- python -m tests.tried --write -->\n", "<!-- end of the table -->\n"
_several = _several_processes_test
ROWS: list[tuple[str, Callable[..., Any], int]] = [
    ("SIGKILL of `train` and `finetune`, resumed",
     _killed_test.test_a_run_that_was_killed_ends_as_one_that_was_not, 1),
    ("SIGTERM and SIGHUP to `train` and `finetune`, resumed",
     _killed_test.test_a_run_that_gets_a_signal_ends_what_is_under_way_and_keeps_it, 1),
    ("an exception in place of SIGKILL in `analyze`, resumed",
     _analysis_test.test_a_killed_analysis_ends_with_the_bits_of_one_that_was_not, 1),
    ("SIGINT, SIGTERM and SIGHUP to `analyze`, resumed",
     _stopped_test.test_a_signal_is_answered_with_the_command_that_goes_on, 1),
    ("SIGKILL, SIGTERM and SIGHUP to `influence`, resumed",
     _influence_test.test_a_run_that_was_killed_or_stopped_ends_as_one_that_was_not, 1),
    ("SIGKILL of one of 2 or 4 processes",
     _several.test_where_a_process_is_killed_the_others_say_so_and_all_go_on, 1),
    ("a signal to one of 2 or 4 processes of `train`",
     _several.test_a_signal_to_one_process_stops_all_with_a_checkpoint, 1),
    ("SIGTERM to one of 2 processes of `finetune`",
     _several.test_a_signal_stops_a_finetuning_of_two_processes_between_two_readings, 1),
    ("an exception in one of 2 processes of a script",
     _join_test.test_a_process_that_raises_in_its_input_ends_all_within_a_minute, 1),
    ("damaged bytes in data files of each format",
     damaged_files_test.test_a_damaged_file_is_refused_in_a_sentence_or_read,
     damaged_files_test.MUTATIONS),
]  # fmt: skip


def number(test: Callable[..., Any], each: int = 1) -> int:
    """How often a test tries something: the product of its parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return each * math.prod(len(mark.args[1]) for mark in marks)


def table() -> str:
    """The table, a row for each kind of trial."""
    lines = ["| Tried | Times | Test |", "|---|---|---|"]
    for what, test, each in ROWS:
        where = test.__module__.replace(".", "/")
        lines.append(f"| {what} | {number(test, each)} | `{where}.py` |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")
