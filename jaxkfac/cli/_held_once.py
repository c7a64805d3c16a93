"""Nothing that a run starts with is in memory twice."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxkfac._errors import JaxkfacError
from jaxkfac.memory import Duplicate, bytes_text, duplicate_report

PyTree = Any


class HeldTwiceError(JaxkfacError, RuntimeError):
    """An array of a run has a second copy."""


def check_held_once(earlier: Sequence[jax.Array], **trees: PyTree) -> None:
    """Look for a second copy of what a run holds, in its trees and among all live arrays.

    Arrays that share a buffer, as tied weights do, are one; arrays of one constant say nothing.
    An optimizer's own leaves may be equal: it starts many of them with the same values.

    Args:
        earlier: Arrays that were there before the run: what others hold is not its fault.
        **trees: What the run holds, by name; the optimizer's state is ``optimizer``.

    Raises:
        HeldTwiceError: naming the holders of each copy, and its bytes.
    """
    report = duplicate_report(ignore=earlier, **trees)
    found = [x for x in report.duplicates if _is_fault(x, set(trees))]
    if found:
        lines = [f"  {' = '.join(x.names)}: {bytes_text(x.wasted_bytes)} too much" for x in found]
        raise HeldTwiceError(
            "arrays are in memory twice as the run begins:\n"
            + "\n".join(lines)
            + "\nlet go of one holder before training; parameters that are meant to be one are "
            "tied in the model's config"
        )


def _is_fault(duplicate: Duplicate, trees: set[str]) -> bool:
    holders = {name.partition("/")[0] for name in duplicate.names}
    return bool(holders & trees) and holders != {"optimizer"}
