"""Chat templates: Jinja in a sandbox, as in tokenizers of Hugging Face."""

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox

# ---------------- bounded Jinja: templates come with the weights, so their work is limited


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


# ---------------- the templates


Messages = Sequence[Mapping[str, Any]]
# Delimiters around answers during rendering: Unicode noncharacters, which no text contains.
_START, _END = "\ufdd0", "\ufdd1"


class Rendered(NamedTuple):
    """The text of a conversation.

    Attributes:
        text: All of it.
        answers: ``(start, stop)`` of what the template marks as generated, in characters;
            ``None`` if it has no such marks.
    """

    text: str
    answers: list[tuple[int, int]] | None


def render(
    template: str,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
    tools: Sequence[Any] = (),
) -> Rendered:
    """The text of a conversation.

    Args:
        template: Jinja source. It comes with the weights, so it is run in a sandbox.
        messages: A list of ``{"role": ..., "content": ...}``.
        add_generation_prompt: Whether to end with the start of an answer.
        tokens: Special tokens by name (``eos_token``), which a template may use.
        tools: Descriptions of functions, which a template may use.

    Raises:
        ValueError: the template is not valid Jinja, refuses these messages, fails, or exceeds the
            limits on computation, which depend only on the template and the messages.
    """
    environment = _environment()
    environment.begin()
    try:
        text = _compiled(template).render(
            messages=[dict(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a template is a program: division by zero, recursion, an index
        (what, *_) = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"the chat template refuses these messages: {what}") from error
    if not _marks_answers(template):
        return Rendered(text, None)
    return _without_marks(text)


@functools.lru_cache(maxsize=8)
def _marks_answers(template: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\b", template) is not None


def _without_marks(text: str) -> Rendered:
    before, *marked = text.split(_START)
    parts, answers, length = [before], [], len(before)
    for piece in marked:
        answer, _, text_after = piece.partition(_END)
        answers.append((length, length + len(answer)))
        parts += [answer, text_after]
        length += len(answer) + len(text_after)
    return Rendered("".join(parts), answers)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes

    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "jaxkfac[pretrained]"', name=error.name
        ) from None

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks answers for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (
                jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)
                for mark in (_START, _END)
            )
            return [start, *body, end]

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:  # Jinja's own escapes for HTML
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
