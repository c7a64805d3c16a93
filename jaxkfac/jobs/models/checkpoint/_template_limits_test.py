"""Templates that would never end, or fill the memory, are refused in a sentence."""

import pytest

from jaxkfac.jobs.models.checkpoint import _template_limits
from jaxkfac.jobs.models.checkpoint._chat_template import render

MESSAGES = [{"role": "user", "content": "hello"}]
DOUBLING = "{%% set ns = namespace(s='aa') %%}{%% for i in range(99) %%}%s{%% endfor %%}"


def rendered(template):
    return render(template, MESSAGES, add_generation_prompt=True, tokens={}).text


@pytest.mark.default(15, slow=2)
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 9**(9**8) }}", "integer of 172186884 bits"),
        ("{{ 'a' * 10**12 }}", "1000000000000 elements"),
        ("{{ [1] * 10**12 }}", "1000000000000 elements"),
        ("{{ 'a'.center(10**9) }}", "a text of 1e\\+09 characters"),
        ("{{ 'a'|center(10**9) }}", "a text of 1e\\+09 characters"),
        ("{{ '%999999999d' % 1 }}", "a text of 1e\\+09 characters"),
        ("{{ '%*d' % (10**9, 1) }}", "a text of 1e\\+09 characters"),
        ("{{ '%999999999d'|format(1) }}", "a text of 1e\\+09 characters"),
        ("{{ '{:999999999}'.format(1) }}", "a text of 1e\\+09 characters"),
        ("{{ '{:{w}}'.format(1, w=10**9) }}", "a text of 1e\\+09 characters"),
        (DOUBLING % "{% set ns.s = ns.s ~ ns.s %}", "33554432 elements"),
        (DOUBLING % "{% set ns.s = ns.s + ns.s %}", "33554432 elements"),
        (DOUBLING % "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}", "elements"),
        (DOUBLING % "{% set ns.s = ns.s|replace('a', 'aaaa') %}", "elements"),
        (DOUBLING % "{% set ns.s = [ns.s, ns.s]|join %}", "elements"),
        ("{{ range(99999)|join('a' * 9999) }}", "elements"),
        ("{{ ([{'a': 'b' * 9999}] * 9999)|join(attribute='a') }}", "elements"),
        (DOUBLING % "{% set ns.s = ns.s.replace('a', 'aaaa') %}", "elements"),
        ("{% set ns = namespace(s=3) %}{% for i in range(99) %}{% set ns.s = ns.s * ns.s %}"
         "{% endfor %}", "an integer of"),
        ("{{ 1/0 }}", "division by zero"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[0].content() }}", "not callable"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_fails_is_refused(template, reason):
    with pytest.raises(ValueError, match=f"the chat template refuses these messages: .*{reason}"):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99) %}{% for b in range(99) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) if a < 5000 %}{% endfor %}",
        "{{ range(9999)|join }}",
        "{{ range(9999)|map('string')|join(',') }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}"
        "{% for i in range(999) %}{% call f() %}x{% endcall %}{% endfor %}",
    ],
)
def test_loops_and_calls_come_to_an_end(template, monkeypatch):
    monkeypatch.setattr(_template_limits, "MAX_STEPS", 1000)
    with pytest.raises(ValueError, match="more than 1000 rounds"):
        rendered(template)


def test_each_conversation_counts_its_own_rounds(monkeypatch):
    monkeypatch.setattr(_template_limits, "MAX_STEPS", 40)
    for _ in range(3):
        assert rendered("{% for i in range(30) %}{{ i % 10 }}{% endfor %}") == "0123456789" * 3


def test_texts_are_joined_as_jinja_joins_them():
    template = "{{ [1, 'b']|join('-') }}{{ messages|join(',', attribute='content') }}{{ []|join }}"
    assert rendered(template) == "1-bhello"


def test_what_templates_do_gives_what_jinja_gives():
    template = (
        "{{ 'a' ~ 1 ~ none ~ 'b' }}|{{ '%5.1f' % 3 }}|{{ '%s-%s'|format(1, 2) }}|"
        "{{ 'aXa'|replace('X', 'Y') }}|{{ '{:>4}'.format(3) }}|{{ 'ab'|center(6) }}|"
        "{{ 2**10 }}|{{ [1] + [2] }}|{{ 'ab' * 2 }}|{{ 'x\ny'|indent(2) }}|{{ 2.5|round(0) }}"
    )
    found = "a1Noneb|  3.0|1-2|aYa|   3|  ab  |1024|[1, 2]|abab|x\n  y|2.0"
    assert rendered(template) == found
