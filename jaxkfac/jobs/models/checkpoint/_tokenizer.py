"""Text to token ids and back, and conversations with a chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkfac._errors import installed_by
from jaxkfac._text import added_tokens
from jaxkfac.files import write_text
from jaxkfac.jobs.models.checkpoint._chat_template import Messages, Rendered, render

# ---------------- small JSON files next to the weights


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: the file is damaged or not an object.
    """
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON object: {error}; download it again") from error


# ---------------- tokenizers of Hugging Face


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the settings that a checkpoint stores for it.

    Attributes:
        eos_ids: Tokens that end an answer.
        pad_id: Token for padding; if none is given, the first of ``eos_ids``, or 0.
        chat_template: Jinja source, or ``None``.
        num_rows: Rows of the model's embedding, where the tokenizer has more tokens than that; a
            text that needs one of the others is refused. ``None`` for no limit.
    """

    num_rows: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer, self._special = tokenizer, dict(special or {})
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id if pad_id is not None else next(iter(self.eos_ids), 0)
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path, *, eos_ids: Sequence[int] = ()) -> "Tokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        The post-processor of ``tokenizer.json`` decides which tokens stand around a text. Where it
        adds none, ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` add them.

        Args:
            folder: Folder of the checkpoint.
            eos_ids: End tokens from the config; the tokenizer's own are added.

        Raises:
            ValueError: a file is damaged.
        """
        file, extra = folder / "tokenizer.json", folder / "tokenizer_config.json"
        try:
            tokenizer = tokenizers_package().Tokenizer.from_file(str(file))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file} is no tokenizer: {error}; download it again") from error
        tokenizer.no_padding()  # set for training; here rows are padded when they are batched
        tokenizer.no_truncation()
        config = read_json(extra) if extra.is_file() else {}
        special = {
            name: _text(value)
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict) and _text(value)
        }
        template = config.get("chat_template")
        if isinstance(template, list):  # several templates, by name
            try:
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            except (LookupError, TypeError) as error:
                raise ValueError(f"{extra} has a chat_template of no known form") from error
        if (jinja := folder / "chat_template.jinja").is_file():
            try:
                template = jinja.read_text(encoding="utf-8")
            except UnicodeError as error:
                raise ValueError(f"{jinja} is no text ({error}): download it again") from error
        if not isinstance(template, str | None):
            raise ValueError(f"{extra} has a chat_template of no known form")
        ends = [*eos_ids, *_ids(tokenizer, special.get("eos_token"))]
        pad = [*_ids(tokenizer, special.get("pad_token")), None][0]
        read = cls(
            tokenizer,
            eos_ids=tuple(dict.fromkeys(ends)),
            pad_id=pad,
            chat_template=template,
            special=special,
        )
        flags = {name: config.get(f"add_{name}") for name in ("bos_token", "eos_token")}
        for name, flag in flags.items():
            if not isinstance(flag, bool | None):
                raise ValueError(f"{extra}: add_{name} is {flag!r}: expected true or false")
        read.add_around(bos=bool(flags["bos_token"]), eos=bool(flags["eos_token"]))
        return read

    def add_around(self, *, bos: bool, eos: bool) -> None:
        """Put special tokens around every text, beside those that the post-processor puts there.

        Args:
            bos: Whether ``bos_token`` comes first; nothing does if there is none.
            eos: Whether ``eos_token`` comes last; nothing does if there is none.
        """
        before, after = added = added_tokens(self)
        before = before or _present(self.bos_id if bos else None)
        after = after or _present(self.eos_id if eos else None)
        if (before, after) == added:
            return  # keeps a post-processor that also does something else
        labels = {token: f"token-{token}" for token in (*before, *after)}
        first, second = (
            [f"{labels[token]}:{side}" for token in before]
            + [f"${'AB'[side]}:{side}"]
            + [f"{labels[token]}:{side}" for token in after]
            for side in (0, 1)
        )
        self._tokenizer.post_processor = tokenizers_package().processors.TemplateProcessing(
            single=first,
            pair=[*first, *second],
            special_tokens=[
                {"id": label, "ids": [token], "tokens": [self._tokenizer.id_to_token(token)]}
                for token, label in labels.items()
            ],
        )

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for :meth:`from_folder`.

        Raises:
            OSError: a file could not be written; an existing one is unchanged.
        """
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        for name, text in (
            ("tokenizer.json", self._tokenizer.to_str()),
            ("tokenizer_config.json", json.dumps({**self._special, **template}, indent=1)),
        ):
            write_text(folder / name, text, "the tokenizer")

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if the files give one."""
        return [*_ids(self._tokenizer, _text(self._special.get("bos_token"))), None][0]

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if the tokenizer's own files give one."""
        return [*_ids(self._tokenizer, _text(self._special.get("eos_token"))), None][0]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text; special tokens in it (``<|im_end|>``) become those tokens.
            add_special_tokens: Whether to add the tokens that the tokenizer puts around a text.

        Raises:
            ValueError: ``tokenizer.json`` lacks what the text needs, or the model has no row for a
                token of the text.
        """
        return self._encoded(text, add_special_tokens).ids

    def _encoded(self, text: str, add_special_tokens: bool) -> Any:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"tokenizer.json cannot encode a text ({error}): download it again"
            ) from error
        self._check_rows(encoded.ids)
        return encoded

    def limited(self, num_rows: int) -> "Tokenizer":
        """The tokenizer for an embedding of ``num_rows`` rows; a file may have more tokens."""
        self.num_rows = num_rows if num_rows < self.size else None
        self.eos_ids = tuple(i for i in self.eos_ids if i < num_rows)
        if self.pad_id >= num_rows:  # no model reads padding, but it must have a row
            self.pad_id = next(iter(self.eos_ids), 0)
        return self

    def _check_rows(self, ids: Sequence[int]) -> None:
        if self.num_rows is not None and (most := max(ids, default=0)) >= self.num_rows:
            token = self._tokenizer.id_to_token(most)
            raise ValueError(
                f"a text needs the token {token!r} (id {most}), and the model's embedding has "
                f"{self.num_rows} rows: leave the token out of the text"
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] = (),
    ) -> list[int]:
        """Token ids of a conversation; see :meth:`render`."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)  # the template already adds them

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] = (),
    ) -> str:
        """The text of a conversation, by the chat template.

        Args:
            messages: A list of ``{"role": "user", "content": "..."}``.
            add_generation_prompt: Whether to end with the start of an answer.
            tools: Functions that may be called, as JSON schemas.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        return self._rendered(messages, add_generation_prompt, tools).text

    def marked_chat(
        self, messages: Messages, *, tools: Sequence[Any] = ()
    ) -> tuple[list[int], list[bool]] | None:
        """Token ids of a conversation, and which of them the assistant generates.

        Args:
            messages: A list of ``{"role": "user", "content": "..."}``.
            tools: Functions that may be called, as JSON schemas.

        Returns:
            ``(ids, generated)`` according to the template's ``{% generation %}`` marks, including
            tokens that a mark splits; ``None`` if the template has no such marks.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        text, answers = self._rendered(messages, False, tools)
        if answers is None:
            return None
        encoding = self._encoded(text, False)
        first, end = np.reshape(encoding.offsets, (-1, 2)).T
        generated = np.zeros(len(first), bool)
        for start, stop in answers:
            generated |= (first < stop) & (end > start)
        return encoding.ids, generated.tolist()

    def _rendered(
        self, messages: Messages, add_generation_prompt: bool, tools: Sequence[Any]
    ) -> Rendered:
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template: give data of plain texts or of prompts and "
                "completions instead of chats, questions with --style plain, or a model folder "
                "with a chat_template"
            )
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tokens=self._special,
            tools=tools,
        )


