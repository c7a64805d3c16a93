"""The runtime type hook's checker: beartype, which writes its code once for each signature."""

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

_written: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its annotations checked at every call.

    jaxtyping asks for a function that has the signature of one of the library's and does nothing
    else. For what is defined inside another function it asks anew with every call of that one,
    which took a tenth of all tests' time; the same signature of the same name gets the same check.
    For all others it asks when a module is imported, twice each, and most are not called in this
    process: their check is written at the first call.
    """
    if not isinstance(function, types.FunctionType):
        return beartype.beartype(function)
    if "<locals>" not in function.__qualname__:
        return _written_when_called(function)
    code = function.__code__
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    hints = tuple((name, _key(hint)) for name, hint in function.__annotations__.items())
    try:
        key = (function.__module__, function.__qualname__, code.co_varnames, numbers, hints)
        if key not in _written:
            _written[key] = beartype.beartype(function)
    except TypeError:  # a hint without a hash
        return beartype.beartype(function)
    return _written[key]


def _written_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    check: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = beartype.beartype(function)
        return check(*args, **kwargs)

    return call


def _key(hint: Any) -> Any:
    """What two hints have in common that say the same; array types are made anew each time."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.dtype, hint.array_type, hint.dim_str
    if isinstance(hint, list):  # the arguments of a callable
        return tuple(map(_key, hint))
    if parts := typing.get_args(hint):
        return typing.get_origin(hint), *map(_key, parts)
    return hint
