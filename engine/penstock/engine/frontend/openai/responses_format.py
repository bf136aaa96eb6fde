"""Answers of `/v1/responses`: a list of items, whole or as typed events."""

import copy
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Delta, TokenLogprob, Usage
from penstock.engine.frontend.openai.encoding import taken
from penstock.engine.frontend.openai.parsing.pieces import CallArguments, CallStart, Content, Parser, Piece, Reasoning
from penstock.engine.frontend.openai.responses_protocol import LOGPROBS, ResponsesRequest
from penstock.engine.frontend.openai.structured import format_echo
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.prompt.processor import PromptProcessor

Event = dict[str, Any]
# The kinds of text: item, part, and what their events are called.
_MESSAGE, _REASONING = ("message", "output_text"), ("reasoning", "reasoning_text")


class ResponsesFormat:
    """`response`, and the events that build it.

    Args:
        request: The checked body.
        spec: The same as it runs.
        model: The name that answers say.
        vocabulary: Texts of single tokens.
        parser: Makes what takes the text apart; None: all of it is content.
        processor: Counts the tokens of reasoning.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        spec: GenerationSpec,
        model: str,
        vocabulary: Vocabulary,
        parser: Callable[[], Parser] | None,
        processor: PromptProcessor,
    ) -> None:
        self._request = request
        self._model = model
        self._id = f"resp_{spec.request_id}"
        self._created = int(time.time())
        self._vocabulary = vocabulary
        self._parser = parser() if parser is not None else None
        self._processor = processor
        self._items = _Items(parallel=request.parallel_tool_calls)
        self._sequence = 0
        self._reason: str | None = None

    def first(self, choice: Choice) -> bytes:
        """What precedes a choice's first chunk."""
        del choice
        response = self._response("in_progress", None)
        return self._encode([{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")])

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events for what is new of a choice; none where all of it is held back."""
        del choice
        return self._encode(self._take(delta))

    def last(self, usage: Usage) -> bytes:
        """What ends a stream after all choices."""
        status = self._status()
        return self._encode([{"type": f"response.{status}", "response": self._response(status, usage)}])

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
        response = self._response("failed", None) | {"error": {"code": "server_error", "message": error.message}}
        body = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._encode([{"type": "response.failed", "response": response}, body])

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer that is not streamed; takes what the choices hold."""
        self._take(taken(choices[0]))
        return orjson.dumps(self._response(self._status(), usage))

    def _take(self, delta: Delta) -> list[Event]:
        final = delta.finish_reason is not None
        pieces: list[Piece] = [Content(delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text) if delta.text else []
            pieces += self._parser.finish() if final else []
        logprobs = self._logprobs(delta.logprobs) if LOGPROBS in self._request.include else []
        events = self._items.add(pieces, logprobs)
        if final:
            self._reason = delta.finish_reason
            events += self._items.close("completed" if self._status() == "completed" else "incomplete")
        return events

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _encode(self, events: list[Event]) -> bytes:
        lines: list[bytes] = []
        for event in events:
            lines += [b"event: ", event["type"].encode(), b"\ndata: "]
            lines += [orjson.dumps(event | {"sequence_number": self._sequence}), b"\n\n"]
            self._sequence += 1
        return b"".join(lines)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": self._items.done,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": format_echo(request.text.format)},
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": [{"strict": False, "parameters": None, **tool} for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage(usage) if usage is not None else None,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        reasoning = self._items.reasoning
        # Counted anew from its text, which may be a token more or less than was generated.
        reasoned = len(self._processor.tokenizer.encode(reasoning, add_special_tokens=False).ids) if reasoning else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._entry(token.token_id, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class _Items:
    """The items so far; the last one may be open.

    Args:
        parallel: Whether more than one call is given out.
    """

    def __init__(self, parallel: bool) -> None:
        self.done: list[dict[str, Any]] = []
        self.reasoning = ""
        self._parallel = parallel
        self._calls = 0
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._space = ""
        self._logprobs: list[dict[str, Any]] = []

    def add(self, pieces: list[Piece], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Takes pieces, and the logprobs of the tokens that they came from."""
        events: list[Event] = []
        self._logprobs += logprobs
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                    events += self._add_text(_REASONING, text)
                case Content(text):
                    events += self._add_text(_MESSAGE, text)
                case CallStart(name):
                    events += self._start_call(name)
                case CallArguments(text) if self._calls == 1 or self._parallel:
                    self._text += text
                    events.append(self._event("function_call_arguments.delta", delta=text))
                case CallArguments():
                    pass  # of a call that is not given out
        return events

    def close(self, status: str) -> list[Event]:
        """Ends the open item; an answer of nothing is an empty message."""
        events: list[Event] = []
        if self._open is None and not self.done:
            space = self._space
            events = self._begin(*_MESSAGE)
            events += self._add_text(_MESSAGE, space) if space else []
        return events + self._end(status)

    def _add_text(self, kind: tuple[str, str], text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind[0]:
            text = self._space + text
            if not text.strip():  # between items: shown if text follows
                self._space = text
                return []
            events = self._end("completed") + self._begin(*kind)
        self._text += text
        where = {"content_index": 0, "delta": text}
        if kind == _MESSAGE:
            where["logprobs"] = self._logprobs
            self._open_part()["logprobs"] += self._logprobs
            self._logprobs = []
        return [*events, self._event(f"{kind[1]}.delta", **where)]

    def _begin(self, kind: str, part_kind: str) -> list[Event]:
        part = {"type": part_kind, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            self._open = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant"}
        else:
            self._open = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": []}
        self._open |= {"status": "in_progress", "content": []}
        added = self._added()
        self._open["content"] = [part]
        self._text = self._space = ""
        return [added, self._event("content_part.added", content_index=0, part=copy.deepcopy(part))]

    def _start_call(self, name: str) -> list[Event]:
        self._calls += 1
        if self._calls > 1 and not self._parallel:
            return []
        events = self._end("completed")
        identity = uuid.uuid4().hex
        self._open = {
            "id": f"fc_{identity}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{identity[:24]}",
            "name": name,
            "arguments": "",
        }
        self._text = self._space = ""
        return [*events, self._added()]

    def _end(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        where = {"item_id": item["id"], "output_index": len(self.done)}
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = self._text
            events = [self._event("function_call_arguments.done", **where, name=item["name"], arguments=self._text)]
        else:
            part = item["content"][0]
            part["text"] = self._text
            done = {"content_index": 0, "text": self._text} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            events = [
                self._event(f"{part['type']}.done", **where, **done),
                self._event("content_part.done", **where, content_index=0, part=part),
            ]
        events.append({"type": "response.output_item.done", "output_index": where["output_index"], "item": item})
        self.done.append(item)
        return events

    def _added(self) -> Event:
        assert self._open is not None
        return {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._open)}

    def _open_part(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open["content"][0]

    def _event(self, kind: str, **fields: Any) -> Event:
        if self._open is not None:
            fields = {"item_id": self._open["id"], "output_index": len(self.done), **fields}
        return {"type": f"response.{kind}", **fields}
