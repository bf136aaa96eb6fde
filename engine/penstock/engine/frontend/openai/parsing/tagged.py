"""Calls among text, behind markup that says where one begins."""

from collections.abc import Callable

from penstock.engine.frontend.openai.parsing.calls import Call, Status
from penstock.engine.frontend.openai.parsing.pieces import Content, Machine, begins


class TaggedCalls(Machine):
    """Text, then calls, then text again.

    Args:
        begin: The markup before a call.
        new_call: Reads one.
        bare: What begins a call without markup, where it is the first thing said; empty: nothing does.
    """

    def __init__(self, begin: str, new_call: Callable[[], Call], bare: str = "") -> None:
        super().__init__(self._opening if bare else self._content)
        self._begin = begin
        self._new_call = new_call
        self._bare = bare
        self._call = new_call()

    def _opening(self, final: bool) -> bool:
        start = self.buffer.lstrip()
        if not start and not final:
            return False
        if start.startswith(self._bare):
            return self._enter()
        self.state = self._content
        return True

    def _content(self, final: bool) -> bool:
        text, marker = self.until((self._begin,), final)
        self.put(Content(text))
        return marker is not None and self._enter(marker)

    def _enter(self, marker: str = "") -> bool:
        self._marker = marker
        self._call = self._new_call()
        self.state = self._in_call
        return True

    def _in_call(self, final: bool) -> bool:
        text, self.buffer = self.buffer, ""
        status, rest = self._call.feed(text, self.out, final)
        if status is Status.MORE:
            return False
        self.buffer = rest
        if status is Status.DONE:
            self.state = self._between
        else:
            self.put(Content(self._marker))
            self.state = self._content
        return True

    def _between(self, final: bool) -> bool:
        """Right after a call: closing markup and space are dropped, another call may follow."""
        text = self.buffer.lstrip()
        closer = next((closer for closer in self._call.closers if text.startswith(closer)), None)
        if closer is not None:
            self.buffer = text[len(closer) :]
            return True
        if not final and (not text or begins(text, (*self._call.closers, *self._call.again, self._begin))):
            return False
        if text.startswith(self._begin):
            self.buffer = text[len(self._begin) :]
            return self._enter(self._begin)
        if any(text.startswith(marker) for marker in self._call.again):
            self.buffer = text
            return self._enter()
        if not text:  # the end
            self.buffer = ""
            return False
        self.state = self._content
        return True
