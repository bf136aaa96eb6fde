"""The picker counts and hashes the prompts that the engine runs, whatever a body says of them."""

from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.gateway.extproc.body import parse_body
from penstock.gateway.load.tokenized import exact, extra_keys
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH, PromptProcessor

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ reasoning_effort }}{{ style }}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ 'go on' if add_generation_prompt }}"
)
WORDS = "the river turns the wheel and the wheel turns the mill " * 4
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}]}
TOOL = {"type": "function", "function": {"name": "turn"}}


@pytest.fixture(scope="module")
def processor() -> PromptProcessor:
    words = sorted({*WORDS.split(), "user", "go", "on", "low"})
    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {word: at + 1 for at, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PromptProcessor(
        PromptBundle(
            served_names=("tiny",),
            tokenizer=tokenizer.to_str(),
            chat_template=TEMPLATE,
            special_tokens={},
            block_size=4,
            hash_seed="s",
            max_model_len=512,
        )
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, CHAT),
        (CHAT_PATH, CHAT | {"tools": [TOOL]}),
        (CHAT_PATH, CHAT | {"chat_template_kwargs": {"style": "the mill"}}),
        (CHAT_PATH, CHAT | {"reasoning_effort": "low"}),
        (CHAT_PATH, CHAT | {"add_generation_prompt": False}),
        (CHAT_PATH, CHAT | {"continue_final_message": True}),
        (CHAT_PATH, CHAT | {"truncate_prompt_tokens": 9}),
        (CHAT_PATH, CHAT | {"truncate_prompt_tokens": 9, "truncation_side": "right"}),
        (COMPLETIONS_PATH, {"model": "tiny", "prompt": WORDS, "truncate_prompt_tokens": 9}),
        (RESPONSES_PATH, {"model": "tiny", "input": WORDS}),
        (EMBEDDINGS_PATH, {"model": "tiny", "input": [WORDS]}),
        (EMBEDDINGS_PATH, {"model": "tiny", "input": [5] * 9, "truncate_prompt_tokens": 8}),
        (RESPONSES_PATH, {"model": "tiny", "input": WORDS, "tools": [{"type": "function", "name": "turn"}]}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_the_picker_sees_the_engines_tokens(processor: PromptProcessor, path: str, body: dict[str, Any]) -> None:
    fields = parse_body(orjson.dumps(body)).fields
    [seen] = exact(PrefixMemo(processor), path, fields, extra_keys(fields, "", None))
    [tokens] = processor.tokens_of(path, body)
    bundle = processor.bundle
    hasher = BlockHasher(bundle.block_size, bundle.hash_seed)
    assert (seen.tokens, seen.block_hashes) == (len(tokens), tuple(hasher.hash(tokens)))
    assert seen.block_hashes


def test_each_apis_limit_is_read() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert parse_body(orjson.dumps({"model": "m", name: 7})).max_tokens == 7
    assert parse_body(b'{"model": "m", "max_completion_tokens": null, "max_tokens": 3}').max_tokens == 3


async def test_responses_are_routed(world: Any) -> None:
    await world.ready()
    answer = await world.stream().ask({"model": "tiny", "input": "x"}, path=RESPONSES_PATH)
    assert world.destinations(answer)


async def test_embeddings_are_routed(world: Any) -> None:
    await world.ready()
    answer = await world.stream().ask({"model": "tiny", "input": ["x", "y"]}, path=EMBEDDINGS_PATH)
    assert world.destinations(answer)
