"""Text to ids and back; templates in their sandbox."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxkfac.jobs.models import Tokenizer

TRICKY = [
    "Hello world",
    "It costs $12,345.67 in 2024!",
    "  two  spaces\t tab\n\n newline ",
    "naïve café, ünïcödé, 漢字かな 한국어 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2  # square\n",
    "don't they're we'll",
    "\u00a0\u200b\x00\x7f",
    "",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level():
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<|im_start|>", "<|im_end|>", *words])}
    merged = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE({**vocabulary, "he": merged}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def folder_with(folder, **config):
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_what_is_encoded_decodes_to_itself(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the")) == 2


def test_a_conversation_by_its_template(tmp_path):
    special = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|im_start|>"}}
    tokenizer = Tokenizer.from_folder(
        folder_with(tmp_path, chat_template=TEMPLATE, **special), eos_ids=(9, 1)
    )
    assert tokenizer.eos_ids == (9, 1) and tokenizer.pad_id == 0
    messages = [{"role": "user", "content": "hé <b>"}]
    assert tokenizer.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nhé <b><|im_end|>\n"
    )
    ids = tokenizer.chat(messages)
    assert ids[0] == 0 and ids.count(1) == 1
    assert tokenizer.decode(ids) == "user\nhé <b>\nassistant\n"
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == tokenizer.render(messages)
    assert shown.endswith("<|im_start|>assistant\n")


MARKED = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}\n"
    "{%- generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{%- else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_marks_of_a_template_say_which_tokens_are_generated(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, chat_template=MARKED))
    messages = [
        {"role": "user", "content": "hé the 🙂?"},
        {"role": "assistant", "content": "naïve 🙂 he"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "thus"},
    ]
    ids, generated = tokenizer.marked_chat(messages)
    assert ids == tokenizer.chat(messages, add_generation_prompt=False)
    learnt = [i for i, marked in zip(ids, generated, strict=True) if marked]
    said = tokenizer.decode(learnt, skip_special_tokens=False)
    assert said == "naïve 🙂 he<|im_end|>thus<|im_end|>"
    assert "\ufdd0" not in tokenizer.render(messages)
    with_tools, _ = tokenizer.marked_chat(messages, tools=[{"name": "f"}])
    assert tokenizer.decode(with_tools).startswith('[{"name": "f"}]')


def test_a_template_without_marks_says_nothing(tmp_path):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, chat_template=plain))
    assert tokenizer.marked_chat([{"role": "user", "content": "a"}]) is None


def test_a_template_in_a_file_of_its_own_or_by_name(tmp_path):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = folder_with(tmp_path, chat_template=named, eos_token="<|im_end|>")
    assert Tokenizer.from_folder(folder).render([]) == "yes"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages | tojson }}")
    found = Tokenizer.from_folder(folder)
    assert found.render([{"role": "a'"}]) == '<|im_end|>[{"role": "a\'"}]'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "refuses these messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_fails_or_reaches_out_is_an_error(template, message, tmp_path):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_what_is_missing_or_damaged_is_said(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    with pytest.raises(ValueError, match="no chat template: give data .* --style plain"):
        tokenizer.chat([])
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is no JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        Tokenizer.from_folder(tmp_path)
