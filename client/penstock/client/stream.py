"""What OpenAI's streaming APIs send: server-sent events, and the few fields of their JSON that a client measures or shows."""

from typing import Any

import msgspec


class EventDecoder:
    """Cuts a byte stream into the data of its events.

    Line ends may be LF or CRLF; comments and fields other than `data` are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes."""
        # JSON writes a carriage return as \r, so that a raw one can only belong to a line's end.
        *events, self._rest = (self._rest + data.replace(b"\r", b"")).split(b"\n\n")
        return [payload for event in events if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly always
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Delta(msgspec.Struct):
    """What a chat chunk adds. Servers of reasoning models use either of two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """`text` in completions, `delta` in chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def thought(self) -> str:
        """Reasoning that precedes the answer."""
        return (self.delta.reasoning_content or self.delta.reasoning or "") if self.delta else ""

    @property
    def answer(self) -> str:
        """Text of the answer itself."""
        return self.text or (self.delta.content if self.delta else "") or ""

    @property
    def characters(self) -> int:
        """Length of all that the model wrote; a piece of a tool call counts as one."""
        return len(self.answer) + len(self.thought) + bool(self.delta and self.delta.tool_calls)


class PromptDetails(msgspec.Struct):
    """Part of `usage`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts so far: in the last chunk, or in every chunk where the server does so."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


DONE = b"[DONE]"
decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Raises `msgspec.MsgspecError` on what is no chunk."""


def error_message(error: Any) -> str:
    """The text in the `error` of an OpenAI-shaped answer, which some servers make a plain string."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
