"""Nonlinearities by name."""

from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._nonlinearity import Nonlinearity

# The one table of this package that grows: a file names its nonlinearity, and what reads the file
# must find a class that the caller may have written.
_KNOWN: dict[str, Nonlinearity] = {}


def register(nonlinearity: Nonlinearity) -> None:
    """Make a nonlinearity known by its name, to :class:`Config` and to files.

    Args:
        nonlinearity: One object for the life of the process, hashable, that does not change: what
            it computes is traced once for each shape.

    Raises:
        TypeError: it has no hash, as a dataclass that is not frozen, or that holds an array.
        ValueError: a name that is no identifier or belongs to another object, or no coefficients.
    """
    name = nonlinearity.name
    if not name.isidentifier():
        raise ValueError(f"nonlinearity {name!r}: expected an identifier, which keys in files hold")
    if not nonlinearity.initial:
        raise ValueError(f"nonlinearity {name!r} has no initial coefficients")
    try:
        hash(nonlinearity)
    except TypeError:
        raise TypeError(
            f"nonlinearity {name!r} has no hash: a dataclass has one if it is frozen, and if all "
            "its fields have one"
        ) from None
    if _KNOWN.get(name, nonlinearity) is not nonlinearity:
        raise ValueError(f"nonlinearity {name!r} is registered already, as {_KNOWN[name]!r}")
    _KNOWN[name] = nonlinearity


def find_nonlinearity(name: str) -> Nonlinearity:
    """The nonlinearity of a name.

    Raises:
        ValueError: it is not known; with the names that are.
    """
    if name not in _KNOWN:
        raise ValueError(
            f"nonlinearity={name!r}: expected one of {', '.join(map(repr, sorted(_KNOWN)))}, or "
            "one that was registered with jk.lslora.register"
        )
    return _KNOWN[name]


for _member in (FOURIER,):
    register(_member)
