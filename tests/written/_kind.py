"""What a kind of written file is: how it is written, read, shown and used."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.written._net import Readings


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file that the library writes and reads again.

    Attributes:
        write: Writes it into a folder that exists; returns the object it was written from.
        read: Reads the folder; returns the like of that object, which ``close`` ends if it has it.
        readings: The numbers in the object, as public readings show them.
        go_on: The numbers of one further use of the object.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    readings: Callable[[Any], Readings]
    go_on: Callable[[Any], Readings]
