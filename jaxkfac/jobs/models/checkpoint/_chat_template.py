"""Chat templates: Jinja in a sandbox, as in tokenizers of Hugging Face."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxkfac._errors import installed_by

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
    with installed_by("pretrained"):
        import jinja2
        import jinja2.ext
        import jinja2.nodes

        from jaxkfac.jobs.models.checkpoint._template_limits import LimitedEnvironment

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
