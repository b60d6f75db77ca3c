"""The limits of chat templates: what stays below them renders."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anydecode.errors import InvalidRequestError
from anydecode.models.chat import MAX_CHARACTERS, render, select_template, time_limit
from anydecode.models.template_sandbox import MAX_COMPUTED_BYTES


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'ab' * 3 }}", "ababab"),
        ("{{ (3 * [1]) | length }}", "3"),
        ("{{ 3 * 4 }}", "12"),
        ("{{ 2 ** 10 }}", "1024"),
        ("{{ 1024 ** 2 }}", str(1024**2)),
        (f"{{{{ ('a' * {MAX_CHARACTERS}) | length }}}}", str(MAX_CHARACTERS)),
    ],
)
def test_expressions_below_the_limits_render(template: str, text: str) -> None:
    assert render(template, []) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (f"{{{{ ('a' * {MAX_CHARACTERS + 1}) | length }}}}", "too long"),
        (f"{{{{ ({MAX_CHARACTERS + 1} * [1]) | length }}}}", "too long"),
        ("{{ 1025 ** 2 }}", "too large a power"),
        ("{{ 2 ** 1025 }}", "too large a power"),
        ("{{ 2 ** -1025 }}", "too large a power"),
    ],
)
def test_expressions_beyond_the_limits_are_refused(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        render(template, [])


#: Templates that would take gigabytes, or hours.
BOMBS = (
    "{{ '%999999999d' % 12 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "{{ ('%s' * 9999) % ('a' * 9999) }}",
    "{{ ('%(a)s' * 9999) % {'a': 'a' * 9999} }}",
    "{{ '%999999999d' | format(12) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [1] }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(width=10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    "{{ 'a'.translate({97: 'a' * 9999}) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ ('a' * 9999).join('a' * 9999) }}",
    "{{ 'a'.join(['a' * 9999] * 9999) }}",
    "{{ ('a' * 9999).replace('a', 'a' * 9999) }}",
    "{{ ('a' * 9999).replace('', 'a' * 9999) }}",
    "{{ range(10**9) | list }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a' | center(width=10**9) }}",
    "{{ ('\n' * 9999) | indent(99999) }}",
    "{{ ('\n' * 9999) | indent('a' * 9999, blank=true) }}",
    "{{ ('a' * 9999) | wordwrap(1, wrapstring='a' * 9999) }}",
    "{{ ['a' * 9999] * 9999 | join }}",
    "{{ (['a'] * 9999) | join('a' * 9999) }}",
    "{{ (range(9999) | map('string')) | join('a' * 9999) }}",
    "{{ ('a' * 9999) | replace('a', 'a' * 9999) }}",
    "{{ [1] | batch(10**9, 1) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 1 | round(10**9, 'ceil') }}",
    "{{ [[1]] | tojson(indent=10**9) }}",
    "{{ ([[1]] * 9999) | tojson(indent=1000) | length ~ [[1] * 9999] * 9999 }}",
    "{{ ([[1] * 999] * 999) | sum(start=[]) }}",
    "{{ lipsum(10**9) }}",
    "{{ 'http://a ' | urlize(rel='a' * 9999) }}",
    "{{ strftime_now('%999999999d') }}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=(1, 2)) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}"
    "{% endfor %}",
    "{% macro m() %}{% set n.x = varargs %}{% endmacro %}{% set n = namespace(x=(1,)) %}"
    "{% for i in range(99) %}{{ m(n.x, n.x) }}{% endfor %}",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = n.x + ['a' * 9999999] %}{% endfor %}",
    "{% set a = 'a' * 9999999 %}{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = n.x + [a[1:]] %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "{% set r = range(99999) %}" + "{% for i in r %}" * 3 + "{% endfor %}" * 3,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("template", BOMBS)
def test_templates_cannot_take_much_memory_or_time(template: str) -> None:
    tracemalloc.start()
    try:
        with time_limit(2.0), pytest.raises(InvalidRequestError) as error:
            render(template, [])
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_COMPUTED_BYTES
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


MESSAGES = [{"role": "user", "content": "a <b>\n"}, {"role": "assistant", "content": "c", "n": [1]}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index ~ ': ' ~ m.content | trim }}{% endfor %}",
        "{% for m in messages[1:] + messages[:-1] %}{{ m['role'].upper()[::-1] }}{% endfor %}",
        "{% for m in messages[::-1] if m.n is defined %}{{ m.n }}{% else %}x{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'a': (1, 'b')} }}{{ [1, [2.5, none]] }}",
        "{{ '%s of %05.1f%%' % ('a', 2) }}{{ '%(a)-4sb' % {'a': 1} }}",
        "{{ '{:>5}{x}'.format(1, x=2) }}{{ '{{}}'.format() }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ 'a b'.split() | join }}",
        "{{ 'a,b'.replace(',', ';') | replace('a', 'c') | center(9) | indent(2) }}",
        "{{ range(7) | batch(3, 'x') | list }}{{ 2.345 | round(1) }}{{ ['b', 'a'] | sort }}",
        "{% set n = namespace(x=0) %}{% for i in [2, 3] %}{% set n.x = n.x + i %}{% endfor %}"
        "{{ n.x }}",
        "{% macro m(a, b) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
        "{{ m(1, 2, 3, c=4) }}",
        "{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}",
        "{% set x %} {{ 'a' | e }}&{% endset %}{{ x }}{{ x | length }}{{ 'a' in x }}",
        "{% for i in range(5000) %}{{ loop.revindex if loop.first or loop.last }}{% endfor %}",
        "{% for m in messages recursive %}{{ m.role }}{{ loop(m.n) if m.n else '' }}{% endfor %}",
        "{% filter upper %}a{{ 'b' }}{% endfilter %}",
        "{% macro m() %}({{ caller('x') }}){% endmacro %}{% call(x) m() %}{{ x }}!{% endcall %}",
    ],
)  # fmt: skip
def test_templates_render_as_in_the_sandbox_of_jinja(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, **named: json.dumps(value, **named)
    assert render(template, MESSAGES) == plain.from_string(template).render(messages=MESSAGES)


@pytest.mark.parametrize(
    ("names", "variables", "chosen"),
    [
        (("default", "tool_use"), {}, "default"),
        (("default", "tool_use"), {"tools": None}, "default"),
        (("default", "tool_use"), {"tools": []}, "default"),
        (("default", "tool_use"), {"tools": [{"type": "function"}]}, "tool_use"),
        (("default", "rag"), {"tools": [{"type": "function"}]}, "default"),
    ],
)
def test_the_template_for_tools_is_chosen_if_there_are_tools(
    names: tuple[str, ...], variables: dict[str, Any], chosen: str
) -> None:
    assert select_template({name: name for name in names}, variables) == chosen


def test_a_template_without_a_known_name_is_not_chosen() -> None:
    with pytest.raises(InvalidRequestError, match="its templates are rag, tool_use"):
        select_template({"tool_use": "", "rag": ""}, {"tools": []})
