"""The chunks that streams are made of: text alone, which has a shorter way than the others, and says the same."""

from types import SimpleNamespace
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.generation import Choice, Delta
from penstock.engine.frontend.openai.chat_format import ChatFormat
from penstock.engine.frontend.openai.completion_format import CompletionFormat
from penstock.engine.frontend.openai.encoding import ChunkFormat
from penstock.engine.frontend.openai.protocol import parse_chat, parse_completion
from penstock.engine.frontend.vocabulary import Vocabulary

MODEL = 'mo"del %d é'
CHOICE = Choice(7, 3, 5, Detokenizer(Vocabulary(Tokenizer(WordLevel({"a": 0}, "a"))), [0]), (), frozenset(), None)
API = st.sampled_from(("chat", "completion"))
OPTIONS = st.sampled_from(({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}))


def format_of(api: str, options: dict[str, bool], **more: Any) -> ChunkFormat:
    body = {"model": "m", "stream": True, "n": 4, "stream_options": options, **more}
    spec: Any = SimpleNamespace(request_id="r%d", n=4, prompts=[[0]], image_tokens=0)
    vocabulary: Any = None  # for logprobs, which these chunks do not have
    if api == "chat":
        return ChatFormat(parse_chat(body | {"messages": []}), spec, MODEL, vocabulary)
    return CompletionFormat(parse_completion(body | {"prompt": "a"}), spec, MODEL, vocabulary)


def chunk(answer: ChunkFormat, delta: Delta) -> dict[str, Any]:
    assert isinstance(answer, ChatFormat | CompletionFormat)
    data = answer.chunk(CHOICE, delta)
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return orjson.loads(data[6:])


@given(API, OPTIONS, st.text(min_size=1), st.booleans())
def test_a_chunk_of_text_says_what_the_last_one_does_but_for_the_end(
    api: str, options: dict[str, bool], text: str, token_ids: bool
) -> None:
    answer = format_of(api, options, return_token_ids=token_ids)
    amid, last = chunk(answer, Delta(text, [0], [], None, None)), chunk(answer, Delta(text, [0], [], "stop", "end"))
    [said], [ended] = amid.pop("choices"), last.pop("choices")
    assert amid == last
    assert (said.pop("finish_reason"), ended.pop("finish_reason")) == (None, "stop")
    assert ended.pop("stop_reason") == "end"
    assert said == ended
    assert said["index"] == CHOICE.number
    assert (said["delta"]["content"] if api == "chat" else said["text"]) == text
    assert amid["model"] == MODEL
    assert (said.get("token_ids") == [0]) is token_ids
    usage = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
    assert amid.get("usage") == (usage if "continuous_usage_stats" in options else None)
