"""From request bodies to token ids, judged by transformers."""

from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, PromptProcessor
from penstock.prompt.template import ChatTemplate

CONVERSATIONS = [
    [{"role": "user", "content": "the wheel"}],
    [{"role": "system", "content": " turn \n"}, {"role": "user", "content": "the <b>river</b> & 'mill' 🌊 水車"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{{ c }}"}],
]


@pytest.fixture
def processor(bundle: PromptBundle) -> PromptProcessor:
    return PromptProcessor(bundle)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chats_are_tokenized_as_transformers_does(processor: PromptProcessor, reference: Any, messages: list) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert processor.tokens_of(CHAT_PATH, {"messages": messages}) == [expected]
    assert expected.count(reference.bos_token_id) == 1  # the template's own, and no second one


@pytest.mark.parametrize("text", ["the river", " turns\n\n  the", "naïve 🌊水車 mill", "<|end|> the"])
def test_completions_are_tokenized_as_transformers_does(processor: PromptProcessor, reference: Any, text: str) -> None:
    assert processor.tokens_of(COMPLETIONS_PATH, {"prompt": text}) == [reference(text)["input_ids"]]


def test_completion_prompts_come_in_four_forms(processor: PromptProcessor) -> None:
    def tokens(prompt: Any) -> list[list[int]]:
        return processor.tokens_of(COMPLETIONS_PATH, {"prompt": prompt})

    one, two = processor.encode("the river", True), processor.encode("the mill", True)
    assert tokens("the river") == tokens(["the river"]) == [one]
    assert tokens(["the river", "the mill"]) == tokens([one, two]) == [one, two]
    assert tokens(one) == [one]


def test_text_parts_are_joined(processor: PromptProcessor) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "mill"}]
    assert processor.tokens_of(CHAT_PATH, {"messages": [{"role": "user", "content": parts}]}) == processor.tokens_of(
        CHAT_PATH, {"messages": [{"role": "user", "content": "the\nmill"}]}
    )


def test_an_answer_sent_back_is_read_and_its_empty_fields_are_ignored(processor: PromptProcessor) -> None:
    answer = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    plain = {"role": "assistant", "content": "b"}
    assert processor.tokens_of(CHAT_PATH, {"messages": [answer]}) == processor.tokens_of(CHAT_PATH, {"messages": [plain]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template raises
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_bad_chats_name_the_field(processor: PromptProcessor, body: dict, param: str) -> None:
    with pytest.raises(PromptError) as caught:
        processor.tokens_of(CHAT_PATH, body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (7, "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ([True], "prompt"),
        ([1.5], "prompt"),
        ([[1, "a"]], "prompt[0]"),
        ([-1], "prompt"),
        ([10**9], "prompt"),
        ([[1], [2**70]], "prompt[1]"),
        ("\udc80", "prompt"),
    ],
)
def test_bad_completion_prompts_name_the_field(processor: PromptProcessor, prompt: Any, param: str) -> None:
    with pytest.raises(PromptError) as caught:
        processor.tokens_of(COMPLETIONS_PATH, {"prompt": prompt})
    assert caught.value.param == param


def test_a_hopelessly_long_text_is_refused_before_it_is_encoded(processor: PromptProcessor) -> None:
    with pytest.raises(PromptError, match="context of 64 tokens") as caught:
        processor.encode("x" * 3_000_000, add_special_tokens=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_without_a_template_says_so(bundle: PromptBundle) -> None:
    processor = PromptProcessor(msgspec.structs.replace(bundle, chat_template=None))
    with pytest.raises(PromptError, match="no chat template"):
        processor.tokens_of(CHAT_PATH, {"messages": CONVERSATIONS[0]})


def test_truncation_and_padding_in_the_tokenizer_file_change_nothing(bundle: PromptBundle) -> None:
    plain = PromptProcessor(bundle)
    text = "the river turns the mill 水"
    expected = plain.encode(text, True)
    plain.tokenizer.enable_truncation(3)
    plain.tokenizer.enable_padding(length=40)
    cutting = PromptProcessor(msgspec.structs.replace(bundle, tokenizer=plain.tokenizer.to_str()))
    assert cutting.encode(text, True) == expected


def test_templates_have_the_conventions_of_hugging_face() -> None:
    source = (
        "{{ strftime_now('%d %b %Y') }}|{{ {'b': '<é>', 'a': 1} | tojson }}|"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {}, now=lambda: datetime(2031, 3, 4))
    assert template.render([{"content": "x"}, {"content": "y"}]) == '04 Mar 2031|{"b": "<é>", "a": 1}|x'


@pytest.mark.parametrize("name", ["role", "content", "absent", "items", "get", "__class__", "__dict__", "_x", "real"])
def test_fields_of_messages_are_found_as_jinja_finds_them(name: str) -> None:
    message = {"role": "user", "content": None, "items": [1], "_x": 5}
    jinja = ImmutableSandboxedEnvironment()
    for value in (message, OrderedDict(message), "text", 7, [message]):
        source = f"{{{{ messages.{name} is defined }}}} {{{{ messages.{name} is none }}}} {{{{ messages.{name} is callable }}}}"
        expected = jinja.from_string(source).render(messages=value)
        assert ChatTemplate(source, {}).render(value) == expected, value  # type: ignore[arg-type] - of any kind
    assert ChatTemplate("{{ messages._x }}", {}).render(message) == "5"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}", "{{ 1 // 0 }}"]
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    template = ChatTemplate(source + "{{ raise_exception('never reached') if false }}", {})
    try:
        text = template.render([{"content": "x"}])
    except PromptError:
        return
    assert "class" not in text and "object" not in text
