"""Answers of `/v1/chat/completions`."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from penstock.engine.frontend.generation import Choice, Delta, TokenLogprob, Usage
from penstock.engine.frontend.openai.encoding import ChunkFormat, prompt_logprobs_of, taken, token_name
from penstock.engine.frontend.openai.parsing.assembly import Assembler, CallDelta, MessageDelta
from penstock.engine.frontend.openai.protocol import ChatRequest
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary


class ChatFormat(ChunkFormat):
    """`chat.completion` and its chunks.

    Args:
        request: The checked body.
        spec: The same as it runs.
        model: The name that answers say.
        vocabulary: Texts of single tokens.
        assembler: Makes what takes one choice's text apart; None: all of it is content.
    """

    _opening, _closing = b'"delta":{"content":', b"}"

    def __init__(
        self,
        request: ChatRequest,
        spec: GenerationSpec,
        model: str,
        vocabulary: Vocabulary,
        assembler: Callable[[], Assembler] | None = None,
    ) -> None:
        names = ("chatcmpl", "chat.completion", "chat.completion.chunk")
        super().__init__(*names, model, spec, request.stream_options, request.return_token_ids)
        self._plain = self._plain and assembler is None
        self._request = request
        self._vocabulary = vocabulary
        self._assemblers = [assembler() for _ in range(spec.n)] if assembler is not None else None

    def first(self, choice: Choice) -> bytes:
        """See `Format`: the role."""
        more = b',"prompt_token_ids":' + orjson.dumps(self._spec.prompts[0]) if self._token_ids else b""
        return self._event(choice, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null', more)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events for what is new of a choice; none where all of it is held back."""
        reason = delta.finish_reason
        if self._plain and reason is None and delta.text and not delta.logprobs:
            return self._text(choice, delta.text)
        if self._assemblers is None:
            said = b'"delta":{"content":' + orjson.dumps(delta.text) + b"}" if delta.text else b'"delta":{}'
        else:
            assembler = self._assemblers[choice.number]
            new = assembler.feed(delta.text, final=reason is not None)
            if not any(new) and reason is None and not delta.logprobs and not self._token_ids:
                return b""
            said = b'"delta":' + orjson.dumps(_delta(new))
            reason = _reason(reason, assembler)
        logprobs = orjson.dumps(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        return self._event(choice, said + self._end(delta, logprobs, reason))

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer that is not streamed; takes what the choices hold."""
        more: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs_of(choices[0], self._vocabulary)
        if self._token_ids:
            more["prompt_token_ids"] = self._spec.prompts[0]
        return self._full([self._choice(choice) for choice in choices], usage, **more)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = taken(choice)
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        reason = delta.finish_reason
        if self._assemblers is not None:
            assembler = self._assemblers[choice.number]
            message |= _message(assembler.feed(delta.text, final=True))
            reason = _reason(reason, assembler)
        return {
            "index": choice.number,
            "message": message,
            "logprobs": None if choice.num_logprobs is None else self._logprobs(delta.logprobs),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            **({"token_ids": delta.token_ids} if self._token_ids else {}),
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._entry(token.token_id, token.logprob), "top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.bytes_of(token_id)
        name = token_name(token_id) if self._request.return_tokens_as_token_ids else data.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(data)}


def _reason(reason: str | None, assembler: Assembler) -> str | None:
    return "tool_calls" if reason == "stop" and assembler.called else reason


def _delta(new: MessageDelta) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if new.reasoning:
        out |= {"reasoning": new.reasoning, "reasoning_content": new.reasoning}
    if new.content:
        out["content"] = new.content
    if new.calls:
        out["tool_calls"] = [_call_delta(call) for call in new.calls]
    return out


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(whole: MessageDelta) -> dict[str, Any]:
    """What a whole message has besides its role. `reasoning` is vLLM's name, `reasoning_content` DeepSeek's."""
    out: dict[str, Any] = {"content": whole.content or (None if whole.calls else "")}
    if whole.reasoning:
        out |= {"reasoning": whole.reasoning, "reasoning_content": whole.reasoning}
    if whole.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole.calls
        ]
    return out
