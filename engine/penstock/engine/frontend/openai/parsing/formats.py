"""Tool calls as the models' chat formats have them, all of one shape: markup, then JSON."""

import re

from penstock.engine.frontend.openai.parsing.calls import Accept, Call, HeadedCall, JsonCall, Status
from penstock.engine.frontend.openai.parsing.pieces import Parser, Piece
from penstock.engine.frontend.openai.parsing.tagged import TaggedCalls

_NAME = r"(?P<name>[\w.-]+)"


def hermes() -> Parser:
    """Hermes 2 Pro, Qwen 2.5, Qwen 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    return TaggedCalls("<tool_call>", lambda: JsonCall(closers=("</tool_call>",), stop="<"))


def llama3_json(accept: Accept) -> Parser:
    """Llama 3.1 to 3.3: `{"name": …, "parameters": …}` as the whole answer, several with semicolons between, or after
    `<|python_tag|>`. An object that calls none of the tools is the answer itself."""
    return TaggedCalls("<|python_tag|>", lambda: JsonCall(closers=(";",), again=("{",), accept=accept), bare="{")


DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_BEGIN, _DEEPSEEK_NEXT = DEEPSEEK_MARKERS[:2]
_DEEPSEEK_CLOSERS = ("```", *DEEPSEEK_MARKERS[3:])
_DEEPSEEK_V3 = re.compile(rf"\s*<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*{_NAME}\s*```(?:json)?\s*")
_DEEPSEEK_V31 = re.compile(rf"\s*<｜tool▁call▁begin｜>\s*{_NAME}\s*<｜tool▁sep｜>\s*")


def deepseek_v3() -> Parser:
    """DeepSeek V3 and R1: `function`, the name, and the arguments in a fence."""
    return TaggedCalls(_DEEPSEEK_BEGIN, lambda: HeadedCall(_DEEPSEEK_V3, _DEEPSEEK_CLOSERS, (_DEEPSEEK_NEXT,)))


def deepseek_v31() -> Parser:
    """DeepSeek V3.1: the name and the arguments."""
    return TaggedCalls(_DEEPSEEK_BEGIN, lambda: HeadedCall(_DEEPSEEK_V31, _DEEPSEEK_CLOSERS[1:], (_DEEPSEEK_NEXT,)))


def mistral() -> Parser:
    """Mistral: `[TOOL_CALLS]` before a list of objects, or before each `name{…}`, of later models `name[ARGS]{…}`."""
    return TaggedCalls("[TOOL_CALLS]", _MistralCall)


class _MistralCall:
    """The first character says which way it is."""

    _HEAD = re.compile(rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")

    def __init__(self) -> None:
        self.closers: tuple[str, ...] = ()
        self.again: tuple[str, ...] = ()
        self._before = ""
        self._call: Call | None = None

    def feed(self, text: str, out: list[Piece], final: bool) -> tuple[Status, str]:
        if self._call is not None:
            return self._restored(self._call.feed(text, out, final))
        text = self._before + text
        start = text.lstrip()
        if not start:
            self._before = text
            return (Status.BAD, text) if final else (Status.MORE, "")
        if start[0] in "[{":
            self.closers, self.again = (",", "]"), ("{",)
            self._before, text = text[: len(text) - len(start)], start
            if start[0] == "[":
                self._before, text = self._before + "[", start[1:]
            self._call = JsonCall()
        else:
            self._before = ""
            self._call = HeadedCall(self._HEAD)
        return self._restored(self._call.feed(text, out, final))

    def _restored(self, result: tuple[Status, str]) -> tuple[Status, str]:
        """What was read before the call, back in front of text that is none."""
        status, text = result
        return (status, self._before + text) if status is Status.BAD else result