def tokenizers_package() -> Any:
    """The package ``tokenizers``, or an error that says how to install it."""
    with installed_by("pretrained"):
        import tokenizers
    return tokenizers


def _text(token: Any) -> str:
    """The text of a special token, which files store as a string or as an object."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _present(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _ids(tokenizer: Any, token: str | None) -> list[int]:
    token_id = tokenizer.token_to_id(token) if token else None
    return [] if token_id is None else [token_id]


# ---------------- bytes as tokens, without a vocabulary that must be learnt


_PAD, _END = "<pad>", "</s>"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 258 ids: padding (0), the end of a text (1), and the bytes of UTF-8.

    Raises:
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.size, tokenizer.decode(tokenizer.encode("naïve"))
        (258, 'naïve')
    """
    package = tokenizers_package()
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    ids_by_token = {word: number for number, word in enumerate([_PAD, _END, *alphabet])}
    tokenizer = package.Tokenizer(package.models.BPE(ids_by_token, []))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_special_tokens([_PAD, _END])
    tokenizer.post_processor = package.processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, ids_by_token[_END])]
    )
    special = {"pad_token": _PAD, "eos_token": _END}
    return Tokenizer(
        tokenizer, eos_ids=(ids_by_token[_END],), pad_id=ids_by_token[_PAD], special=special
    )
