"""The parsers by the names that `--tool-call-parser` and `--reasoning-parser` take, which are vLLM's."""

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from penstock.engine.frontend.openai.parsing import formats, harmony, shapes
from penstock.engine.frontend.openai.parsing.calls import Accept
from penstock.engine.frontend.openai.parsing.pieces import Content, Parser, Piece
from penstock.engine.frontend.openai.parsing.pythonic import PythonicCalls
from penstock.engine.frontend.openai.parsing.shapes import CallShape
from penstock.engine.frontend.openai.parsing.think import END, START, Opening, Think, opening
from penstock.engine.grammar import ReasoningMarkers

HARMONY: Final = "openai"


class ToolFormat(NamedTuple):
    """How a model writes calls."""

    parser: Callable[[Accept], Parser]
    markers: tuple[str, ...] = ()
    """Special tokens that the parser must see, which have no text otherwise."""
    short_ids: bool = False
    """Whether the chat template takes call ids of nine letters and digits alone."""
    shapes: tuple[CallShape, ...] = ()
    """How a grammar writes calls in it, the newest way first; none: a grammar writes them as `FORCED` has them."""


TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": ToolFormat(lambda _: formats.hermes(), ("<tool_call>", "</tool_call>"), shapes=(shapes.HERMES,)),
    "llama3_json": ToolFormat(formats.llama3_json, ("<|python_tag|>",), shapes=(shapes.LLAMA3_JSON,)),
    "llama4_pythonic": ToolFormat(PythonicCalls, ("<|python_start|>", "<|python_end|>")),
    "pythonic": ToolFormat(PythonicCalls),
    "mistral": ToolFormat(
        lambda _: formats.mistral(),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_ids=True,
        shapes=(shapes.MISTRAL, shapes.MISTRAL_LIST),
    ),
    "deepseek_v3": ToolFormat(lambda _: formats.deepseek_v3(), formats.DEEPSEEK_MARKERS, shapes=(shapes.DEEPSEEK_V3,)),
    "deepseek_v31": ToolFormat(lambda _: formats.deepseek_v31(), formats.DEEPSEEK_MARKERS, shapes=(shapes.DEEPSEEK_V31,)),
    HARMONY: ToolFormat(lambda _: harmony.Harmony(tools=True), harmony.MARKERS, shapes=(shapes.HARMONY,)),
}
FORCED: Final = "hermes"
"""The format of calls that a grammar writes where the model has none, or one that no grammar describes."""
_THINK: Final = {"deepseek_r1": True, "qwen3": False}
"""Whether an answer is reasoning though neither it nor the prompt says so."""
_GPT_OSS: Final = "openai_gptoss"
REASONING_FORMATS: Final = (*_THINK, _GPT_OSS)


class ParserConfig(NamedTuple):
    """The parsers of a served model; None where there is none."""

    tools: str | None = None
    reasoning: str | None = None
    auto_tool_choice: bool = False
    forced: bool = False
    """Whether a grammar forces the answer to be calls."""

    def problem(self) -> str | None:
        """What is wrong with the flags, in a sentence; None: nothing."""
        if self.auto_tool_choice and self.tools is None:
            return "--enable-auto-tool-choice needs --tool-call-parser"
        if self.tools is not None and self.tools not in TOOL_FORMATS:
            return f"--tool-call-parser {self.tools}: there are {', '.join(TOOL_FORMATS)}"
        if self.reasoning is not None and self.reasoning not in REASONING_FORMATS:
            return f"--reasoning-parser {self.reasoning}: there are {', '.join(REASONING_FORMATS)}"
        if None not in (self.tools, self.reasoning) and (self.tools == HARMONY) != (self.reasoning == _GPT_OSS):
            return f"--tool-call-parser {HARMONY} and --reasoning-parser {_GPT_OSS} go with each other alone"
        return None

    def markers(self, tools: bool) -> tuple[str, ...]:
        """The special tokens whose text the parsers need, with tools or without."""
        shown = TOOL_FORMATS[self.tools].markers if self.tools is not None and tools else ()
        if self.reasoning == _GPT_OSS or self.tools == HARMONY:
            return harmony.MARKERS
        return (*shown, "<think>", "</think>") if self.reasoning is not None else shown

    def parser(self, tool_names: Iterable[str] | None, prompt_end: str) -> Parser | None:
        """What takes one answer apart; None where nothing is to be looked for.

        Args:
            tool_names: The tools that may be called; None: calls are not looked for.
            prompt_end: The last words of the prompt.
        """
        parser = self._parser(frozenset(tool_names or ()), tool_names is not None and self.tools is not None, prompt_end)
        return parser if parser is None or not self.forced else _Forced(parser)

    def _parser(self, names: frozenset[str], tools: bool, prompt_end: str) -> Parser | None:
        if self.reasoning == _GPT_OSS or self.tools == HARMONY:
            return harmony.Harmony(tools, self.forced)
        calls = TOOL_FORMATS[self.tools].parser(names.__contains__) if tools and self.tools is not None else None
        if self.reasoning is None:
            return calls
        think = Think(opening(prompt_end, _THINK[self.reasoning]))
        return think if calls is None else _Chain(think, calls)

    def forcing(self) -> "ParserConfig":
        """The same for answers whose calls a grammar writes."""
        own = self.tools is not None and bool(TOOL_FORMATS[self.tools].shapes)
        tools = self.tools if own else HARMONY if self.reasoning == _GPT_OSS else FORCED
        return self._replace(tools=tools, forced=True)

    def shape(self, special_tokens: Collection[str]) -> CallShape | None:
        """How a grammar writes calls, for a model with these special tokens; None: not at all."""
        return None if self.tools is None else shapes.fitting(TOOL_FORMATS[self.tools].shapes, special_tokens)

    def reasoning_markers(self, tokenizer: Tokenizer, prompt_end: str, calls: bool) -> ReasoningMarkers | None:
        """What comes before an answer that follows a grammar; None: nothing does.

        Args:
            tokenizer: The model's.
            prompt_end: The last words of the prompt.
            calls: Whether the answer is a call, not text.
        """
        if self.reasoning is None:
            return None
        if self.reasoning == _GPT_OSS:
            return ReasoningMarkers(_ids(tokenizer, harmony.CALL if calls else harmony.ANSWER))
        begins = opening(prompt_end, _THINK[self.reasoning])
        start = _ids(tokenizer, START)
        # A model that has no token for the beginning of reasoning was not taught to begin it by itself.
        if begins is Opening.CONTENT or (begins is Opening.EITHER and len(start) != 1):
            return None
        return ReasoningMarkers(_ids(tokenizer, END), None if begins is Opening.REASONING else next(iter(start)))


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


class _Chain:
    """Calls are looked for in what is not reasoning."""

    def __init__(self, think: Parser, calls: Parser) -> None:
        self._think = think
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        return self._through(self._think.feed(text))

    def finish(self) -> list[Piece]:
        return [*self._through(self._think.finish()), *self._calls.finish()]

    def _through(self, pieces: list[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return out


class _Forced:
    """Calls that a grammar forces. Text that is held back at the end is a call or a marker that the length limit cut, perhaps
    inside a character, of which the detokenizer makes a replacement character."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._cut = ""

    def feed(self, text: str) -> list[Piece]:
        text = self._cut + text
        whole = text.rstrip("\ufffd")
        self._cut = text[len(whole) :]
        return self._parser.feed(whole)

    def finish(self) -> list[Piece]:
        return [piece for piece in self._parser.finish() if not isinstance(piece, Content)]
