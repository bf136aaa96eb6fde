"""One request in its grammar, by each library, over the demo model's tokenizer: masks, ends, reasoning, what is refused."""

import itertools
import json
import random
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.core.grammar.guidance_batch import PARALLEL_MASKS, GuidanceBatcher
from penstock.engine.core.grammar.guide import GrammarGuide
from penstock.engine.core.grammar.libraries import GrammarError, GrammarsUnavailable
from penstock.engine.grammar import Grammar, ReasoningMarkers, Tag, Tags

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


@pytest.fixture(scope="module")
def compiler():
    """Of the demo model; the process of xgrammar takes seconds to start."""
    compiler = Compiler(model())
    yield compiler
    compiler.close()


BACKENDS = ("guidance", "xgrammar")


@pytest.fixture(params=BACKENDS)
def guide_of(request, compiler):
    """Makes guides by each library."""

    def make(grammar: Grammar, stops=(EOT,), compiler=compiler) -> GrammarGuide:
        source = msgspec.structs.replace(grammar.source, backend=request.param)
        return GrammarGuide(compiler.compile(source), stops, compiler.eos_token_ids, grammar.reasoning)

    return make


def schema(what, **options) -> Grammar:
    return Grammar("json_schema", json.dumps(what), "response_format", **options)


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
def test_whatever_is_drawn_from_the_masks_is_an_instance(tokenizer, seed, guide_of):
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


def test_no_special_token_passes_for_text(guide_of):
    assert not allowed(guide_of(Grammar("regex", ".*", "r"))) & {0, 1, 3, 4, 5}


@pytest.mark.req("SO-24", "SO-26")
@pytest.mark.parametrize("backend", BACKENDS)
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
def test_each_kind_of_grammar_takes_what_it_describes(tokenizer, compiler, backend, grammar, good, bad):
    if grammar.whitespace_pattern is not None and backend == "xgrammar":
        with pytest.raises(GrammarError, match="whitespace_pattern"):
            compiler.compile(msgspec.structs.replace(grammar, backend=backend))
        return
    prototype = compiler.compile(msgspec.structs.replace(grammar.source, backend=backend))
    for text in good + bad:
        matcher = prototype.matcher.copy()
        taken = all(matcher.try_accept(token) for token in ids(tokenizer, text)) and matcher.is_accepting
        assert taken == (text in good), text


def test_space_between_the_tokens_of_json_has_a_bound(tokenizer, guide_of):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, "{"))
    spaces = [token for token in ids(tokenizer, " ") if token in allowed(guide)]
    for _ in range(40):
        if not set(spaces) & allowed(guide):
            return
        guide.accept(spaces)
    raise AssertionError("space without end")


@pytest.mark.req("SO-27")
def test_a_complete_answer_is_the_end_and_an_extensible_one_may_end(tokenizer, guide_of):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, '{"a": 1'))
    assert guide.is_open and not guide.ended and EOT not in allowed(guide)
    guide.accept(ids(tokenizer, "}"))
    assert guide.ended and not guide.is_open and guide.error is None
    guide = guide_of(Grammar("regex", "a+", "r"))
    assert EOT not in allowed(guide)
    guide.accept(ids(tokenizer, "a"))
    assert EOT in allowed(guide) and not guide.ended and not guide.is_open


def test_stop_tokens_of_the_request_count_where_the_grammar_may_end_and_ignored_ones_do_not(tokenizer, guide_of):
    grammar = Grammar("regex", "a+", "r")
    guide = guide_of(grammar, stops=(EOT, USER))
    assert not allowed(guide) & {EOT, USER}
    guide.accept(ids(tokenizer, "a"))
    assert allowed(guide) >= {EOT, USER}
    ignoring = guide_of(grammar, stops=())
    ignoring.accept(ids(tokenizer, "a"))
    assert allowed(ignoring) and EOT not in allowed(ignoring)


@pytest.mark.req("SO-17")
def test_a_token_that_the_grammar_forbids_is_an_error(tokenizer, guide_of):
    guide = guide_of(schema(OBJECT))
    guide.accept(ids(tokenizer, "["))
    assert guide.error is not None and "does not allow" in guide.error and not guide.ended


@pytest.mark.req("SO-19", "SO-20", "SO-22", "SO-23")
def test_masks_of_drafts_leave_the_guide_where_it_was(tokenizer, guide_of):
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


