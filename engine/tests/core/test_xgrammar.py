"""What is xgrammar's alone: the process that compiles, and what is refused because xgrammar would leave it out."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from penstock.engine.core.grammar.libraries import GrammarError
from penstock.engine.core.grammar.xgrammar_limits import beyond_xgrammar
from penstock.engine.core.grammar.xgrammar_process import CompileProcess, Work
from penstock.engine.core.grammar.xgrammar_tags import structural_tag
from penstock.engine.grammar import Tag, Tags

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"


@pytest.fixture(scope="module")
def tokenizer_info() -> str:
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo([*map(chr, range(32, 127)), "<end>"], VocabType.RAW, stop_token_ids=[95]).serialize_json()


@pytest.fixture
def process(tokenizer_info):
    process = CompileProcess(tokenizer_info)
    yield process
    process.close()


SMALL = Work("regex", "a+")


@pytest.mark.req("SO-10")
def test_a_grammar_that_takes_too_long_is_given_up_and_the_next_one_compiles(process):
    process.check(SMALL, 60)
    pid = process.pid
    deep = {"type": "object"}
    for _ in range(400):
        deep = {"type": "array", "items": deep, "maxItems": 50}
    with pytest.raises(GrammarError, match="not compiled the grammar after 0 s"):
        process.check(Work("json_schema", json.dumps(deep)), 0.01)
    assert pid is not None and not psutil.pid_exists(pid)
    process.check(SMALL, 60)


def test_a_process_that_dies_fails_its_grammar_alone(process):
    process.check(SMALL, 60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="process ended"):
        process.check(SMALL, 60)
    process.check(SMALL, 60)


def test_nothing_is_left_of_it(process):
    process.check(SMALL, 60)
    pid = process.pid
    process.close()
    assert pid is not None and not psutil.pid_exists(pid) and process.pid is None


def test_its_error_is_the_grammars(process):
    for work in (Work("regex", "(a"), Work("grammar", "root ::= ("), Work("json_schema", '{"type": "thing"}')):
        with pytest.raises(GrammarError) as caught:
            process.check(work, 60)
        assert str(caught.value) and ".cc:" not in str(caught.value)
    process.check(SMALL, 60)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ([Tag("<a>", {}, "<|eot|>", "<a")], r"no tag with <\|eot\|>"),
        ([Tag("<a>", {}, "</a>", "<a"), Tag("<|user|>", {}, "", "<|user|>")], "not both"),
    ],
)
def test_tags_that_xgrammar_cannot_take_are_refused(tags, message):
    with pytest.raises(GrammarError, match=message):
        structural_tag(Tags(tags=tags, free=True), Tokenizer.from_file(str(MODEL / "tokenizer.json")), [2])


@pytest.mark.req("SO-25")
@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"patternProperties": {"^a$": {}}}, "patternProperties at $.patternProperties"),
        ({"properties": {"p": {"type": "number", "multipleOf": 0.5}}}, "multipleOf of numbers at $.properties.p.multipleOf"),
        ({"type": "integer", "multipleOf": 5}, None),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "pattern beside maxLength at $.pattern"),
        ({"type": "string", "format": "email", "minLength": 3}, "format beside minLength at $.format"),
        ({"type": "string", "pattern": "a+"}, "a pattern that is not anchored at both ends at $.pattern"),
        ({"type": "string", "pattern": "^a|b$"}, "a pattern that is not anchored at both ends at $.pattern"),
        ({"type": "string", "pattern": "^(a$|b)$"}, "a pattern that is not anchored at both ends at $.pattern"),
        ({"type": "string", "pattern": "^a\\$"}, "a pattern that is not anchored at both ends at $.pattern"),
        ({"type": "string", "pattern": "^(a|[$^|]|\\$)$"}, None),
        ({"anyOf": [{}, {}], "required": ["a"]}, "anyOf beside required at $.anyOf"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "title": "t"}, None),
        ({"allOf": [{}, {}]}, "an allOf of several schemas at $.allOf"),
        ({"$ref": "#a", "$defs": {"a": {}}}, "a $ref that is no path at $.$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, None),
        ({"enum": ["a", 1], "type": "string"}, "enum with values of another type at $.enum"),
        ({"const": None, "type": ["string", "null"]}, None),
        ({"enum": ["a"], "pattern": "^a$"}, "enum beside pattern at $.enum"),
        ({"properties": {"pattern": {"type": "string"}}}, None),
    ],
)
def test_what_xgrammar_would_leave_out_is_found(schema, found):
    assert beyond_xgrammar(schema) == found
