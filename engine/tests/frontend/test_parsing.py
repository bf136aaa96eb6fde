"""Answers in the models' own chat formats, taken apart whole and in pieces of any size.

The samples are those of the chat templates of Hermes 2 Pro and Qwen 2.5/3, Llama 3.1 and 3.2, Llama 4, Mistral 7B v0.3 and Small
3.1, DeepSeek V3, R1 and V3.1, and gpt-oss.
"""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.frontend.openai.parsing.assembly import Assembler
from penstock.engine.frontend.openai.parsing.harmony import MARKERS
from penstock.engine.frontend.openai.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, ParserConfig

TOOLS = ("get_weather", "add")
Call = tuple[str, Any]


def take(
    config: ParserConfig, parts: Sequence[str], prompt_end: str = "", tools: Any = TOOLS
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with their arguments as text."""
    parser = config.parser(tools, prompt_end)
    assert parser is not None
    assembler = Assembler(parser)
    content, reasoning, calls = "", "", []
    for delta in [*(assembler.feed(part, final=False) for part in parts), assembler.feed("", final=True)]:
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls) and call.id
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert assembler.called == bool(calls)
    return content, reasoning, calls


def check(config: ParserConfig, text: str, content: str, calls: list[Call], reasoning: str = "", prompt_end: str = "") -> None:
    """The whole, every character alone, and every cut in two give the same."""
    whole = take(config, [text], prompt_end)
    assert whole[:2] == (content, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    assert take(config, list(text), prompt_end) == whole
    for at in range(len(text)):
        assert take(config, [text[:at], text[at:]], prompt_end) == whole, text[:at]


PARIS: Call = ("get_weather", {"city": "Paris"})
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'
    '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": [2]}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
ADD: Call = ("add", {"a": 1, "b": [2]})
WELL_FORMED = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": [2]}, "name": "add"}\n</tool_call>',
        "Let me see.\n",
        [PARIS, ADD],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"x": "</tool_call> } \\" {"}}</tool_call> ok',
        " ok",
        [("add", {"x": '</tool_call> } " {'})],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>', "", [("add", {"a": 1})]),  # a brace forgotten
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "add", "parameters": {"a": 1, "b": [2]}}',
        "",
        [PARIS, ADD],
    ),
    ("pythonic", "[get_weather(city='Paris'), add(a=1, b=[2])]", "", [PARIS, ADD]),
    ("llama4_pythonic", '<|python_start|>[get_weather(city="Paris")]<|python_end|>', "", [PARIS]),
    (
        "pythonic",
        r"[add(x='it\'s )]\\', y={'k': (None, True)}, z=-1.5)]",
        "",
        [("add", {"x": "it's )]\\", "y": {"k": [None, True]}, "z": -1.5})],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    (
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "add", "arguments": {"a": 1, "b": [2]}}]',
        "Sure.",
        [PARIS, ADD],
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]add{"a": 1, "b": [2]}', "", [PARIS, ADD]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("deepseek_v3", DEEPSEEK, "", [PARIS, ADD]),
    ("deepseek_v3", "I look.\n" + DEEPSEEK, "I look.\n", [PARIS, ADD]),
    ("deepseek_v31", DEEPSEEK_31, "", [PARIS, ADD]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
def test_calls_are_found_however_the_text_is_cut(name: str, text: str, content: str, calls: list[Call]) -> None:
    check(ParserConfig(tools=name), text, content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "no call <tool_cal> here, nor <tool_call> here"),
        ("hermes", '<tool_call>{"nome": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("llama3_json", '{"answer": {"name": "add", "parameters": {}}}'),
        ("llama3_json", '{"name": "Ada", "parameters": {"born": 1815}}'),  # no tool
        ("llama3_json", '{"name": "add", "param'),
        ("llama3_json", '  {} and {"name": "add", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2] are numbers"),
        ("pythonic", "[print('x')]"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(a=b)]"),
        ("pythonic", "[add(a='x"),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", b"[add(a='\\ud800')]".decode("unicode_escape").replace("\ud800", "\\udc80\\ud800")),
        ("pythonic", "[add(" + "a=[" * 300 + ")]"),
        ("llama4_pythonic", "  <|python_start|> [1]"),
        ("mistral", "[TOOL_CALLS] and then text, [TOOL_CALL"),
        ("mistral", '[TOOL_CALLS][{"a": 1}]'),
        ("mistral", "[TOOL_CALLS]" + "x" * 600 + "{}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>oops{}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ge"),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    check(ParserConfig(tools=name), text, text, [])


def test_text_after_a_broken_second_call_is_kept() -> None:
    check(ParserConfig(tools="pythonic"), "[get_weather(city='Paris'), oops] bye", ", oops] bye", [PARIS])
    text = '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"a": 1} bye'
    check(ParserConfig(tools="llama3_json"), text, ' {"a": 1} bye'.lstrip(), [PARIS])


def test_arguments_pass_as_they_come_and_as_they_were_written() -> None:
    parser = ParserConfig(tools="hermes").parser(TOOLS, "")
    assert parser is not None
    parser.feed('<tool_call>{"name": "add", "arguments": ')
    assembler = Assembler(parser)
    assert [call.arguments for call in assembler.feed('{"a":  [1,', final=False).calls] == ['{"a":  [1,']
    assert [call.arguments for call in assembler.feed(" 2]", final=False).calls] == [" 2]"]
    cut = take(ParserConfig(tools="hermes"), ['<tool_call>{"name": "add", "arguments": {"a": "hal'])
    assert cut == ("", "", [("add", '{"a": "hal')])  # the length limit: what there is of them


THINK = [
    ("qwen3", "", "<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
    ("qwen3", "<think>\n", "hm</think>yes", "hm", "yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "yes </think>", "", "yes </think>"),
    ("qwen3", "", "yes", "", "yes"),
    ("deepseek_r1", "<think>\n", "hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "<think>hm</think>yes <think>", "hm", "yes <think>"),
    ("deepseek_r1", "", "hm </thin", "hm </thin", ""),
    ("deepseek_r1", "</think>", "yes", "", "yes"),
]


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), THINK)
def test_reasoning_is_told_from_content(name: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    check(ParserConfig(reasoning=name), text, content, [], reasoning, prompt_end)


def test_calls_are_looked_for_after_the_reasoning_alone() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    check(ParserConfig("hermes", "qwen3"), f"<think>maybe {call}</think>{call}", "", [PARIS], f"maybe {call}")


GPT_OSS = (
    "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
)


def test_harmony_has_channels() -> None:
    config = ParserConfig("openai", "openai_gptoss")
    check(config, GPT_OSS, "One moment.", [PARIS], "Need weather.")
    check(config, GPT_OSS + "<|call|>", "One moment.", [PARIS], "Need weather.")
    recipient = '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    check(config, "<|channel|>analysis<|message|>a<|end|>" + recipient, "", [PARIS], "a")
    check(config, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "b", [], "a")
    named = recipient.replace("Paris", 'a<|call|> \\"<|end|>')
    check(config, named, "", [("get_weather", {"city": 'a<|call|> "<|end|>'})])
    for empty in ("", " \n"):
        nothing = recipient.replace('{"city": "Paris"}', empty)
        check(config, nothing, "", [("get_weather", {})])
        check(config, nothing.removesuffix("<|call|>"), "", [("get_weather", {})])
    built_in = (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    )
    check(config, built_in, "b", [], "print(1)")
    check(config, recipient.replace("commentary", "analysis"), "", [PARIS])
    check(config, "plain words", "plain words", [])
    check(config, "<|channel|>final" + "x" * 600, "<|channel|>final" + "x" * 600, [])
    without = take(config, [GPT_OSS], tools=None)
    assert without == ('One moment.{"city": "Paris"}', "Need weather.", [])


def test_flags_that_do_not_fit_are_named() -> None:
    assert "--tool-call-parser" in str(ParserConfig(auto_tool_choice=True).problem())
    assert "hermes" in str(ParserConfig("nonsense").problem())
    assert "qwen3" in str(ParserConfig(None, "nonsense").problem())
    assert "openai_gptoss" in str(ParserConfig("openai", "qwen3").problem())
    for name in TOOL_FORMATS:
        assert ParserConfig(name, auto_tool_choice=True).problem() is None
    assert ParserConfig("openai", "openai_gptoss").problem() is None


MARKUP = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]", "<think>"),
    *(
        "</think>",
        '{"name": "add", "arguments": ',
        '"parameters": ',
        '"name": "add"',
        '{"a": 1}',
        "[add(a=1)",
        "add(",
        "'",
        '"',
        "\\",
    ),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", " ", "\n", "to=functions.add", "```json\n", "```", "function", "x", "é🌊"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        *MARKERS,
    ),
]
CONFIGS = [
    *(ParserConfig(name) for name in TOOL_FORMATS),
    *(ParserConfig(None, name) for name in REASONING_FORMATS),
    ParserConfig("hermes", "qwen3"),
    ParserConfig("deepseek_v3", "deepseek_r1"),
    ParserConfig("openai", "openai_gptoss"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(MARKUP) | st.text(max_size=4), max_size=24),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    prompt_end=st.sampled_from(["", "<think>\n", "</think>"]),
)
def test_any_text_cut_anywhere_gives_the_same_and_loses_nothing(
    config: ParserConfig, parts: list[str], cuts: list[int], prompt_end: str
) -> None:
    text = "".join(parts)
    whole = take(config, [text], prompt_end)
    assert take(config, list(text), prompt_end) == whole
    at = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    assert take(config, [text[a:b] for a, b in itertools.pairwise(at)], prompt_end) == whole
    if not whole[2] and config.reasoning != "openai_gptoss" and config.tools != "openai":
        assert bare(f"{whole[1]}\0{whole[0]}") == bare(text)


def bare(text: str) -> str:
    """Without what is markup where there are no calls."""
    return re.sub(r"</?think>|\s", "", text).replace("\0", "")


@given(text=st.text(), config=st.sampled_from(CONFIGS))
def test_text_without_markup_passes_as_it_is(config: ParserConfig, text: str) -> None:
    content, reasoning, calls = take(config, [text])
    assert (reasoning or content) == text and not calls
