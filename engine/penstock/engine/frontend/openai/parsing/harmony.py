"""gpt-oss: messages on channels (harmony), `<|channel|>analysis<|message|>…<|end|><|start|>assistant…`."""

import re

from penstock.engine.frontend.openai.parsing.calls import JsonEnd
from penstock.engine.frontend.openai.parsing.pieces import CallArguments, CallStart, Content, Machine, Reasoning, begins

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ANSWER = "<|channel|>final<|message|>"
"""The marker before the answer."""
CALL = "<|end|><|start|>assistant"
"""Between the reasoning and a call."""
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_OPENINGS = ("<|start|>", "<|channel|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_HEADER_LIMIT = 512
_FUNCTIONS = "functions."
_NONE = "{}"
"""The arguments of a call that has none: clients read JSON."""


class Harmony(Machine):
    """`analysis` is reasoning, a recipient makes a call, everything else is content. On `analysis`, only a recipient among the
    `functions` does: the model calls its built-in tools there, such as `python`, and no client has offered those.

    Args:
        tools: Whether calls are wanted; they are content otherwise.
        forced: Whether a grammar writes the calls: one without arguments was then cut by the length limit.
    """

    def __init__(self, tools: bool, forced: bool = False) -> None:
        super().__init__(self._header)
        self._tools, self._forced = tools, forced
        self._piece: type[Content] | type[Reasoning] | type[CallArguments] = Content
        self._end = JsonEnd()
        self._has_arguments = False

    def _header(self, final: bool) -> bool:
        text = self.buffer.lstrip()
        if not text.startswith(_OPENINGS):
            if not final and (not text or begins(text, _OPENINGS)):
                return False
            self._piece, self.state = Content, self._body
            return bool(self.buffer)
        at = self.buffer.find(_MESSAGE)
        if not 0 <= at < _HEADER_LIMIT:
            if at < 0 and len(self.buffer) < _HEADER_LIMIT + len(_MESSAGE) and not final:
                return False
            # No header after all. Its first character goes ahead, lest it be taken for one again.
            cut = len(self.buffer) - len(text) + 1
            self.put(Content(self.buffer[:cut]))
            self.buffer, self._piece, self.state = self.buffer[cut:], Content, self._body
            return True
        header, self.buffer = self.buffer[:at], self.buffer[at + len(_MESSAGE) :]
        self._enter(header)
        return True

    def _enter(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        analysis = channel is not None and channel[1] == "analysis"
        if recipient is not None and self._tools and (not analysis or recipient[1].startswith(_FUNCTIONS)):
            self.put(CallStart(recipient[1].removeprefix(_FUNCTIONS) or recipient[1]))
            self._piece, self._end, self.state = CallArguments, JsonEnd(stop="<"), self._arguments
            self._has_arguments = False
        else:
            self._piece, self.state = Reasoning if analysis else Content, self._body

    def _arguments(self, final: bool) -> bool:
        """Arguments up to their end, or to a marker that is not part of a string in them."""
        end = self._end.find(self.buffer)
        given = self.buffer[:end] if self._has_arguments else self.buffer[:end].lstrip()
        self._has_arguments = self._has_arguments or bool(given)
        self.put(CallArguments(given))
        if (final or end is not None) and not self._has_arguments and not self._forced:
            self.put(CallArguments(_NONE))
            self._has_arguments = True
        self.buffer = "" if end is None else self.buffer[end:]
        if end is not None:
            self.state = self._body
        return end is not None

    def _body(self, final: bool) -> bool:
        text, marker = self.until(_ENDS, final)
        self.put(self._piece(text))
        if marker is None:
            return False
        if marker in _OPENINGS:
            self.buffer = marker + self.buffer
        self.state = self._header
        return True
