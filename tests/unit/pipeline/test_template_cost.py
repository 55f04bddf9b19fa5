"""Chat templates whose single operations would hold the interpreter: they are refused before they run."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.demo.tools.tokenizer import build_tokenizer
from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions, render
from sluice.pipeline.prompts.template_cost import check_cost

GROWS = "{%% set ns = namespace(x=%s) %%}{%% for _ in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
HOSTILE = {
    "power": "{{ 9**(9**9) }}",
    "power of a variable": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "power in a branch never taken": "{% if false %}{{ 9**(9**9) }}{% endif %}",
    "power behind enable_thinking": "{% if enable_thinking is defined %}{{ raise_exception('no enable_thinking') }}"
    "{% endif %}{% set n = 9 %}{{ n ** (n ** n) }}",
    "squares": GROWS % ("9", "ns.x * ns.x"),
    "a long text": "{{ ('a' * 10**9) | length }}",
    "a longer text": "{% set n = 10**10 %}{{ n * 'a' }}",
    "a long list": "{{ ([0] * 10**9) | length }}",
    "doubled by +": GROWS % ("'ab'", "ns.x + ns.x"),
    "doubled by ~": GROWS % ("'ab'", "ns.x ~ ns.x"),
    "doubled by join": GROWS % ("'ab'", "[ns.x, ns.x] | join"),
    "doubled by a method": GROWS % ("'ab'", "''.join([ns.x, ns.x])"),
    "doubled by replace": GROWS % ("'ab'", "ns.x.replace('a', 'aa')"),
    "a list of itself, shown": GROWS % ("[1]", "[ns.x, ns.x]"),
    "a list of itself, as JSON": GROWS.replace("{{ ns.x }}", "{{ ns.x | tojson }}") % ("[1]", "[ns.x, ns.x]"),
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of the filter": "{{ '%999999999d' | format(1) }}",
    "a width of the method": "{{ '{:>999999999}'.format(1) }}",
    "a width that is given": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "a star": "{{ '%*d' % (10**9, 1) }}",
    "padding": "{{ 'a'.ljust(10**10) }}",
    "centred": "{{ 'a' | center(10**10) }}",
    "an indent": "{{ 'a\\nb' | indent(10**9) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=10**9) }}",
    "a precision": "{{ 1.5 | round(10**9, 'floor') }}",
    "tabs": "{{ '\\t\\t'.expandtabs(10**9) }}",
    "a prompt without an end": "{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}",
}
FAIR = {
    "sums": "{{ loop_messages | default(messages) | length * 2 + 1 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ '%05d' % 7 }}",
    "indents": "{{ ' ' * 4 }}{{ 'a' | indent(4) }}{{ '-' * 80 }}{{ [1, {'a': 2}] | tojson(indent=2) }}",
    "times": "{{ strftime_now('%d %b %Y') | length }}{{ 1700000000 + 5 }}{{ 1700000000 | string }}",
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content ~ '!' }}{% endfor %}",
    "format": "{{ '{:>5}|{}'.format(1, 100000) }}{{ '%s of %d' % ('a', 100000) }}",
}


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_costs_too_much_is_the_jobs_failure_at_once(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="is too expensive"):  # what isn't refused ends with the memory, or never
        render(tokenizer, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize("template", FAIR.values(), ids=FAIR.keys())
def test_what_templates_do_is_allowed(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert render(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) is not None


def test_a_message_cannot_make_a_template_costly(tokenizer: Any) -> None:
    """The sizes are those of the messages, which admission bounds."""
    text = "a b\n" * 500_000
    assert len(render(tokenizer, [{"role": "user", "content": text}], ChatTemplateOptions())) > 500_000


@pytest.mark.parametrize("template", ["{{ nothing.at.all }}", "{% if %}", "{{ 1 / 0 }}", "{{ raise_exception('x') }}"])
def test_other_faults_come_up_where_the_prompt_is_made(template: str) -> None:
    check_cost(template, messages=[])
