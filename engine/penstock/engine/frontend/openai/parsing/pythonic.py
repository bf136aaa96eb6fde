"""Calls written as a Python list: `[get_weather(city="Paris"), …]`, of Llama 3.2 and, between two tokens, of Llama 4."""

import ast
import json
import re

from penstock.engine.frontend.openai.parsing.calls import Accept
from penstock.engine.frontend.openai.parsing.pieces import CallArguments, CallStart, Content, Machine, begins

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
_NAME_BEGUN = re.compile(r"\s*(?:[A-Za-z_][\w.]*)?\s*")
_NEXT = re.compile(r"['\"()\[\]{}]")
_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class PythonicCalls(Machine):
    """A list of calls as the first thing said. A call is given out when it is whole; what is no call of a tool is content.

    Args:
        accept: Whether a name is one of the tools.
    """

    def __init__(self, accept: Accept) -> None:
        super().__init__(self._opening)
        self._accept = accept
        self._before = ""
        """Markup read since the last call, which is content should none follow."""

    def _opening(self, final: bool) -> bool:
        text = self.buffer.lstrip()
        opening = next((one for one in ("[", _START) if text.startswith(one)), None)
        if opening == "[" or (opening and not self._before):
            cut = len(self.buffer) - len(text) + len(opening)
            self._before, self.buffer = self._before + self.buffer[:cut], self.buffer[cut:]
            if opening == "[":
                self.state = self._call
            return True
        if not final and (not text or begins(text, (_START,))):
            return False
        return self._give_up()

    def _call(self, final: bool) -> bool:
        match = _NAME.match(self.buffer)
        if match is None:
            if not final and _NAME_BEGUN.fullmatch(self.buffer):
                return False
            return self._give_up()
        if not self._accept(match[1]):
            return self._give_up()
        end = _end_of_call(self.buffer, match.end())
        if end is None:
            return self._give_up() if final else False
        arguments = _arguments(self.buffer[:end].strip())
        if arguments is None:
            return self._give_up()
        self.out += [CallStart(match[1]), CallArguments(arguments)]
        self._before, self.buffer, self.state = "", self.buffer[end:], self._after
        return True

    def _after(self, final: bool) -> bool:
        text = self.buffer.lstrip()
        if text.startswith(","):
            self._before, self.buffer = ",", text[1:]
            self.state = self._call
            return True
        if text.startswith("]"):
            self.buffer, self.state = text[1:], self._closing
            return True
        return bool(text) and self._give_up()

    def _closing(self, final: bool) -> bool:
        text = self.buffer.lstrip()
        if text.startswith(_END):
            self.buffer = text[len(_END) :]
            return self._give_up()
        if not final and (not text or begins(text, (_END,))):
            return False
        return bool(text) and self._give_up()

    def _give_up(self) -> bool:
        """The rest is content."""
        self.put(Content(self._before))
        self._before, self.state = "", self._content
        return True

    def _content(self, final: bool) -> bool:
        del final
        self.put(Content(self.buffer))
        self.buffer = ""
        return False


def _end_of_call(text: str, at: int) -> int | None:
    """The position after the parenthesis that closes the one before `at`."""
    depth = 1
    while (match := _NEXT.search(text, at)) is not None:
        character, at = match[0], match.end()
        if character in "'\"":
            end = re.compile(rf"\\.|{character}", re.DOTALL)
            while (inside := end.search(text, at)) is not None and inside[0] != character:
                at = inside.end()
            if inside is None:
                return None
            at = inside.end()
        else:
            depth += 1 if character in "([{" else -1
            if depth == 0:
                return at
    return None


def _arguments(call: str) -> str | None:
    """The keyword arguments of a call as JSON; None where they are not literals."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values: dict[str, object] = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(keyword.value)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
    except _ERRORS:
        return None
    return text
