"""Answers as bytes: what is the same in every chunk of a stream is encoded once a request, texts and numbers by orjson."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Delta, PromptLogprob, Usage
from penstock.engine.frontend.openai.protocol import StreamOptions
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """One of the APIs."""

    def first(self, choice: Choice) -> bytes:
        """What precedes a choice's first chunk."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events for what is new of a choice; none where all of it is held back."""
        ...

    def last(self, usage: Usage) -> bytes:
        """What ends a stream after all choices."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
        ...

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer that is not streamed; takes what the choices hold."""
        ...


class ChunkFormat:
    """What chats and completions share.

    Args:
        prefix: Of the answer's `id`.
        kind: `object` of the answer.
        chunk_kind: `object` of a chunk.
        model: The name that answers say.
        spec: The request as it runs.
        options: What a stream carries.
        token_ids: Whether answers have token ids.
    """

    _opening: bytes
    """What the object of a chunk's choice has before its text."""
    _closing: bytes
    """What closes that."""

    def __init__(
        self, prefix: str, kind: str, chunk_kind: str, model: str, spec: GenerationSpec, options: StreamOptions, token_ids: bool
    ) -> None:
        identity = f"{prefix}-{spec.request_id}"
        self._head: dict[str, Any] = {"id": identity, "object": kind, "created": int(time.time()), "model": model}
        self._spec = spec
        self._token_ids = token_ids
        self._options = options
        chunk_head = orjson.dumps({**self._head, "object": chunk_kind})[:-1]
        self._prefix = b"data: " + chunk_head + b',"choices":[{"index":'
        self._suffix = (b'}],"usage":null}' if options.include_usage else b"}]}") + b"\n\n"
        self._text_begins: dict[int, bytes] = {}
        """By choice, a chunk of it up to the text."""
        self._text_end = self._closing + b',"logprobs":null,"finish_reason":null' + self._suffix
        self._plain = not token_ids and not options.continuous_usage_stats
        """Whether a chunk amid a stream has nothing but text, if it has no logprobs."""
        self._usage_prefix = b"data: " + chunk_head + b',"choices":[],"usage":'

    def last(self, usage: Usage) -> bytes:
        """What ends a stream after all choices."""
        return self._usage_prefix + orjson.dumps(usage_of(usage)) + b"}\n\n" + DONE if self._options.include_usage else DONE

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
        return b"data: " + error.body() + b"\n\n"

    def _text(self, choice: Choice, text: str) -> bytes:
        """Nearly every chunk there is: `_event` with `_end`, at a fraction of their cost, where `_plain` and nothing ends."""
        begin = self._text_begins.get(choice.number)
        if begin is None:
            begin = self._text_begins[choice.number] = b"%b%d,%b" % (self._prefix, choice.number, self._opening)
        return begin + orjson.dumps(text) + self._text_end

    def _event(self, choice: Choice, middle: bytes, more: bytes = b"") -> bytes:
        """A chunk.

        Args:
            choice: Of which.
            middle: The members of its object, as JSON.
            more: Members of the chunk's object, each with a comma before it.
        """
        suffix = self._suffix
        if more or self._options.continuous_usage_stats:
            counts = Usage(choice.prompt_tokens, choice.num_tokens, choice.cached_tokens, self._spec.image_tokens)
            usage = b',"usage":' + orjson.dumps(usage_of(counts)) if self._options.continuous_usage_stats else suffix[2:-3]
            suffix = b"}]" + usage + more + b"}\n\n"
        return self._prefix + b"%d," % choice.number + middle + suffix

    def _end(self, delta: Delta, logprobs: bytes, reason: str | None) -> bytes:
        """The members that every chunk's choice has at its end."""
        body = b',"logprobs":' + logprobs
        if self._token_ids:
            body += b',"token_ids":' + orjson.dumps(delta.token_ids)
        if reason is None:
            return body + b',"finish_reason":null'
        return body + b',"finish_reason":' + orjson.dumps(reason) + b',"stop_reason":' + orjson.dumps(delta.stop_reason)

    def _full(self, choices: list[dict[str, Any]], usage: Usage, **more: Any) -> bytes:
        return orjson.dumps({**self._head, "choices": choices, "usage": usage_of(usage), **more})


def usage_of(usage: Usage) -> dict[str, Any]:
    """The counts as chats and completions say them."""
    details = {"cached_tokens": usage.cached_tokens} | ({"image_tokens": usage.image_tokens} if usage.image_tokens else {})
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
    }


def token_name(token_id: int) -> str:
    """A token by its id, where a request has `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def taken(choice: Choice) -> Delta:
    """All of a finished choice."""
    delta = choice.take()
    assert delta is not None, "a finished choice always has its end to tell"
    return delta


def prompt_logprobs_of(choice: Choice, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's field: an object a token, the first one's null; keys are token ids, ranks begin with 1."""
    return [entry and _scored(entry, vocabulary) for entry in choice.prompt_logprobs or ()]


def _scored(entry: PromptLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    others = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top)]
    return {
        str(token_id): {"logprob": logprob, "rank": rank + 1, "decoded_token": vocabulary.text_of(token_id)}
        for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *others]
    }
