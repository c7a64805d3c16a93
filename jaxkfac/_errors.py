"""The errors a caller may want to catch by name."""

import difflib
from collections.abc import Iterable


class JaxkfacError(Exception):
    """Base of every error raised by this library itself."""


class UncoveredParameterError(JaxkfacError, ValueError):
    """A parameter meets data in a way that no rule covers."""


class UnknownLayerError(JaxkfacError, ValueError):
    """A layer pattern or layer name matches nothing."""


class LostRowsError(JaxkfacError, ValueError):
    """A mask was given and the rows of a layer use could not be identified."""


class CoupledExamplesError(JaxkfacError, ValueError):
    """Statistics of single examples were asked for, and the model couples its examples."""


class HiddenMarkError(JaxkfacError, ValueError):
    """A mark of outputs stands where a transformation hides its terms."""


class NonFiniteFactorError(JaxkfacError, FloatingPointError):
    """A factor, or its decomposition, holds NaN or infinity."""


class CheckpointMismatchError(JaxkfacError, ValueError):
    """A checkpoint was written by another model."""


class DamagedFileError(JaxkfacError, ValueError):
    """A file does not hold what was written to it."""


class DownloadError(JaxkfacError, RuntimeError):
    """A file could not be fetched, or was not what it should be."""


class ProcessesDisagreeError(JaxkfacError, RuntimeError):
    """Another process of this job failed, or does something else; raised in each of them."""


class CompilerError(JaxkfacError, RuntimeError):
    """Another device's compiler gave no result."""


class CompilerNotFoundError(CompilerError):
    """The compiler that was asked for is not installed."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """The known names closest to ``name``, quoted and joined, for error messages."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.3) or known[:count]
    return ", ".join(repr(k) for k in close) or "none: there are no layers"
