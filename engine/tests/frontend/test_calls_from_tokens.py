"""Tool calls from tokens: answers drawn from the masks of real grammars, streamed in steps of any size.

Every tool format is combined with every way to ask for a call, and with reasoning before the call. A step of several tokens is
what accepted drafts give.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from test_parsing import WELL_FORMED
from tokenizers import AddedToken, Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.core.grammar.guide import GrammarGuide
from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.generation import Choice
from penstock.engine.frontend.openai.chat_grammar import chat_grammar
from penstock.engine.frontend.openai.parsing.assembly import Assembler
from penstock.engine.frontend.openai.parsing.harmony import CALL, MARKERS
from penstock.engine.frontend.openai.parsing.registry import HARMONY, TOOL_FORMATS, ParserConfig
from penstock.engine.frontend.openai.parsing.think import END, START
from penstock.engine.frontend.openai.protocol import parse_chat
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.grammar import ReasoningMarkers

EOS = "<|eos|>"
NAMES = ("get_weather", "add")
TRAPS = ["Zürich 水", "</tool_call>", "[TOOL_CALLS]", '"}; {', "<｜tool▁call▁end｜>", "```", "</think>", "<|call|>"]
"""Values that look like markup. In the text of an answer, the parser of gpt-oss takes the last one for a token."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": TRAPS}, "note": {"type": "string", "maxLength": 5}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
]
REASONED = [(None, ""), ("qwen3", ""), ("qwen3", "<think>\n"), ("qwen3", "</think>"), ("deepseek_r1", "")]
"""Reasoning parsers, and how the prompt ends."""


class Served(NamedTuple):
    """A tokenizer, what depends on it, and the parsers of a model."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    compiler: Compiler
    parsers: ParserConfig
    special: frozenset[str]


Serve = Callable[[ParserConfig, bool], Served]


@pytest.fixture(scope="module")
def serve(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Makes a tokenizer that has the markers of some parsers as special tokens, or as text of several tokens."""
    made: dict[tuple[ParserConfig, bool], Served] = {}

    def make(parsers: ParserConfig, special: bool) -> Served:
        if (parsers, special) not in made:
            tokenizer = Tokenizer.from_str(byte_level.to_str())
            tokenizer.add_special_tokens([EOS])
            if special:
                tokens = {*parsers.markers(True), *parsers.forcing().markers(True)} - set(tokenizer.get_vocab())
                tokenizer.add_special_tokens([AddedToken(token, special=True) for token in sorted(tokens)])
            path = tmp_path_factory.mktemp("model")
            tokenizer.save(str(path / "tokenizer.json"))
            eos = (tokenizer.token_to_id(EOS),)
            model = ModelConfig(
                path=path, served_names=("m",), architecture="x", dtype="float32", max_model_len=4096, eos_token_ids=eos
            )
            added = tokenizer.get_added_tokens_decoder().values()
            names = frozenset(token.content for token in added if token.special)
            made[parsers, special] = Served(tokenizer, Vocabulary(tokenizer), Compiler(model), parsers, names)
        return made[parsers, special]

    return make


