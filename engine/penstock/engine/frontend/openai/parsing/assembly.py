"""From parsed pieces to the assistant's message, whole or in deltas."""

import secrets
import string
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.frontend.openai.parsing.pieces import CallArguments, CallStart, Content, Parser, Piece, Reasoning

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(slots=True)
class CallDelta:
    """What is new of a tool call."""

    index: int
    """Index of the call in the message."""
    id: str | None
    """Set, with the name, in a call's first delta only."""
    name: str | None
    arguments: str


class MessageDelta(NamedTuple):
    """What is new of a message."""

    content: str
    reasoning: str
    calls: list[CallDelta]


class Assembler:
    """One choice's message.

    Args:
        parser: Takes its text apart.
        parallel: Whether more than one call is given out; of more the first alone is, as in vLLM.
        short_ids: Whether ids have nine letters and digits.
        reasoning: Whether reasoning is given out.
    """

    def __init__(self, parser: Parser, parallel: bool = True, short_ids: bool = False, reasoning: bool = True) -> None:
        self._parser = parser
        self._parallel = parallel
        self._short_ids = short_ids
        self._reasoning = reasoning
        self._index = -1

    @property
    def called(self) -> bool:
        """Whether there is a call."""
        return self._index >= 0

    def feed(self, text: str, final: bool) -> MessageDelta:
        """What more text adds; all that is held back where it is the last."""
        pieces = self._parser.feed(text) if text else []
        return self._delta([*pieces, *self._parser.finish()] if final else pieces)

    def _delta(self, pieces: list[Piece]) -> MessageDelta:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    content.append(text)
                case Reasoning(text) if self._reasoning:
                    reasoning.append(text)
                case Reasoning():
                    pass  # the client does not want it
                case CallStart(name):
                    self._index += 1
                    calls.append(CallDelta(self._index, self._new_id(), name, ""))
                case CallArguments(text) if calls and calls[-1].index == self._index:
                    calls[-1].arguments += text
                case CallArguments(text):
                    calls.append(CallDelta(self._index, None, None, text))
        if not self._parallel:
            calls = [call for call in calls if call.index == 0]
        return MessageDelta("".join(content), "".join(reasoning), calls)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"
