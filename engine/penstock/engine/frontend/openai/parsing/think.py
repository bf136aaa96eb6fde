"""Reasoning between `<think>` and `</think>`: DeepSeek R1, Qwen 3 and their kin."""

from enum import Enum

from penstock.engine.frontend.openai.parsing.pieces import Content, Machine, Reasoning, begins

START, END = "<think>", "</think>"


class Opening(Enum):
    """How an answer begins, as far as its prompt says."""

    REASONING = 0
    CONTENT = 1
    EITHER = 2
    """With reasoning if the output says so."""


def opening(prompt_end: str, always: bool) -> Opening:
    """How an answer begins.

    Args:
        prompt_end: The last words of the prompt: templates open the reasoning there, or close it.
        always: Without either, the answer begins with reasoning even where it does not say so.
    """
    end = prompt_end.rstrip()
    if end.endswith(END):
        return Opening.CONTENT
    return Opening.REASONING if always or end.endswith(START) else Opening.EITHER


class Think(Machine):
    """Reasoning, then content.

    Args:
        begins: How the answer begins.
    """

    def __init__(self, begins: Opening) -> None:
        self._open = begins is Opening.REASONING
        super().__init__(self._content if begins is Opening.CONTENT else self._opening)

    def _opening(self, final: bool) -> bool:
        text = self.buffer.lstrip()
        if text.startswith(START):
            self.buffer = text[len(START) :]
            self.state = self._reasoning
            return True
        if not final and (not text or begins(text, (START,))):
            return False
        self.state = self._reasoning if self._open else self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        text, marker = self.until((END,), final)
        self.put(Reasoning(text))
        if marker is not None:
            self.state = self._content
        return marker is not None

    def _content(self, final: bool) -> bool:
        del final
        self.put(Content(self.buffer))
        self.buffer = ""
        return False
