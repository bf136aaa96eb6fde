"""What of a body changes the prompt besides its messages, in chats and responses alike."""

import json
from typing import Any

import msgspec
import pytest

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import ExtraKeys
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import CHANGES_CHATS, CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH, PromptProcessor

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ reasoning_effort }}{{ style }}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %}{{ m.tool_call_id }}{% endfor %}{{ '|GO' if add_generation_prompt }}"
)
USER = {"role": "user", "content": "the mill"}
TOOL = {"type": "function", "function": {"name": "turn", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture
def processor(bundle: PromptBundle) -> PromptProcessor:
    return PromptProcessor(msgspec.structs.replace(bundle, chat_template=TEMPLATE, max_model_len=4096))


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "turn", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function, **fields}]}


def render(processor: PromptProcessor, **body: Any) -> str:
    return processor.render_chat({"messages": [USER], **body})


def test_the_template_sees_tools_variables_and_calls(processor: PromptProcessor) -> None:
    assert render(processor, tools=[TOOL]) == json.dumps(TOOL) + "<|user|>the mill|GO"
    assert render(processor, reasoning_effort="high", chat_template_kwargs={"style": "x"}).startswith("highx<|user|>")
    turns = [USER, call('{"b": 1, "a": [2]}'), {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    assert render(processor, messages=turns).endswith('<|assistant|>(c turn {"b": 1, "a": [2]})<|tool|>okc|GO')
    assert render(processor, chat_template_kwargs={"enable_thinking": False}) == render(processor), "it is sent to every model"
    for arguments, shown in (("", "{}"), ("not json", '"not json"'), ("[1]", '"[1]"')):
        assert f"(c turn {shown})" in render(processor, messages=[USER, call(arguments)])
    assert "<|assistant|>hmyes" in render(processor, messages=[{"role": "assistant", "content": "yes", "reasoning": "hm"}])


def test_the_end_of_the_prompt_is_the_clients_to_choose(processor: PromptProcessor) -> None:
    begun = [USER, {"role": "assistant", "content": "it turns  "}]
    assert render(processor, add_generation_prompt=False) == "<|user|>the mill"
    assert render(processor, messages=begun, continue_final_message=True).endswith("<|assistant|>it turns  ")
    for body in (
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": [USER, {"role": "assistant", "content": ""}], "continue_final_message": True},
    ):
        with pytest.raises(PromptError) as caught:
            render(processor, **body)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(("path", "param", "most"), [(COMPLETIONS_PATH, "prompt", 128), (EMBEDDINGS_PATH, "input", 2048)])
@pytest.mark.parametrize("one", ["mill", [5]])
def test_prompts_are_counted_before_any_becomes_tokens(
    processor: PromptProcessor, path: str, param: str, most: int, one: str | list[int]
) -> None:
    assert len(processor.prompts_of(path, {param: [one] * most})) == most
    with pytest.raises(PromptError, match=f"{param} lists {most + 1} prompts; a request has at most {most}") as caught:
        processor.prompts_of(path, {param: [one] * (most + 1)})
    assert caught.value.param == param


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL | {"colour": 1}]}, "tools[0].colour"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(900)}}]}, "tools"),
        ({"chat_template_kwargs": {"style": deep(900)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"messages": [call({"a": 1})]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [call("{}", colour=1)]}, "messages[0].tool_calls[0].colour"),
        ({"messages": [call("[" * 900 + "]" * 900)]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [USER | {"tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages[0].content[0].cache_control",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_rendered_is_named(processor: PromptProcessor, body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as caught:
        processor.tokens_of(CHAT_PATH, {"messages": [USER], **body})
    assert caught.value.param == param


def test_what_a_template_does_not_read_is_refused(bundle: PromptBundle) -> None:
    plain = PromptProcessor(bundle)
    for body in ({"tools": [TOOL]}, {"reasoning_effort": "low"}):
        with pytest.raises(PromptError) as caught:
            plain.tokens_of(CHAT_PATH, {"messages": [USER], **body})
        assert (caught.value.param, caught.value.code) == (next(iter(body)), "unsupported_parameter")


def test_responses_are_the_prompts_of_the_same_chats(processor: PromptProcessor) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "the mill"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "turn", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    said = {**call('{"a": 1}'), "content": "I look", "reasoning_content": "hm"}
    turns = [{"role": "system", "content": "be"}, USER, said, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    chat = {"messages": turns, "tools": [TOOL], "reasoning_effort": "low"}
    same = {
        "instructions": "be",
        "input": items,
        "tools": [{"type": "function", **TOOL["function"]}],
        "reasoning": {"effort": "low"},
    }
    assert processor.tokens_of(RESPONSES_PATH, same) == processor.tokens_of(CHAT_PATH, chat)
    assert processor.tokens_of(RESPONSES_PATH, {"input": "the mill"}) == processor.tokens_of(CHAT_PATH, {"messages": [USER]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [USER | {"colour": 1}]}, "input[0].colour"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}]}, "input[0].content[0].colour"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": "x", "reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0].strict"),
        ({"input": "x", "instructions": 5}, "instructions"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
    ],
)
def test_bad_responses_name_their_own_field(processor: PromptProcessor, body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as caught:
        processor.tokens_of(RESPONSES_PATH, body)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_an_answer_that_was_cut_while_it_reasoned_can_go_back(processor: PromptProcessor) -> None:
    """Servers give its content as null."""
    cut = {"role": "assistant", "content": None, "reasoning": "hm"}
    same = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    chat = processor.tokens_of(CHAT_PATH, {"messages": [USER, cut, USER]})
    assert chat == processor.tokens_of(CHAT_PATH, {"messages": [USER, same, USER]})
    assert chat == processor.tokens_of(RESPONSES_PATH, {"input": [USER, item, USER]})


def test_special_tokens_are_added_or_not(bundle: PromptBundle) -> None:
    processor = PromptProcessor(bundle)
    [with_bos] = processor.tokens_of(COMPLETIONS_PATH, {"prompt": "the"})
    assert processor.tokens_of(COMPLETIONS_PATH, {"prompt": "the", "add_special_tokens": False}) == [with_bos[1:]]
    [chat] = processor.tokens_of(CHAT_PATH, {"messages": [USER]})
    assert processor.tokens_of(CHAT_PATH, {"messages": [USER], "add_special_tokens": True}) == [[chat[0], *chat]]


def test_what_is_embedded_has_the_tokens_of_a_completion_and_loses_its_end(bundle: PromptBundle) -> None:
    processor = PromptProcessor(bundle)
    texts = ["the river", "the mill turns"]
    tokens = processor.tokens_of(EMBEDDINGS_PATH, {"input": texts})
    assert tokens == processor.tokens_of(COMPLETIONS_PATH, {"prompt": texts})
    assert processor.tokens_of(EMBEDDINGS_PATH, {"input": texts, "truncate_prompt_tokens": 2}) == [ids[:2] for ids in tokens]
    ids = list(range(bundle.max_model_len + 5))
    [fitting] = processor.tokens_of(EMBEDDINGS_PATH, {"input": ids, "truncate_prompt_tokens": -1})
    assert fitting == ids[: bundle.max_model_len]


def test_an_empty_prompt_among_several_is_named_by_its_place(bundle: PromptBundle) -> None:
    processor = PromptProcessor(bundle)
    for path, body, param in (
        (EMBEDDINGS_PATH, {"input": [[1], [], []]}, "input[1]"),
        (EMBEDDINGS_PATH, {"input": [[]]}, "input"),
        (COMPLETIONS_PATH, {"prompt": [[1], []]}, "prompt[1]"),
    ):
        with pytest.raises(PromptError) as refused:
            processor.tokens_of(path, body)
        assert refused.value.param == param


def test_what_changes_a_chat_is_known(bundle: PromptBundle) -> None:
    asked = set[str]()

    class Heard(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

        def __getitem__(self, name: str) -> Any:
            asked.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            asked.add(str(name))
            return super().__contains__(name)

    body = Heard({"messages": [{"role": "user", "content": "the mill"}]})
    PrefixMemo(PromptProcessor(bundle)).hashed(CHAT_PATH, body, ExtraKeys())
    PromptProcessor(bundle).tokens_of(CHAT_PATH, body)
    assert asked == CHANGES_CHATS | {"messages"}
