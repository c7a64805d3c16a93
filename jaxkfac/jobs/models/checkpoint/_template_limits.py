"""Jinja in a sandbox with limits: templates come with the weights, so their work is bounded.

Jinja is an extra, so this file is imported only when a template is rendered.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sized
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox

MAX_STEPS = 200_000  # loop iterations and macro calls; a long conversation takes thousands
MAX_SIZE = 1 << 24  # characters of a text, elements of a list
_MAX_BITS = 1 << 14  # of an integer
_WIDTHS = ("center", "indent", "truncate", "wordwrap", "batch", "slice", "round")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that counts steps and refuses operators with huge results.

    Only loops and macros can repeat code in a template, so counting them makes every one end.
    Steps are counted rather than seconds, so a row is refused on every machine or on none.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run = threading.local()
        self.code_generator_class = _CodeGenerator
        for name in _WIDTHS:
            self.filters[name] = _checked(self.filters[name], _check_numbers)
        self.filters["format"] = _checked(self.filters["format"], _check_form)
        self.filters["replace"] = _checked(
            self.filters["replace"], lambda values: _check_replaced(*values[1:4])
        )
        self.filters["join"] = self._join_filter(self.filters["join"])

    def begin(self) -> None:
        """Count from zero in this thread."""
        self._run.steps = 0

    def step(self) -> str:
        """Count one step."""
        self._run.steps = getattr(self._run, "steps", 0) + 1
        if self._run.steps > MAX_STEPS:
            _refuse(f"it takes more than {MAX_STEPS} rounds of its loops and calls")
        return ""

    def joined(self, parts: Iterable[Any]) -> str:
        """The concatenated output of a template, or of the operator ``~``."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _join_filter(self, function: Any) -> Any:
        """``join`` that counts a step per part and refuses a result that is too long."""

        @functools.wraps(function)
        def join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
            parts = []
            for part in value:
                self.step()
                parts.append(part)
            if attribute is not None:
                parts = list(map(jinja2.filters.make_attrgetter(self, attribute), parts))
            size = len(str(d)) * max(len(parts) - 1, 0)
            for part in parts:
                size += len(str(part))
                _check_size(size)
            return function(context, parts, d)

        return join

    concat = joined  # Jinja uses this name for the output of a block, a macro or a template

    def _generate(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = jinja2.nodes
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            count = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse calls of string methods with numbers that would make huge strings."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _check_numbers((*args, *kwargs.values()))
            if function.__name__ == "replace":
                _check_replaced(text, *args[:2])
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """``str.format`` in the sandbox, without widths that would make huge strings."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form = value.__self__
        return _checked(wrapped, lambda values: _check_form((form, *values)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless its result would be too large."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            for count, operand in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(operand, int):
                    _check_bits(count.bit_length() + operand.bit_length())
                elif isinstance(count, int) and isinstance(operand, Sized):
                    _check_size(count * len(operand))
        elif operator == "%" and isinstance(left, str):
            _check_form((left, *(right if isinstance(right, tuple) else (right,))))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _checked(function: Any, check: Callable[[tuple[Any, ...]], None]) -> Any:
    """A filter whose arguments are checked first."""

    @functools.wraps(function)  # an attribute tells Jinja what the filter is called with
    def checked(*args: Any, **kwargs: Any) -> Any:
        check((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _check_form(values: tuple[Any, ...]) -> None:
    """Check a format such as ``"%9d"`` or ``"{:9}"`` and its arguments, which may be widths."""
    form, *arguments = (
        value for value in values if not isinstance(value, jinja2.nodes.EvalContext)
    )
    for width in re.findall(r"\d{7,}", str(form)):
        _check_numbers([int(width[:20])])
    if re.search(r"\*|:[^}]*\{", str(form)):
        _check_numbers(arguments)


def _check_replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _check_size(str(text).count(str(old)) * len(str(new)))


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_SIZE:
            _refuse(f"it asks for a text of {value:g} characters")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        _refuse(f"it computes an integer of {bits} bits")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        _refuse(f"it makes a text or list of {size} elements")


def _refuse(reason: str) -> NoReturn:
    raise jinja2.sandbox.SecurityError(reason)