class Message(NamedTuple):
    """What a client has at the end of a stream."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    """Names and arguments."""


def streamed(served: Served, steps: Iterable[Sequence[int]], forced: bool, prompt_end: str = "", tools: bool = True) -> Message:
    """Runs an answer through the detokenizer, the choice and the assembler, a delta a step, as a stream does."""
    parsers = served.parsers.forcing() if forced else served.parsers
    parser = parsers.parser(NAMES if tools else None, prompt_end)
    shown = {served.tokenizer.token_to_id(marker): marker for marker in parsers.markers(tools) if marker in served.special}
    choice = Choice(0, 0, 0, Detokenizer(served.vocabulary, [], shown), (), frozenset(), None)
    assembler = None if parser is None else Assembler(parser)
    content, reasoning, calls = "", "", []
    for step in (*steps, None):
        for token in step or ():
            choice.add_token(token, None)
        if step is None:
            choice.finish("stop", None)
        delta = choice.take()
        if delta is None:
            continue
        if assembler is None:
            content += delta.text
            continue
        new = assembler.feed(delta.text, final=step is None)
        content, reasoning = content + new.content, reasoning + new.reasoning
        for call in new.calls:
            assert (call.name is not None) == (call.id is not None) == (call.index == len(calls))
            if call.name is not None:
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return Message(content, reasoning, calls)


def of_any_steps(
    served: Served, tokens: list[int], dice: random.Random, forced: bool, prompt_end: str = "", tools: bool = True
) -> Message:
    """The message of an answer, which is the same by single tokens, cut in two anywhere, and in steps of drafts."""

    def message(steps: Iterable[Sequence[int]]) -> Message:
        return streamed(served, steps, forced, prompt_end, tools)

    whole = message([tokens])
    assert message([token] for token in tokens) == whole
    for at in range(1, len(tokens)):
        assert message([tokens[:at], tokens[at:]]) == whole, at
    for depth in (2, 5):
        ends, at = [0], 0
        while at < len(tokens):
            at = min(at + dice.randint(1, depth + 1), len(tokens))
            ends.append(at)
        assert message(tokens[a:b] for a, b in itertools.pairwise(ends)) == whole
    return whole


def check_calls(message: Message) -> None:
    """The arguments follow the schemas."""
    for name, arguments in message.calls:
        found = json.loads(arguments)
        if name == "add":
            assert set(found) == {"a"} and 0 <= found["a"] <= 99
        else:
            assert name == "get_weather" and found["city"] in TRAPS and set(found) <= {"city", "note"}
            assert len(found.get("note", "")) <= 5


def encode(served: Served, *parts: str) -> list[int]:
    """Tokens of parts that share none: special tokens where the tokenizer has them."""
    return [token for part in parts for token in served.tokenizer.encode(part, add_special_tokens=False).ids]


def drawn(served: Served, guide: GrammarGuide, tokens: list[int], dice: random.Random) -> list[int]:
    """An answer that goes on from some tokens with any that the masks allow, to the first end."""
    eos, tokens = served.tokenizer.token_to_id(EOS), list(tokens)
    guide.accept(tokens)
    while not guide.ended:
        assert guide.error is None and len(tokens) < 2000
        mask = np.full((1, guide.num_words), -1, np.int32)
        guide.fill(mask, ())
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if eos in choices and (len(choices) == 1 or dice.random() < 0.5):
            break
        choices = [token for token in choices if token != eos]
        # JSON may have up to 32 characters of space between two tokens.
        solid = [token for token in choices if served.vocabulary.text_of(token).strip()]
        token = dice.choice(solid if solid and dice.random() < 0.9 else choices)
        guide.accept([token])
        tokens.append(token)
    assert guide.error is None
    return tokens


def guide_of(served: Served, prompt_end: str, **fields: Any) -> tuple[GrammarGuide, ReasoningMarkers | None]:
    """The grammar of a chat, as the server makes it."""
    request = parse_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields})
    parsers = served.parsers.forcing() if request.forces_call else served.parsers
    grammar = chat_grammar(request, parsers, served.special)
    assert grammar is not None
    reasoning = parsers.reasoning_markers(served.tokenizer, prompt_end, calls=request.forces_call)
    grammar = msgspec.structs.replace(grammar, reasoning=reasoning)
    compiler = served.compiler
    return GrammarGuide(compiler.compile(grammar.source), compiler.eos_token_ids, compiler.eos_token_ids, reasoning), reasoning


def thought(served: Served, reasoning: ReasoningMarkers | None) -> list[int]:
    """Reasoning as the model would write it, to the markers that end it."""
    if reasoning is None:
        return []
    if served.parsers.reasoning == "openai_gptoss":
        after = () if served.tokenizer.decode(reasoning.end, skip_special_tokens=False) == CALL else encode(served, CALL)
        return [*encode(served, "<|channel|>analysis<|message|>", "hm 水 </tool"), *after, *reasoning.end]
    return encode(served, START if reasoning.begin is not None else "", "hm 水 </tool", END)


def configs() -> list[Any]:
    """Parsers, the prompt's end, and whether their markers are special tokens."""
    found = []
    for tools, (reasoning, end), special in itertools.product((None, *TOOL_FORMATS), REASONED, (True, False)):
        if tools == HARMONY:
            if special and end == "" and reasoning in (None, "qwen3"):
                found.append((ParserConfig(tools, reasoning and "openai_gptoss", True), "", True))
            continue
        found.append((ParserConfig(tools, reasoning, tools is not None), end, special))
    return [pytest.param(*one, id=f"{one[0].tools}-{one[0].reasoning}-{one[1].strip()}-{one[2]}") for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(("parsers", "prompt_end", "special"), configs())
def test_a_forced_call_is_valid_and_nothing_but_a_call(
    serve: Serve, parsers: ParserConfig, prompt_end: str, special: bool
) -> None:
    served = serve(parsers, special)
    named = {"type": "function", "function": {"name": "add"}}
    for seed, choice in enumerate(("required", named)):
        dice = random.Random(seed)
        guide, reasoning = guide_of(served, prompt_end, tool_choice=choice)
        tokens = drawn(served, guide, thought(served, reasoning), dice)
        message = of_any_steps(served, tokens, dice, True, prompt_end)
        assert message.calls and not message.content
        assert message.reasoning == ("" if reasoning is None else "hm 水 </tool")
        assert choice == "required" or [name for name, _ in message.calls] == ["add"]
        check_calls(message)
        for at in range(len(tokens)):
            cut = streamed(served, [tokens[:at]], True, prompt_end)
            assert not cut.content, "the length limit cut the call or a marker before it"
            assert message.reasoning.startswith(cut.reasoning) or cut.reasoning.startswith(message.reasoning)
            for (name, arguments), (whole_name, whole) in zip(cut.calls, message.calls, strict=False):
                assert name == whole_name and whole.startswith(arguments)


SHAPED = [one for one in configs() if one.values[0].tools is not None and TOOL_FORMATS[one.values[0].tools].shapes]
# A strict call among text needs markup that begins it; Mistral's older format has none.
TRIGGERED = [one for one in configs() if one.values[0].tools == "hermes" or (one.values[0].tools == "mistral" and one.values[2])]


@pytest.mark.parametrize(("parsers", "prompt_end", "special"), TRIGGERED)
def test_a_strict_call_among_text_is_valid(serve: Serve, parsers: ParserConfig, prompt_end: str, special: bool) -> None:
    served = serve(parsers, special)
    shape = parsers.shape(served.special)
    assert shape is not None and shape.trigger
    dice = random.Random(1)
    guide, reasoning = guide_of(served, prompt_end)
    before = "I look <tool_cal [TOOL水 "
    begun = [*thought(served, reasoning), *encode(served, before, shape.trigger)]
    message = of_any_steps(served, drawn(served, guide, begun, dice), dice, False, prompt_end)
    assert message.calls
    assert message.content.startswith(before)
    assert shape.trigger not in message.content
    check_calls(message)


@pytest.mark.slow
@pytest.mark.parametrize(("parsers", "prompt_end", "special"), SHAPED)
def test_a_format_beside_tools_gives_valid_calls_or_an_instance(
    serve: Serve, parsers: ParserConfig, prompt_end: str, special: bool
) -> None:
    served = serve(parsers, special)
    schema = {"type": "object", "properties": {"at": {"enum": TRAPS[:-1]}}, "required": ["at"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    for seed in range(3):
        dice = random.Random(seed)
        guide, reasoning = guide_of(served, prompt_end, response_format=form)
        message = of_any_steps(served, drawn(served, guide, thought(served, reasoning), dice), dice, False, prompt_end)
        if message.calls:
            assert not message.content
            check_calls(message)
        else:
            assert json.loads(message.content)["at"] in TRAPS


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
def test_a_call_that_the_model_writes_by_itself_is_found(
    serve: Serve, name: str, text: str, content: str, calls: list[tuple[str, Any]], special: bool
) -> None:
    served = serve(ParserConfig(name, None, True), special)
    message = of_any_steps(served, encode(served, text), random.Random(2), False)
    assert message.content == content
    assert [(called, json.loads(arguments)) for called, arguments in message.calls] == calls


@pytest.mark.slow
@pytest.mark.parametrize(("parsers", "prompt_end", "special"), configs())
def test_without_tools_the_same_answer_is_text(serve: Serve, parsers: ParserConfig, prompt_end: str, special: bool) -> None:
    """Special tokens have no text then, and what is left of the markup is content to the last character."""
    served = serve(parsers, special)
    dice = random.Random(3)
    guide, reasoning = guide_of(served, prompt_end, tool_choice="required")
    begun = thought(served, reasoning)
    tokens = drawn(served, guide, begun, dice)
    message = of_any_steps(served, tokens, dice, False, prompt_end, tools=False)
    assert not message.calls
    if parsers.tools != HARMONY:
        expected = served.tokenizer.decode(tokens[len(begun) :], skip_special_tokens=True)
        assert message.content + (message.reasoning if reasoning is None else "") == expected
    assert not any(marker in message.content for marker in MARKERS)
