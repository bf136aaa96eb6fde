"""From the fields of requests to grammars: every spelling, and what is wrong with others."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.chat_grammar import chat_grammar
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.frontend.openai.protocol import parse_chat, parse_completion
from penstock.engine.frontend.openai.responses_protocol import as_chat_request, parse_responses
from penstock.engine.frontend.openai.structured import grammar_of
from penstock.engine.frontend.python.prompts import load_processor
from penstock.engine.frontend.spec import generation_spec
from penstock.engine.grammar import Grammar, GrammarSettings, ReasoningMarkers, Tags

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
HERMES = ParserConfig("hermes", auto_tool_choice=True)


def chat(parsers: ParserConfig = HERMES, special=(), **fields: Any) -> Grammar | None:
    request = parse_chat({**CHAT, **fields})
    return chat_grammar(request, parsers.forcing() if request.forces_call else parsers, special)


def tags(**fields: Any) -> Tags:
    grammar = chat(**fields)
    assert grammar is not None and grammar.kind == "tags"
    return msgspec.json.decode(grammar.text, type=Tags)


@pytest.mark.req("SO-26")
@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["é", "b"]}}, "choice", ["é", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", None, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", None, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", None, "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"guided_regex": "a+"}, "regex", None, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "structured_outputs.choice"),
        ({"guided_grammar": 'start: "a"'}, "lark", None, "structured_outputs.grammar"),
    ],
)
def test_each_spelling_becomes_a_grammar(fields, kind, text, param):
    grammars = [chat(**fields)]
    completion = parse_completion({"model": "m", "prompt": "x", **fields})
    grammars.append(grammar_of(completion.response_format, completion.structured_outputs, completion.schema_field))
    for grammar in grammars:
        assert grammar is not None and (grammar.kind, grammar.param, grammar.lenient) == (kind, param, False)
        if text is not None:
            assert json.dumps(json.loads(grammar.text)) == json.dumps(text), "in the order of its keys"


def test_what_asks_for_nothing_is_no_grammar():
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}, {"guided_json": None}):
        assert chat(**fields) is None
    assert chat(tools=TOOLS[1:]) is None and chat(tools=TOOLS, tool_choice="none") is None


def test_options_travel_along():
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": False}}
    assert (chat(response_format=lenient) or Grammar("regex", "", "")).lenient
    spaced = chat(guided_json=SCHEMA, guided_whitespace_pattern="[ ]?")
    assert spaced is not None and spaced.whitespace_pattern == "[ ]?"
    dense = chat(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert dense is not None and not dense.any_whitespace


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "schema": {}, "end": ""}],
                    "triggers": ["<b"],
                }
            },
            "response_format.structures[0].begin",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": '{"type": "x"}'}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "`" not in caught.value.message, "words of a library"


def test_a_schema_that_nests_too_deep_is_refused():
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ApiError, match="within each other"):
        chat(structured_outputs={"json": deep})


def test_a_response_names_its_own_fields():
    for form, ends in (
        ({"type": "json_schema", "name": "x", "schema": SCHEMA}, "text.format.schema"),
        ({"type": "json_object"}, "response_format"),
    ):
        body = {"model": "m", "input": "x", "text": {"format": form}}
        request = as_chat_request(parse_responses(body), body)
        grammar = chat_grammar(request, HERMES, ())
        assert grammar is not None and grammar.param == ends
    for form, field in (({"type": "json_schema", "name": "x"}, "schema"), ({"type": "json_schema", "schema": {}}, "name")):
        body = {"model": "m", "input": "x", "text": {"format": form}}
        with pytest.raises(ApiError) as caught:
            as_chat_request(parse_responses(body), body)
        assert caught.value.param == f"text.format.{field}"


def test_a_forced_call_is_written_as_the_model_writes_calls():
    forced = tags(tools=TOOLS, tool_choice="required")
    assert [tag.begin for tag in forced.tags] == [
        '<tool_call>\n{"name": "weather", "arguments": ',
        '<tool_call>\n{"name": "time", "arguments": ',
    ]
    assert not forced.free and forced.several and forced.tags[0].schema == SCHEMA
    assert forced.tags[1].schema["additionalProperties"] is False, "a function without parameters has none"
    assert not tags(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).several
    named = tags(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}})
    assert [tag.begin for tag in named.tags] == ['<tool_call>\n{"name": "time", "arguments": '] and not named.several


def test_parameters_that_are_not_strict_are_enforced_as_far_as_can_be():
    strict, loose = tags(tools=TOOLS, tool_choice="required").tags
    assert "x-guidance" not in strict.schema and loose.schema["x-guidance"] == {"lenient": True}


@pytest.mark.parametrize("tools", [None, "pythonic", "llama4_pythonic"])
def test_models_without_a_shape_of_their_own_write_calls_as_hermes_does(tools):
    assert tags(parsers=ParserConfig(tools), tools=TOOLS, tool_choice="required").tags[0].begin.startswith("<tool_call>")


def test_mistral_writes_calls_as_its_tokenizer_knows():
    mistral = ParserConfig("mistral", auto_tool_choice=True)
    new = tags(parsers=mistral, special=("[TOOL_CALLS]", "[ARGS]"), tools=TOOLS, tool_choice="required")
    assert new.tags[0].begin == "[TOOL_CALLS]weather[ARGS]" and not new.begin
    old = tags(parsers=mistral, special=("[TOOL_CALLS]",), tools=TOOLS, tool_choice="required")
    assert (old.begin, old.end) == ("[TOOL_CALLS][", "]")


def test_strict_functions_are_enforced_among_free_text():
    free = tags(tools=TOOLS)
    assert free.free and [tag.trigger for tag in free.tags] == ["<tool_call>"] * 2
    with pytest.raises(ApiError) as caught:
        chat(ParserConfig("llama3_json", auto_tool_choice=True), tools=TOOLS)
    assert caught.value.param == "tools[0].function.strict"


def test_a_format_beside_tools_leaves_both_open():
    either = tags(tools=TOOLS, response_format={"type": "json_object"})
    assert not either.free and len(either.tags) == 2 and either.answer == [{"type": "object"}]
    with pytest.raises(ApiError) as caught:
        chat(ParserConfig("pythonic", auto_tool_choice=True), tools=TOOLS, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


def spec(settings: GrammarSettings | None = None, reasoning: ReasoningMarkers | None = None, **fields: Any) -> Grammar:
    """The grammar that the engine gets for a body."""
    request = parse_completion({"model": "m", "prompt": "x", **fields})
    served = ModelConfig(
        path=MODEL,
        served_names=("m",),
        architecture="A",
        dtype="float32",
        max_model_len=64,
        eos_token_ids=(2,),
        grammars=settings or GrammarSettings(),
    )
    grammar = grammar_of(request.response_format, request.structured_outputs, request.schema_field)
    given: dict[str, Any] = {"seed": 0, "request_id": "r", "arrival": 0.0, "grammar": grammar, "reasoning": reasoning}
    made = generation_spec([[1]], request, served, load_processor(EngineArgs(model=str(MODEL), device="cpu").config()), **given)
    assert made.grammar is not None
    return made.grammar


OBJECT: Any = {"response_format": {"type": "json_object"}}


def test_a_request_names_its_library_and_else_has_the_servers() -> None:
    xgrammar = GrammarSettings(backend="xgrammar")
    assert spec(**OBJECT).backend == "guidance" and spec(xgrammar, **OBJECT).backend == "xgrammar"
    assert spec(**OBJECT, guided_decoding_backend="xgrammar").backend == "xgrammar"
    assert spec(xgrammar, **OBJECT, guided_decoding_backend="guidance").backend == "guidance"
    with pytest.raises(ApiError, match="guided_decoding_backend"):
        spec(**OBJECT, guided_decoding_backend="outlines")


def test_a_library_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.grammar.find_spec", lambda name: None if name == "xgrammar" else name)
    with pytest.raises(ApiError, match="guided_decoding_backend: xgrammar is not installed here"):
        spec(**OBJECT, guided_decoding_backend="xgrammar")
    with pytest.raises(ConfigError, match=r"--structured-outputs-config: xgrammar is not installed: pip install"):
        EngineArgs(model=str(MODEL), device="cpu", structured_outputs_config={"backend": "xgrammar"}).config()


def test_the_servers_settings_hold_where_a_request_says_nothing() -> None:
    marks = ReasoningMarkers((5,))
    assert spec(reasoning=marks, **OBJECT).reasoning == marks
    assert spec(GrammarSettings(enable_in_reasoning=True), marks, **OBJECT).reasoning is None
    tight = GrammarSettings(disable_any_whitespace=True)
    assert not spec(tight, **OBJECT).any_whitespace
    assert spec(tight, structured_outputs={"json": {}, "whitespace_pattern": " ?"}).any_whitespace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "outlines"}, "--structured-outputs-config: backend.*guidance"),
        ({"reasoning_parser": "x"}, "--structured-outputs-config: .*reasoning_parser"),
        ({"enable_in_reasoning": 1}, "--structured-outputs-config: enable_in_reasoning"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model=str(MODEL), device="cpu", structured_outputs_config=given).config()


def test_settings_reach_the_model() -> None:
    args = EngineArgs(model=str(MODEL), device="cpu", structured_outputs_config={"backend": "auto", "enable_in_reasoning": True})
    assert args.config().model.grammars == GrammarSettings(enable_in_reasoning=True)
