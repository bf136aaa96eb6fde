"""Calls in JSON: where a value ends, and the two ways in which models write a call."""

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from penstock.engine.frontend.openai.parsing.pieces import CallArguments, CallStart, Piece

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'[\\"]')
# So much text of a call without its name and the beginning of its arguments is none, or one that is taken when it is whole.
_HEAD_LIMIT = 512
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"')
_NO_OBJECT = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")

Accept = Callable[[str], bool]
"""Whether a name may be called."""


class JsonEnd:
    """Finds the end of an object or array in pieces of text.

    Args:
        depth: Brackets that are open already.
        stop: A character that ends the search where it stands outside strings, as no JSON has it there; empty: none.
    """

    def __init__(self, depth: int = 0, stop: str = "") -> None:
        self._depth = depth
        self._outside = re.compile(r'[{}\[\]"' + re.escape(stop) + "]") if stop else _OUTSIDE
        self._stop = stop
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """The position after the value in this piece, of the stop character where it comes first; None: it goes on."""
        at = 1 if self._escaped and text else 0
        if text:
            self._escaped = False
        while (match := (_INSIDE if self._in_string else self._outside).search(text, at)) is not None:
            character, at = match[0], match.end()
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                if at == len(text):
                    self._escaped = True
                at += 1
            elif character == self._stop:
                return at - 1
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class Status(Enum):
    """Status of a call that is being read."""

    MORE = 0
    """The call continues."""
    DONE = 1
    """The call is complete. The rest of the text comes with it."""
    BAD = 2
    """The text is no call. All of it comes back."""


class Call(Protocol):
    """Reads one call. Once it has given out a piece it is never `BAD`."""

    closers: tuple[str, ...]
    """What may follow it and is dropped."""
    again: tuple[str, ...]
    """What begins another call right after it."""

    def feed(self, text: str, out: list[Piece], final: bool) -> tuple[Status, str]:
        """Takes more text and adds pieces to `out`."""
        ...


class _Call:
    """What both ways share: arguments pass as they come, to the end of their object."""

    def __init__(self, closers: tuple[str, ...], again: tuple[str, ...]) -> None:
        self.closers = closers
        self.again = again
        self._text = ""
        self._end: JsonEnd | None = None

    def feed(self, text: str, out: list[Piece], final: bool) -> tuple[Status, str]:
        if self._end is None:
            self._text += text
            status, text = self._head(text, out)
            if status is not Status.MORE:
                return status, text
            if self._end is None:
                return (Status.BAD, self._text) if final else (Status.MORE, "")
        end = self._end.find(text)
        if arguments := text if end is None else text[:end]:
            out.append(CallArguments(arguments))
        if end is None:
            return (Status.DONE, "") if final else (Status.MORE, "")
        return self._after(text[end:], final)

    def _start(self, name: str, out: list[Piece], at: int) -> tuple[Status, str]:
        out.append(CallStart(name))
        self._end = JsonEnd()
        return Status.MORE, self._text[at:]

    def _head(self, new: str, out: list[Piece]) -> tuple[Status, str]:
        raise NotImplementedError

    def _after(self, rest: str, final: bool) -> tuple[Status, str]:
        del final
        return Status.DONE, rest


class HeadedCall(_Call):
    """A name in some markup, then the arguments.

    Args:
        head: Matches all that precedes the arguments' first brace; its group `name` is the name.
        closers: See `Call`.
        again: See `Call`.
    """

    def __init__(self, head: re.Pattern[str], closers: tuple[str, ...] = (), again: tuple[str, ...] = ()) -> None:
        super().__init__(closers, again)
        self._pattern = head

    def _head(self, new: str, out: list[Piece]) -> tuple[Status, str]:
        del new
        at = self._text.find("{")
        if 0 <= at < _HEAD_LIMIT and (match := self._pattern.fullmatch(self._text, 0, at)):
            return self._start(match["name"], out, at)
        bad = at >= 0 or len(self._text) >= _HEAD_LIMIT
        return (Status.BAD, self._text) if bad else (Status.MORE, "")


class JsonCall(_Call):
    """An object with `name`, and `arguments` or `parameters`.

    With the name first, as every model writes it, arguments pass as they come; any other order waits for the object's end.

    Args:
        closers: See `Call`.
        again: See `Call`.
        stop: Of `JsonEnd`.
        accept: None: any name, since markup has said that this is a call. Else objects are content unless it says yes, and no
            more of them is held back than shows it.
    """

    def __init__(
        self, closers: tuple[str, ...] = (), again: tuple[str, ...] = (), stop: str = "", accept: Accept | None = None
    ) -> None:
        super().__init__(closers, again)
        self._stop = stop
        self._accept = accept
        self._whole = JsonEnd(stop=stop)
        self._tail: JsonEnd | None = None
        self._tail_text = ""

    def feed(self, text: str, out: list[Piece], final: bool) -> tuple[Status, str]:
        if self._tail is None:
            return super().feed(text, out, final)
        return self._close(text, final)

    def _head(self, new: str, out: list[Piece]) -> tuple[Status, str]:
        text = self._text
        first = _FIRST_KEY.match(text)
        if _NO_OBJECT.match(text) or (self._accept and first and first[1] not in _KEYS):
            return Status.BAD, text
        match = _HEAD.match(text, 0, _HEAD_LIMIT + 1)
        if match:
            name = _string(match[1])
            if name is None or (self._accept and not self._accept(name)):
                return Status.BAD, text
            return self._start(name, out, match.end())
        end = self._whole.find(new)
        if end is None:
            return Status.MORE, ""
        end += len(text) - len(new)
        call = _read_call(text[:end])
        if call is None or (self._accept and not self._accept(call[0])):
            return Status.BAD, text
        out += [CallStart(call[0]), CallArguments(call[1])]
        return Status.DONE, text[end:]

    def _after(self, rest: str, final: bool) -> tuple[Status, str]:
        """The rest of the object is dropped with the brace that ends it."""
        self._tail = JsonEnd(depth=1, stop=self._stop)
        return self._close(rest, final)

    def _close(self, text: str, final: bool) -> tuple[Status, str]:
        assert self._tail is not None
        self._tail_text += text
        end = self._tail.find(text)
        if end is None:
            return (Status.DONE, self._tail_text) if final else (Status.MORE, "")
        end += len(self._tail_text) - len(text)
        dropped, rest = self._tail_text[:end], self._tail_text[end:]
        return Status.DONE, rest if _closes(dropped) else dropped + rest


def _closes(text: str) -> bool:
    """Whether a text ends an object whose last value is before it, or is nothing: models forget the brace."""
    return not text.strip() or _object('{"_": 0' + text) is not None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _string(text: str) -> str | None:
    """The string of a JSON literal; None for what is none, or is not Unicode."""
    try:
        value = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return value


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object; None where it is no call."""
    call = _object(text)
    if call is None:
        return None
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    try:
        (name + arguments).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return name, arguments
