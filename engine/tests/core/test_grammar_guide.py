"""One request in its grammar, over the demo model's tokenizer: masks, ends, reasoning, and what cannot be enforced."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.compiler import Compiler, GrammarError, GrammarsUnavailable
from penstock.engine.core.grammar.guide import GrammarGuide
from penstock.engine.grammar import Grammar, ReasoningMarkers

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"
EOT, USER, VOCAB = 2, 4, 4096
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def model(vocab_size: int | None = VOCAB, path: Path = MODEL) -> ModelConfig:
    return ModelConfig(
        path=path,
        served_names=("m",),
        architecture="Fake",
        dtype="float32",
        max_model_len=4096,
        eos_token_ids=(EOT,),
        vocab_size=vocab_size,
    )


COMPILER = Compiler(model())


def schema(what, **options) -> Grammar:
    return Grammar("json_schema", json.dumps(what), "response_format", **options)


def guide_of(grammar: Grammar, stops=(EOT,), compiler=COMPILER) -> GrammarGuide:
    return GrammarGuide(compiler.compile(grammar.source), stops, compiler.eos_token_ids, grammar.reasoning)


def masks(guide: GrammarGuide, drafts=()) -> list[set[int]]:
    rows = np.full((len(drafts) + 1, guide.num_words), -1, np.int32)
    guide.fill(rows, drafts)
    return [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in rows]


def allowed(guide: GrammarGuide) -> set[int]:
    return masks(guide)[0]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.req("SO-01", "SO-02")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_from_the_masks_is_an_instance(tokenizer, seed):
    dice = random.Random(seed)
    kinds = [
        {"type": "integer"},
        {"enum": ["x", 3, None]},
        {"type": "boolean"},
        {"type": "string", "maxLength": 5},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    ]
    names = dice.sample("abcdef", 3)
    what = {
        "type": "object",
        "properties": {name: dice.choice(kinds) for name in names},
        "required": names[:2],
        "additionalProperties": False,
    }
    guide, tokens = guide_of(schema(what)), []
    while not guide.ended and len(tokens) < 2000:
        choices = sorted(allowed(guide))
        assert choices and choices[-1] < VOCAB
        token = dice.choice(choices)
        if token == EOT:
            break
        guide.accept([token])
        tokens.append(token)
    found = json.loads(tokenizer.decode(tokens, skip_special_tokens=False))
    assert guide.error is None and set(names[:2]) <= set(found) <= set(names)


def test_no_special_token_passes_for_text():
    assert not allowed(guide_of(Grammar("regex", ".*", "r"))) & {0, 1, 3, 4, 5}


@pytest.mark.req("SO-26")
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("choice", json.dumps(["größe", 'a"b\\', "x/y"]), "c"), ["größe", 'a"b\\', "x/y"], ["x", "xy"]),
        (Grammar("regex", r"[a-c]{2}/\d+", "r"), ["ab/12"], ["ad/1", "ab/"]),
        (Grammar("ebnf", 'root ::= "a" | "b" root', "g"), ["a", "bba"], ["bb", "c"]),
        (Grammar("lark", 'start: "x" /[0-9]+/ ";"', "g"), ["x12;"], ["x;", "12;"]),
        (schema(OBJECT), ['{"a": 1}', '{"a":1}', '{\n  "a": 1\n}'], ['{"a": "1"}', "{}", '{"a": 1, "b": 2}', " 1"]),
        (schema({"type": "string"}), ['"é"', '"\\u00e9"', '"\\n"'], ['"\n"', '"\\x"']),
        (schema(True), ["[1]", '{"x": null}'], ["x"]),
        (schema(OBJECT, any_whitespace=False), ['{"a":1}'], ['{"a": 1}']),
        (schema(OBJECT, whitespace_pattern="[ ]?"), ['{ "a": 1 }'], ['{\n"a":1}']),
    ],
)
def test_each_kind_of_grammar_takes_what_it_describes(tokenizer, grammar, good, bad):
    prototype = COMPILER.compile(grammar.source)
    for text in good + bad:
        matcher, tokens = prototype.matcher.deep_copy(), ids(tokenizer, text)
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert taken == (text in good), text


def test_space_between_the_tokens_of_json_has_a_bound(tokenizer):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, "{"))
    spaces = [token for token in ids(tokenizer, " ") if token in allowed(guide)]
    for _ in range(40):
        if not set(spaces) & allowed(guide):
            return
        guide.accept(spaces)
    raise AssertionError("space without end")


@pytest.mark.req("SO-27")
def test_a_complete_answer_is_the_end_and_an_extensible_one_may_end(tokenizer):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, '{"a": 1'))
    assert guide.is_open and not guide.ended and EOT not in allowed(guide)
    guide.accept(ids(tokenizer, "}"))
    assert guide.ended and not guide.is_open and guide.error is None
    guide = guide_of(Grammar("regex", "a+", "r"))
    assert EOT not in allowed(guide)
    guide.accept(ids(tokenizer, "a"))
    assert EOT in allowed(guide) and not guide.ended and not guide.is_open


def test_stop_tokens_of_the_request_count_where_the_grammar_may_end_and_ignored_ones_do_not(tokenizer):
    grammar = Grammar("regex", "a+", "r")
    guide = guide_of(grammar, stops=(EOT, USER))
    assert not allowed(guide) & {EOT, USER}
    guide.accept(ids(tokenizer, "a"))
    assert allowed(guide) >= {EOT, USER}
    ignoring = guide_of(grammar, stops=())
    ignoring.accept(ids(tokenizer, "a"))
    assert allowed(ignoring) and EOT not in allowed(ignoring)


@pytest.mark.req("SO-17")
def test_a_token_that_the_grammar_forbids_is_an_error(tokenizer):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, "["))
    assert guide.error is not None and "does not allow" in guide.error and not guide.ended


@pytest.mark.req("SO-19", "SO-20", "SO-22", "SO-23")
def test_masks_of_drafts_leave_the_guide_where_it_was(tokenizer):
    text = ids(tokenizer, '{"a": 123}')
    alone = guide_of(schema(OBJECT))
    one_by_one = []
    for token in text:
        one_by_one.append(allowed(alone))
        alone.accept([token])
    guide = guide_of(schema(OBJECT))
    for at in range(len(text) - 1):
        assert masks(guide, text[at:-1]) == one_by_one[at:]
        assert masks(guide, [*text[at:], EOT])[: len(text) - at] == one_by_one[at:], "the end is not past again"
        illegal = ids(tokenizer, "]")[0]
        assert masks(guide, [illegal, illegal])[0] == one_by_one[at]
        guide.accept([text[at]])
    guide.accept(text[-1:])
    assert guide.ended and guide.error is None


@pytest.mark.req("SO-18")
def test_the_grammar_begins_after_the_reasoning(tokenizer):
    end = tuple(ids(tokenizer, "</think>"))
    for begin, opening in ((None, []), (USER, [USER])):
        guide = guide_of(schema(OBJECT, reasoning=ReasoningMarkers(end, begin)))
        if begin is not None:
            assert allowed(guide) == allowed(guide_of(schema(OBJECT))) | {USER}
        guide.accept([*opening, *ids(tokenizer, "I think [1] } <"), *end[:-1]])
        assert len(allowed(guide)) == guide.num_words * 32 and guide.is_open and not guide.ended
        drafts = [end[-1], *ids(tokenizer, '{"')]
        assert masks(guide, drafts)[1] == allowed(guide_of(schema(OBJECT)))
        guide.accept([end[-1]])
        assert allowed(guide) == allowed(guide_of(schema(OBJECT)))
        guide.accept(ids(tokenizer, '{"a": 1}'))
        assert guide.ended and guide.error is None


def test_a_model_that_may_think_may_also_answer_at_once(tokenizer):
    guide = guide_of(schema(OBJECT, reasoning=ReasoningMarkers((5,), USER)))
    guide.accept(ids(tokenizer, '{"a": 1}'))
    assert guide.ended and guide.error is None


@pytest.mark.parametrize("vocab_size", [None, 4000, 4096, 4100, 4160])
def test_masks_have_the_models_size(vocab_size):
    compiler = Compiler(model(vocab_size))
    guide = guide_of(schema(OBJECT), compiler=compiler)
    assert guide.num_words == -(-(vocab_size or 4096) // 32)
    assert allowed(guide) == allowed(guide_of(schema(OBJECT)))


@pytest.mark.req("SO-25")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"properties": {"p": {"not": {"type": "string"}}}}, r'"not".* at \$\.properties\.p\.not$'),
        ({"properties": {"not": {"items": [{"uniqueItems": True}]}}}, r"at \$\.properties\.not\.items\[0\]\.uniqueItems$"),
        ({"$defs": {"x": {"format": "shoe"}}, "$ref": "#/$defs/x"}, r"Unknown format: shoe at \$\.\$defs\.x\.format"),
        ({"type": "integer", "enum": ["a"]}, "Unsatisfiable"),
        ({"$ref": "#"}, "."),
        ({"$ref": "https://example.com/schema"}, "not present"),
        ({"type": "thing"}, "thing"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        (False, "not"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(what, message):
    with pytest.raises(GrammarError, match=message) as caught:
        COMPILER.compile(schema(what).source)
    assert "<state>" not in str(caught.value)


def test_a_lenient_grammar_leaves_out_what_cannot_be_enforced():
    prototype = COMPILER.compile(schema({"type": "string", "not": {"const": "x"}}, lenient=True).source)
    assert "not" in prototype.warnings[0]


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "(a"), ("lark", "start"), ("ebnf", 'root ::= "a" |- '), ("regex", "a(?=b)")]
)
def test_a_grammar_that_is_none_is_refused(kind, text):
    with pytest.raises(GrammarError):
        COMPILER.compile(Grammar(kind, text, "g"))


def test_without_the_library_a_grammar_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarsUnavailable, match=r"install penstock\[engine\]"):
        Compiler(model()).compile(schema({}))