def test_what_is_forced_is_what_the_masks_leave(tokenizer, guide_of):
    guide = guide_of(Grammar("regex", "(yes, of course|no)", "r"))
    assert list(guide.forced()) == [], "there is a choice"
    guide.accept(ids(tokenizer, "y"))
    forced = list(guide.forced())
    assert forced and "es, of course".startswith(tokenizer.decode(forced))
    for at in range(len(forced) + 1):
        [*_, last] = masks(guide, forced[:at])
        assert at == len(forced) or forced[at] in last
    text = "es, of course"[len(tokenizer.decode(forced)) :]
    guide.accept([*forced, *ids(tokenizer, text)])
    assert guide.ended and guide.error is None and list(guide.forced()) == []


CALL = {"type": "object", "properties": {"name": {"const": "f"}}, "required": ["name"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("tags", "good", "bad"),
    [
        (
            Tags(tags=[Tag("<f>", CALL, "</f>", "<f"), Tag("<g>", {"type": "integer"}, "</g>", "<g")], free=True),
            ["", "some text", 'before<f>{"name": "f"}</f>between<g>7</g>', "a < b"],
            ["<f>1</f>", '<f>{"name": "f"}', "<g>x</g>"],
        ),
        (
            Tags(tags=[Tag("<|user|>f ", CALL, "<|assistant|>", "<|user|>")], free=True),
            ["", "text", 'x<|user|>f {"name": "f"}<|assistant|>'],
            ["<|user|>g", '<|user|>f {"name": "g"}<|assistant|>', '<|user|>f {"name": "f"}'],
        ),
        (
            Tags(tags=[Tag("<f>", CALL, "</f>")], free=False, begin="[", separator=", ", end="]"),
            ['[<f>{"name": "f"}</f>]', '[<f>{"name": "f"}</f>, <f>{"name":"f"}</f>]'],
            ["", "[]", '[<f>{"name": "f"}</f>, ]', '<f>{"name": "f"}</f>'],
        ),
        (
            Tags(tags=[Tag("<|user|>", CALL, "<|assistant|>")], free=False, several=False, answer=[{"type": "integer"}]),
            ['<|user|>{"name": "f"}<|assistant|>', "12"],
            ['<|user|>{"name": "f"}', '<|user|>{"name": "f"}<|assistant|>12', "x"],
        ),
    ],
)
def test_tags_hold_what_their_schemas_say(tokenizer, guide_of, tags, good, bad):
    for text in good + bad:
        guide = guide_of(Grammar("tags", msgspec.json.encode(tags).decode(), "t"), stops=())
        taken = True
        for token in ids(tokenizer, text):
            taken = taken and token in allowed(guide)
            guide.accept([token])
        assert (taken and guide.error is None and not guide.is_open) == (text in good), text


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A tokenizer in SentencePiece's way: a character that has no token is written as its bytes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *'▁"abc', "▁a"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "</s>"])
    folder = tmp_path_factory.mktemp("byte_fallback")
    made.save(str(folder / "tokenizer.json"))
    return folder, made


@pytest.mark.slow
def test_a_character_without_a_token_comes_byte_by_byte(byte_fallback, guide_of):
    folder, made = byte_fallback
    compiler = Compiler(msgspec.structs.replace(model(None, folder), eos_token_ids=(1,)))
    try:
        guide = guide_of(Grammar("choice", '["é a", "è"]', "c"), stops=(1,), compiler=compiler)
        first, second, *rest = ids(made, "é a")
        assert [made.id_to_token(token) for token in (first, second)] == ["<0xC3>", "<0xA9>"]
        assert allowed(guide) == {first}
        guide.accept([first])
        assert allowed(guide) == {second, *ids(made, "è")[1:]}
        guide.accept([second, *rest])
        assert guide.ended and guide.error is None
    finally:
        compiler.close()


@pytest.mark.req("SO-12")
def test_masks_that_are_filled_together_are_those_of_each_guide_alone(compiler, tokenizer, monkeypatch):
    """In threads too, with stop tokens of several kinds, and where the tokenizer has more tokens than the model has logits."""
    text, threads = ids(tokenizer, '{"a": 12, "b": "mill"}'), []
    narrow = Compiler(model(VOCAB - 40))
    for made in (compiler, narrow):
        prototype = made.compile(schema({"type": "object"}).source)
        guides = []
        for count in range(150):
            guides.append(GrammarGuide(prototype, ((EOT,), (), (EOT, USER))[count % 3], (EOT,)))
            guides[-1].accept(text[: count % (len(text) + 1)])
        batcher = prototype.batcher
        assert batcher is not None
        with monkeypatch.context() as patch:
            patch.setattr(GuidanceBatcher, "executor", lambda of, then=GuidanceBatcher.executor: (threads.append(1), then(of))[1])
            for number in (PARALLEL_MASKS - 1, PARALLEL_MASKS, 150):
                together = np.full((number, prototype.num_words), -1, np.int32)
                batcher.batch(guides[:number]).fill(together)
                for guide, mask in zip(guides, together, strict=False):
                    alone = np.full((1, prototype.num_words), -1, np.int32)
                    guide.fill(alone, ())
                    assert np.array_equal(mask, alone[0])
    assert len(threads) == 2 * 2, "the library's threads are for many masks alone"
    narrow.close()


def test_a_guide_that_fails_among_others_fails_alone(compiler, tokenizer):
    prototype = compiler.compile(schema({"type": "object"}).source)
    guides = [GrammarGuide(prototype, (EOT,), (EOT,)) for _ in range(3)]
    guides[1].matcher.accept(USER)  # behind the guide's back
    masks = np.full((3, prototype.num_words), -1, np.int32)
    batch = prototype.batcher.batch(guides)
    batch.fill(masks)
    assert [guide.error is None for guide in guides] == [True, False, True]
    assert "next token" in guides[1].error and np.array_equal(masks[0], masks[2]) and (masks[1] == -1).all()
    said = guides[1].error
    [brace] = ids(tokenizer, "{")
    assert batch.take([brace, brace, USER]) == [1, 2], "the failed one ends, and so does one that is told nonsense"
    assert guides[0].error is None and guides[1].error == said and f"does not allow token {USER}" in guides[2].error


def test_guides_that_are_asked_together_say_what_each_says_alone(compiler, tokenizer):
    prototype = compiler.compile(schema(OBJECT).source)
    together, alone = ([GrammarGuide(prototype, (EOT,), (EOT,)) for _ in range(4)] for _ in range(2))
    batch = prototype.batcher.batch(together)
    answers = [ids(tokenizer, text) for text in ('{"a": 1}', '{"a": 12}', '{"a": 123456}', '{"a":')]
    answers[3].append(USER)
    running, failed = set(range(4)), []
    for tokens in itertools.zip_longest(*answers, fillvalue=USER):
        forced, ends = batch.forced(), batch.take(tokens)
        for at in sorted(running):
            assert list(forced[at]) == list(alone[at].forced())
            assert (at in ends) == alone[at].take(tokens[at]) and together[at].error == alone[at].error
            failed += [at] if together[at].error else []
        running -= set(ends)
    assert not running and failed == [3]


@pytest.mark.req("SO-04")
def test_a_mask_costs_a_fraction_of_asking_about_each_token(compiler, tokenizer):
    """The library holds what always and what never follows, and looks at the rest: no tenth of the time of trying all tokens."""
    matcher = compiler.compile(schema({"type": "array", "items": {"type": "string"}}).source).matcher.copy()
    for token in ids(tokenizer, '["the mill'):
        assert matcher.accept(token)
    mask, seconds = matcher.mask().copy(), []
    for work in (matcher.mask, lambda: [matcher.try_accept(token) and (matcher.rollback(1) or True) for token in range(VOCAB)]):
        began = time.thread_time()
        found = work()
        seconds.append(time.thread_time() - began)
    of_mask = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert of_mask - {EOT} == {token for token, taken in enumerate(found) if taken} - {EOT}
    assert seconds[0] < seconds[1] / 10


@pytest.mark.req("SO-05")
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_alone_can_be_taken_back(backend, compiler, tokenizer):
    matcher = compiler.compile(msgspec.structs.replace(schema(OBJECT), backend=backend)).matcher.copy()
    first, *drafts = ids(tokenizer, '{"a": 12}')
    assert matcher.accept(first) and len(drafts) > 3
    before = matcher.mask().copy()
    for _ in range(2):
        assert all(map(matcher.try_accept, drafts[:3]))
        with pytest.raises(ValueError, match="4 tokens cannot be taken back: 3 were tried"):
            matcher.rollback(4)
        matcher.rollback(2)
        matcher.rollback(1)
        assert np.array_equal(matcher.mask(), before)
    with pytest.raises(ValueError, match="1 tokens cannot be taken back: 0 were tried"):
        matcher.rollback(1)
    assert matcher.try_accept(drafts[0]) and matcher.accept(drafts[1])
    with pytest.raises(ValueError, match="0 were tried"):
        matcher.rollback(1)


@pytest.mark.req("SO-18")
def test_the_grammar_begins_after_the_reasoning(tokenizer, guide_of):
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


def test_a_model_that_may_think_may_also_answer_at_once(tokenizer, guide_of):
    guide = guide_of(schema(OBJECT, reasoning=ReasoningMarkers((5,), USER)))
    guide.accept(ids(tokenizer, '{"a": 1}'))
    assert guide.ended and guide.error is None


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [None, 4000, 4100])
def test_masks_have_the_models_size(vocab_size, guide_of):
    compiler = Compiler(model(vocab_size))
    guide = guide_of(schema(OBJECT), compiler=compiler)
    assert guide.num_words == -(-(vocab_size or 4096) // 32)
    assert allowed(guide) == allowed(guide_of(schema(OBJECT)))


@pytest.mark.req("SO-25")
@pytest.mark.parametrize("backend", BACKENDS)
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
        ({"properties": {"p": {"type": ["string", "thing"]}}}, r"thing at \$\.properties\.p\.type$"),
        ({"items": {"$ref": "#/$defs/none"}}, r"does not exist at \$\.items\.\$ref$"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, r"Unsatisfiable.* at \$\.minimum$"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        (False, "not"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(compiler, backend, what, message):
    with pytest.raises(GrammarError, match=message) as caught:
        compiler.compile(schema(what, backend=backend).source)
    assert "<state>" not in str(caught.value)


def with_optional(count: int, letter: str = "p", **more) -> dict:
    return {"type": "object", "properties": {f"{letter}{at}": {"type": "integer"} for at in range(count)}, **more}


def test_an_object_may_have_a_thousand_properties_that_are_not_required(compiler, tokenizer):
    guide = GrammarGuide(compiler.compile(schema(with_optional(1000)).source), (EOT,), compiler.eos_token_ids)
    guide.accept(ids(tokenizer, '{"p1": 1, "p998": 2}'))
    assert guide.error is None and EOT in allowed(guide)
    compiler.compile(schema(with_optional(1003, required=["p1", "p2", "p3"])).source)


@pytest.mark.parametrize("wrapped", [True, False], ids=["tag", "schema"])
def test_more_of_them_are_refused_before_the_answer_begins(compiler, wrapped):
    inner = {"items": with_optional(1003, required=["p1", "p2"])}
    grammar = Grammar("tags", msgspec.json.encode(Tags(tags=[Tag("<a>", inner, "</a>")], free=False)).decode(), "t")
    with pytest.raises(
        GrammarError, match=r"^properties has 1001 that are not required, and .* 1000 .* at \$\.items\.properties$"
    ):
        compiler.compile((grammar if wrapped else schema(inner)).source)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_several_objects_with_too_many_of_them_are_refused_before_the_answer_begins(compiler, tokenizer, keyword):
    """Of several objects each property may come next. A property that comes first and tells them apart leaves one."""
    inner = {keyword: [{"$ref": f"#/$defs/{letter}"} for letter in "pqr"]}

    def among(**more):
        named = {letter: with_optional(900, letter, **more) for letter in "pqr"}
        for letter, it in named.items() if more else ():
            it["properties"] = {"kind": {"const": letter}, **it["properties"]}
        return schema({"$defs": named, "type": "array", "items": inner})

    with pytest.raises(GrammarError, match=rf"^{keyword} has objects with 2700 .* about 2000 can be, at \$\.items\.{keyword}$"):
        compiler.compile(among().source)
    guide = GrammarGuide(compiler.compile(among(required=["kind"]).source), (EOT,), compiler.eos_token_ids)
    guide.accept(ids(tokenizer, '[{"kind": "q", "q1": 1, "q2": 2}]'))
    assert guide.error is None and EOT in allowed(guide)


def test_an_answer_that_meets_a_limit_of_the_library_is_not_said_to_be_wrong(compiler, tokenizer):
    """What references into properties name is not counted before."""
    named = {letter: with_optional(900, letter) for letter in "pqrs"}
    many = {"properties": {"a": {"anyOf": [{"$ref": f"#/properties/{letter}"} for letter in "pqrs"]}, **named}}
    guide = GrammarGuide(compiler.compile(schema(many).source), (EOT,), compiler.eos_token_ids)
    guide.accept(ids(tokenizer, '{"a": {"p1": 1, "p2"'))
    assert guide.error is not None and guide.error.startswith("the grammar's limits do not allow to go on after token ")
    assert "max is 8000" in guide.error and "<" not in guide.error


def test_a_lenient_grammar_leaves_out_what_cannot_be_enforced(compiler):
    prototype = compiler.compile(schema({"type": "string", "not": {"const": "x"}}, lenient=True).source)
    assert "not" in prototype.warnings[0]


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "(a"), ("lark", "start"), ("ebnf", 'root ::= "a" |- '), ("regex", "a(?=b)")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grammar_that_is_none_is_refused(compiler, backend, kind, text):
    with pytest.raises(GrammarError):
        compiler.compile(Grammar(kind, text, "g", backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "backend", "extra"), [("llguidance", "guidance", "engine"), ("xgrammar", "xgrammar", "xgrammar")]
)
def test_without_the_library_a_grammar_says_what_to_install(monkeypatch, module, backend, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GrammarsUnavailable, match=rf"install penstock\[{extra}\]"):
        Compiler(model()).compile(schema({}, backend=backend))
