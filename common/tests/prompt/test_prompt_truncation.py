"""`truncate_prompt_tokens` cuts as transformers does, for every way in which a prompt can come."""

from typing import Any

import pytest

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, PromptProcessor

TEXT = "the river turns the wheel and the wheel turns the mill"


@pytest.fixture
def processor(bundle: PromptBundle) -> PromptProcessor:
    """Its context is 64 tokens, and its tokenizer puts `<s>` before a text."""
    return PromptProcessor(bundle)


def tokens(processor: PromptProcessor, **body: Any) -> list[int]:
    [ids] = processor.tokens_of(COMPLETIONS_PATH, {"prompt": TEXT, **body})
    return ids


def test_the_end_is_kept_and_the_beginning_where_that_is_asked_for(processor: PromptProcessor) -> None:
    whole = tokens(processor)
    bos, text = whole[0], whole[1:]
    assert len(text) > 6
    assert tokens(processor, truncate_prompt_tokens=5) == [bos, *text[-4:]]
    assert tokens(processor, truncate_prompt_tokens=5, truncation_side="right") == [bos, *text[:4]]
    assert tokens(processor, truncate_prompt_tokens=5, add_special_tokens=False) == text[-5:]
    assert tokens(processor, truncate_prompt_tokens=1) in ([bos], [text[-1]])
    for length in (len(whole), len(whole) + 1, -1):
        assert tokens(processor, truncate_prompt_tokens=length) == whole
    assert tokens(processor, truncation_side="right") == whole


def test_it_cuts_as_transformers_does(processor: PromptProcessor, checkpoint: Any) -> None:
    transformers = pytest.importorskip("transformers")
    for side in ("left", "right"):
        theirs = transformers.AutoTokenizer.from_pretrained(checkpoint, truncation_side=side)
        for length in range(2, 20):
            due = theirs(TEXT, truncation=True, max_length=length)["input_ids"]
            assert tokens(processor, truncate_prompt_tokens=length, truncation_side=side) == due


def test_token_ids_and_chats_are_cut_too(processor: PromptProcessor) -> None:
    assert tokens(processor, prompt=[9, 8, 7, 6], truncate_prompt_tokens=2) == [7, 6]
    prompts = processor.tokens_of(COMPLETIONS_PATH, {"prompt": [[9, 8, 7], [6]], "truncate_prompt_tokens": 2})
    assert prompts == [[8, 7], [6]]
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    [whole] = processor.tokens_of(CHAT_PATH, chat)
    assert processor.tokens_of(CHAT_PATH, chat | {"truncate_prompt_tokens": 6}) == [whole[-6:]]


@pytest.mark.parametrize(("limit", "kept"), [({}, 48), ({"max_tokens": 20}, 44), ({"max_tokens": 0, "echo": True}, 63)])
def test_what_fits_leaves_room_for_the_answer(processor: PromptProcessor, limit: dict[str, Any], kept: int) -> None:
    prompt = list(range(100))
    assert tokens(processor, prompt=prompt, truncate_prompt_tokens=-1, **limit) == prompt[-kept:]
    long = TEXT * 100  # so long that without truncation it is refused before it becomes tokens
    with pytest.raises(PromptError, match="characters"):
        tokens(processor, prompt=long)
    assert len(tokens(processor, prompt=long, truncate_prompt_tokens=-1, **limit)) == kept


def test_a_chat_without_a_limit_leaves_room_for_one_token(processor: PromptProcessor) -> None:
    body = {"messages": [{"role": "user", "content": TEXT * 9}], "truncate_prompt_tokens": -1}
    [ids] = processor.tokens_of(CHAT_PATH, body)
    assert len(ids) == 63
    [ids] = processor.tokens_of(CHAT_PATH, body | {"max_completion_tokens": 24})
    assert len(ids) == 40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 60, "max_tokens": 5}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "prompt": "\ud800"}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_named(processor: PromptProcessor, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as caught:
        tokens(processor, **fields)
    assert caught.value.param == param
