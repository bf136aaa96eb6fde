"""Answers as bytes: what is the same in every chunk of a stream is encoded once a request, texts and numbers by orjson."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from penstock.engine.frontend.generation import Choice, Delta, PromptLogprob, TokenLogprob, Usage
from penstock.engine.frontend.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """One of the two APIs."""

    def first(self, number: int) -> bytes:
        """What precedes a choice's first chunk."""
        ...

    def chunk(self, number: int, delta: Delta) -> bytes:
        """One event of a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the counts, after all choices."""
        ...

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer that is not streamed; takes what the choices hold."""
        ...


class _Format:
    """What both APIs share.

    Args:
        identity: `id` of the answer.
        kind: `object` of the answer.
        chunk_kind: `object` of a chunk.
        model: The name that answers say.
        include_usage: Whether chunks have a `usage` field.
    """

    def __init__(self, identity: str, kind: str, chunk_kind: str, model: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {"id": identity, "object": kind, "created": int(time.time()), "model": model}
        chunk_head = orjson.dumps({**self._head, "object": chunk_kind})[:-1]
        self._prefix = b"data: " + chunk_head + b',"choices":[{"index":'
        self._suffix = (b'}],"usage":null}' if include_usage else b"}]}") + b"\n\n"
        self._usage_prefix = b"data: " + chunk_head + b',"choices":[],"usage":'

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._usage_prefix + orjson.dumps(_usage(usage)) + b"}\n\n"

    def _event(self, number: int, middle: bytes, delta: Delta, logprobs: bytes) -> bytes:
        reason = b"null"
        if delta.finish_reason is not None:
            reason = orjson.dumps(delta.finish_reason) + b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        body = (b"%d," % number, middle, b',"logprobs":', logprobs, b',"finish_reason":', reason)
        return self._prefix + b"".join(body) + self._suffix

    def _full(self, choices: list[dict[str, Any]], usage: Usage, **more: Any) -> bytes:
        return orjson.dumps({**self._head, "choices": choices, "usage": _usage(usage), **more})


class ChatFormat(_Format):
    """`chat.completion` and its chunks."""

    def __init__(self, request_id: str, model: str, vocabulary: Vocabulary, include_usage: bool = False) -> None:
        super().__init__(f"chatcmpl-{request_id}", "chat.completion", "chat.completion.chunk", model, include_usage)
        self._vocabulary = vocabulary

    def first(self, number: int) -> bytes:
        body = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' % number
        return self._prefix + body + self._suffix

    def chunk(self, number: int, delta: Delta) -> bytes:
        logprobs = orjson.dumps(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        middle = b'"delta":{"content":' + orjson.dumps(delta.text) + b"}" if delta.text else b'"delta":{}'
        return self._event(number, middle, delta, logprobs)

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        scores = _prompt_logprobs(choices[0], self._vocabulary)
        return self._full([self._choice(choice) for choice in choices], usage, **scores)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        assert delta is not None, "a finished choice always has its end to tell"
        return {
            "index": choice.number,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": None if choice.num_logprobs is None else self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._entry(token.token_id, token.logprob), "top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionFormat(_Format):
    """`text_completion`, whole and in chunks."""

    def __init__(self, request_id: str, model: str, vocabulary: Vocabulary, include_usage: bool = False) -> None:
        super().__init__(f"cmpl-{request_id}", "text_completion", "text_completion", model, include_usage)
        self._vocabulary = vocabulary

    def first(self, number: int) -> bytes:
        del number  # this API has no opening chunk
        return b""

    def chunk(self, number: int, delta: Delta) -> bytes:
        logprobs = orjson.dumps(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        return self._event(number, b'"text":' + orjson.dumps(delta.text), delta, logprobs)

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return self._full([self._choice(choice) for choice in choices], usage)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        assert delta is not None, "a finished choice always has its end to tell"
        return {
            "index": choice.number,
            "text": delta.text,
            "logprobs": None if choice.num_logprobs is None else self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **_prompt_logprobs(choice, self._vocabulary),
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # The sampled token is among them even where it is not one of the likeliest, as in OpenAI's answers.
            "top_logprobs": [
                {self._name(other): logprob for other, logprob in [*token.top, (token.token_id, token.logprob)]}
                for token in tokens
            ],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        """Tokens that are no text get OpenAI's `bytes:` form, since here names are keys."""
        data = self._vocabulary.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _prompt_logprobs(choice: Choice, vocabulary: Vocabulary) -> dict[str, Any]:
    """vLLM's field, where it was asked for: an object a token, the first one's null; keys are token ids, ranks begin with 1."""
    if choice.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [entry and _scored(entry, vocabulary) for entry in choice.prompt_logprobs]}


def _scored(entry: PromptLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    others = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top)]
    return {
        str(token_id): {"logprob": logprob, "rank": rank + 1, "decoded_token": vocabulary.text_of(token_id)}
        for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *others]
    }
