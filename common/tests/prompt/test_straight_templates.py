"""Templates as plain functions, against Jinja."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prompt.errors import BeyondError, PromptError
from penstock.prompt.skeleton import Gap
from penstock.prompt.template import ChatTemplate

ROOT = Path(__file__).parents[3]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\n\n" }}{{- system_message }}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start|>' + message['role'] + '\n\n'+ message['content'] | trim }}
{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("only single calls") }}{%- endif %}
{{- message.tool_calls[0].function.name }}{{- message.tool_calls[0].function.arguments | tojson }}{%- endif %}{%- endfor %}"""
QWEN3 = """{%- macro shown(value) %}{{ value | upper }}{% endmacro %}
{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{{ shown(tool.function.name) }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1, seen='') %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
 message.content.startswith('<tool_response>')
 and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '\n' }}
{%- elif message.role == "assistant" %}{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}{%- else %}
{{- message.role ~ content ~ loop.length }}{%- endif %}
{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}{%- if (loop.first and content) or (not loop.first) %}
{{- '\n' }}{%- endif %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- tool_call.name }}{{- tool_call.arguments | tojson }}
{%- endfor %}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"""
SCOPES = """{{ content }}{% for m in messages %}{{ style }}{{ date_string }}{% endfor %}{% set style = 1 %}
{% set content = 2 %}{{ style }}
{% if add_generation_prompt %}{% set date_string = 3 %}{% endif %}{{ date_string }}{{ enable_thinking }}{% for m in messages %}
{% set enable_thinking = 4 %}{% endfor %}{{ enable_thinking }}{% set a = 'A' %}{% for m in messages %}
{{ a }}{{ b }}{% set b = m.content %}{% set a = a ~ loop.index %}{{ a }}{{ b }}
{% for n in messages %}{{ a }}{% if loop.last %}{% set a = 'x' %}{% endif %}{{ a }}{{ loop.index }}{{ m.role }}{% endfor %}
{{ loop.index }}
{% if loop.index > 2 %}{% break %}{% elif m.name %}{% continue %}{% endif %}.{% endfor %}
{{ a }}{{ b }}{{ m }}{{ none }}{{ 7 - 9 }}{{ true }}"""
ODD = """{{ messages[0].items }}{{ messages | map(attribute='role') | join(',') }}{% for k, v in messages[0].items() %}
{{ k }}{% endfor %}
{% with x = 1 %}{{ x }}{% endwith %}{% for m in messages if m.role == 'user' %}{{ m }}{% else %}none{% endfor %}"""
BRANCHES = """{% for m in messages %}
{{ m.content[0] if m.content }}{{ m['name'] if m.name is defined else m.role }}{{ m.get('role') }}{% endfor %}
{{ style }}{{ style.colour if style }}{{ messages[-1].role in ['user', 'tool'] }}
{{ messages[5].role }}{{ 'go on' if add_generation_prompt }}"""
FOLDERS = ("examples/models/penstock-tiny", "benchmarks/shapes")
TEMPLATES = {
    "ChatML": CHATML, "Llama 2": LLAMA2, "Llama 3": LLAMA3, "Qwen 3": QWEN3, "Gemma": GEMMA, "scopes": SCOPES, "odd": ODD,
    "branches": BRANCHES,
    **{folder: json.loads((ROOT / folder / "tokenizer_config.json").read_text())["chat_template"] for folder in FOLDERS},
}  # fmt: skip
PLAIN = TEMPLATES.keys() - {"odd", "branches"}
"""Those that Jinja is not needed for with usual messages."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

PARTS = ["", " ", "\n", "the mill", "</think>", "<think>", "<tool_response>", "</tool_response>", "{{ x }}", "\ud800"]
texts = st.lists(st.sampled_from(PARTS), max_size=4).map("".join)
calls = st.lists(st.just({"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}), min_size=1, max_size=2)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": texts | st.just([{"type": "text", "text": "x"}]),
    },
    optional={"name": texts, "reasoning_content": texts, "tool_calls": calls},
)
variables = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans(), "tools": st.none() | st.just([{"type": "function", "function": {"name": "f"}}])},
    optional={
        "enable_thinking": st.booleans(), "style": st.sampled_from(["", {"colour": "red"}]), "a": texts, "content": texts,
        "date_string": texts,
        "loop": texts, "namespace": texts, "m": texts, "reasoning_effort": texts,
    },
)  # fmt: skip


def outcome(template: ChatTemplate, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
    try:
        return template.render(messages, **given)
    except PromptError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_a_plain_function_writes_what_jinja_writes(kind: str) -> None:
    template = ChatTemplate(TEMPLATES[kind], TOKENS)
    with patch("penstock.prompt.template.straight", lambda *_: None):
        jinjas = ChatTemplate(TEMPLATES[kind], TOKENS)
    assert template._straight is not None

    @settings(max_examples=300)
    @given(st.lists(message, min_size=1, max_size=5), variables)
    def check(messages: list[dict[str, Any]], given: dict[str, Any]) -> None:
        assert outcome(template, messages, given) == outcome(jinjas, messages, given)

    check()


@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_usual_requests_need_no_jinja(kind: str) -> None:
    straight = ChatTemplate(TEMPLATES[kind], TOKENS)._straight
    assert straight is not None
    roles = ("user", "assistant", "user")
    given = {"messages": [{"role": role, "content": "the mill"} for role in roles], "tools": None, "add_generation_prompt": True}
    try:
        plain = "mill" in straight.text(TOKENS | given)
    except BeyondError:
        plain = False
    assert plain == (kind in PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "{% block x %}{{ messages }}{% endblock %}",
        "{% set namespace = 1 %}{{ namespace }}",
        "{% for café in messages %}{{ café.role }}{% endfor %}",
        "{{ messages[0].role" + " ~ (x" * 68 + ")" * 68 + " }}",
    ],
)
def test_templates_that_are_no_plain_bodies_are_jinjas(source: str) -> None:
    with ThreadPoolExecutor(1) as empty_stack:
        template = empty_stack.submit(ChatTemplate, source, {}).result()
    assert template._straight is None
    assert template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1e999 }}",
        "{{ 99999999999999999999 }}",
        "{{ namespace }}",
        "{{ namespace(a=1) }}{% set n = namespace(a=1) %}{{ n.a }}",
        "{% macro m() %}x{% endmacro %}{{ m() }}{% if m %}y{% endif %}",
        "{{ x.y.z }}",
        "{{ messages[1:3:-1] }}",
        "{{ messages['a'] }}",
        "{% set n = 1 %}{% set n.a = 2 %}",
        "{% set n = namespace() %}{% set n.a = 2 %}{{ n.a }}{{ n.b }}",
        "{% set a, b = 1, 2 %}{{ a }}",
        "{% set a %}x{% endset %}{{ a }}",
        "{{ -messages | length }}",
        "{{ messages | length(1) }}",
        "{{ 1 < 2 < 1 }}",
        "{{ not messages }}",
        "{{ loop }}",
        "{{ ['a', 1, none] }}",
        "{{ messages[0]['keys'] }}",
        "{{ messages[0].content.upper() }}{{ {'a': 1} }}",
        "{{ 'a' 'b' }}",
        "{% if false %}{% elif true %}x{% else %}{% endif %}",
        "{{ messages[0].content.split(' ', 1) }}",
        "{{ '%s' % 1 }}",
        "{{ 'é\\n\"' }}",
        "{% set x = messages[0] %}{{ x.role is undefined }}{{ x is none }}{{ x.y is true }}",
        "{% for x in 'abc' %}{{ x }}{% endfor %}",
    ],
)
def test_corners_are_as_jinja_has_them(source: str) -> None:
    messages = [{"role": "user", "content": "the mill turns"}]
    with patch("penstock.prompt.template.straight", lambda *_: None):
        jinjas = ChatTemplate(source, {})
    assert outcome(ChatTemplate(source, {}), messages, {}) == outcome(jinjas, messages, {})


def filled(parts: tuple[str | Gap, ...], contents: list[str]) -> str:
    def text(gap: Gap) -> str:
        return contents[gap.message].strip() if gap.trimmed else contents[gap.message]

    return "".join(part if isinstance(part, str) else text(part) for part in parts)


COPIES = TEMPLATES.keys() - {"odd", "branches", "Qwen 3"}
"""Those that only copy usual contents."""


@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_what_stands_around_contents_is_the_same_for_all_of_one_shape(kind: str) -> None:
    template = ChatTemplate(TEMPLATES[kind], TOKENS)
    with patch("penstock.prompt.template.straight", lambda *_: None):
        jinjas = ChatTemplate(TEMPLATES[kind], TOKENS)
    assert jinjas.skeleton([("user", False)]) is None
    roles = st.sampled_from(["system", "user", "assistant", "tool"])

    @settings(max_examples=300)
    @given(st.lists(st.tuples(roles, texts), min_size=1, max_size=5), st.booleans())
    def check(messages: list[tuple[str, str]], begin: bool) -> None:
        contents = [content for _, content in messages]
        parts = template.skeleton([(role, not content) for role, content in messages], tools=None, add_generation_prompt=begin)
        if parts is not None:
            given = [{"role": role, "content": content} for role, content in messages]
            assert filled(parts, contents) == jinjas.render(given, tools=None, add_generation_prompt=begin)

    check()
    usual = [("user", False), ("assistant", False), ("user", False)]
    assert (template.skeleton(usual, tools=None, add_generation_prompt=True) is not None) == (kind in COPIES)


TELLS_NOTHING = {
    "{{ a }}{{ 'x' ~ a }}{{ a + 'y' }}{{ 'x' + a + b }}{{ a | trim }}{{ b.strip() }}",
    "{{ a is string }}{{ a is defined }}{{ a is none }}{{ 'full' if a else 'empty' }}{{ a ~ '' and 'x' }}{{ not b }}",
    "{% set c = a ~ 'x' %}{{ c }}{% if c %}{{ b }}{% endif %}",
    "{% if a | trim is string %}{{ a }}{% endif %}",
}
TELLS = {
    "{{ a == 'x' }}", "{{ a != b }}", "{{ a in 'xyz' }}", "{{ a in ['x'] }}", "{{ 'x' in a }}", "{{ a < 'x' }}", "{{ a * 2 }}",
    "{{ '%s' % a }}", "{{ a % 1 }}", "{{ a[0] }}", "{{ a[1:] }}", "{% for x in a %}{{ x }}{% endfor %}", "{{ messages[0] }}",
    "{{ a.split('x') }}", "{{ a.strip('x') }}", "{{ (a ~ 'x') | trim }}", "{{ 'x' if a | trim }}", "{{ a.upper() }}", "{{ a.x }}",
    "{{ messages[a] }}", "{{ a + 1 }}", "{{ 1 + a }}", "{{ [a] }}", "{{ a | length }}",
    "{{ messages[0] == messages[1] }}", "{{ (a ~ b) == 'x' }}",
    "{% set c = namespace(d=a) %}{{ c.d == 'x' }}", "{{ ('x' ~ a) in 'xyz' }}", "{{ a | upper }}", "{{ -a }}", "{{ {a: 1} }}",
}  # fmt: skip


@pytest.mark.parametrize("source", sorted(TELLS_NOTHING | TELLS))
def test_only_contents_that_are_copied_leave_a_skeleton(source: str) -> None:
    template = ChatTemplate("{% set a = messages[0].content %}{% set b = messages[1].content %}" + source, {})
    shape = [("user", False), ("user", True)]
    parts = template.skeleton(shape)
    assert (parts is not None) == (source in TELLS_NOTHING)
    for contents in ([" x\n", ""], ["y", ""], ["\x1c", ""]):
        if parts is not None:
            assert filled(parts, contents) == template.render([{"role": "user", "content": content} for content in contents])
