"""What a model's answer is made of, and how its text is taken apart while it comes.

Parsers are pure: text in, pieces out. However the text is cut, the pieces add up to the same, and what is not well-formed comes
out as content: no character that is not markup is lost.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """The model's thinking."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the newest call's arguments: JSON as the model wrote it, checked only to find its end."""

    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Takes one answer apart."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        ...

    def finish(self) -> list[Piece]:
        """The pieces held back, once no more text comes. Not to be fed after that."""
        ...


class Machine:
    """A parser as a state machine. A state takes from `buffer` what it can and says whether another turn may get further; it
    decides on nothing that later text could change, unless `final`."""

    def __init__(self, state: "State") -> None:
        self.buffer = ""
        self.out: list[Piece] = []
        self.state = state

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        self.buffer += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """The pieces held back, once no more text comes."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Piece]:
        while self.state(final):
            pass
        out, self.out = self.out, []
        return out

    def until(self, markers: tuple[str, ...], final: bool) -> tuple[str, str | None]:
        """Takes text up to the first of some markers, and that marker with it; what may be the beginning of one stays."""
        found = [(at, -len(marker), marker) for marker in markers if (at := self.buffer.find(marker)) >= 0]
        if found:
            at, _, marker = min(found)
            text, self.buffer = self.buffer[:at], self.buffer[at + len(marker) :]
            return text, marker
        cut = len(self.buffer) - (0 if final else held(self.buffer, markers))
        text, self.buffer = self.buffer[:cut], self.buffer[cut:]
        return text, None

    def put(self, piece: Piece) -> None:
        """Gives out a piece, unless it is empty."""
        if piece[0]:
            self.out.append(piece)


State = Callable[[bool], bool]


def held(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of a text that may be the beginning of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)


def begins(text: str, markers: tuple[str, ...]) -> bool:
    """Whether a text is the beginning of a marker, and no whole one."""
    return any(len(text) < len(marker) and marker.startswith(text) for marker in markers)
