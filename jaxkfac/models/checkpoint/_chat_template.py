"""Chat templates: Jinja in a sandbox, as tokenizers of Hugging Face carry them."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Messages = Sequence[Mapping[str, Any]]


def render(
    template: str, messages: Messages, *, add_generation_prompt: bool, tokens: Mapping[str, str]
) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source. It comes with the weights, so it runs in a sandbox.
        messages: ``{"role": ..., "content": ...}`` each.
        add_generation_prompt: End with the beginning of an answer.
        tokens: Special tokens by name (``eos_token``), which templates may read.

    Raises:
        ValueError: the template is no Jinja, or refuses these messages.
    """
    jinja2, _ = _environment()
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment()[1].from_string(template)


@functools.cache
def _environment() -> tuple[Any, Any]:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "jaxkfac[pretrained]"', name=error.name
        ) from None

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks answers for training; the text is what it encloses."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:  # Jinja's own escapes for HTML
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return jinja2, environment
