"""The runtime type hook's checker: beartype, which writes its code once for each signature."""

import types
from collections.abc import Callable
from typing import Any

import beartype

_written: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its annotations checked at every call.

    jaxtyping asks for a function that has the signature of one of the library's and does nothing
    else. For what is defined inside another function it asks anew with every call of that one,
    which took a tenth of all tests' time; the same signature of the same name gets the same check.
    """
    if not isinstance(function, types.FunctionType) or "<locals>" not in function.__qualname__:
        return beartype.beartype(function)
    code = function.__code__
    of = (function.__module__, function.__qualname__, code.co_flags, code.co_varnames)
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    try:
        key = (*of, *numbers, tuple(function.__annotations__.items()))
        if key not in _written:
            _written[key] = beartype.beartype(function)
    except TypeError:  # an annotation without a hash
        return beartype.beartype(function)
    return _written[key]
