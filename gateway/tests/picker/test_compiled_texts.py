"""Texts hashed by the compiled parts, from what they remember of words, against the tokenizer and Python's hashes."""

import random
import sys
from functools import cache, partial
from types import FrameType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.gateway.extproc.body import parse_body
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.load.tokenized import exact, extra_keys
from penstock.gateway.picker.compiled import MODULE, Compiled, installed
from penstock.gateway.picker.request import Prompt
from penstock.prompt import cuts
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.cuts import Cutter
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.memo import PrefixMemo, Unremembered
from penstock.prompt.processor import CHANGES_CHATS, CHAT_PATH, COMPLETIONS_PATH, PromptProcessor

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS, MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}*{MARKS}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}+{MARKS}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"""
    r"|\s+(?!\S)|\s+",
]
SPECIAL = ["<|bos|>", "<|end|>", "<mask>"]
PARTS = [
    *("the", "river,", "don't", "I'LL", "7", "2024", "1234567", "état", "cafe\u0301", "вода", "水车。河", "한국어", "x=y()"),
    *("</b>", "🙂", "\u200d", "n\u0303", "'", "'s", "'l", ".", ",", ")", "\x01", "\x85", "\xa0"),
    *(" ", " ", " ", " ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\r", "\u3000", "\u2028", "\x1c", "\x0b", "\u0301", "\u3099"),
    *SPECIAL,
    *("<|", "nd|>", "a" * 50, "é" * 30, "hello world"),
]
texts = st.lists(st.sampled_from(PARTS), max_size=60).map("".join) | st.text(max_size=30)


def byte_level(*patterns: str, normalizer: Any = None, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    chance = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["".join(chance.choices(PARTS, k=30)) for _ in range(60)], trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def with_ends(tokenizer: Tokenizer) -> Tokenizer:
    ids = [(name, tokenizer.token_to_id(name)) for name in SPECIAL[:2]]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A <|end|>", special_tokens=ids)
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["?", *SPECIAL, "the", "river"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@cache
def processors_by_kind() -> dict[str, PromptProcessor]:
    spaced = AddedToken("<mask> x", normalized=False)
    eats = AddedToken("</b>", rstrip=True, normalized=False)
    longer = AddedToken("<|end|>x", normalized=False)
    left = AddedToken("</b>", lstrip=True, normalized=False)
    kinds = {
        "gpt2": byte_level(added=(left,)),
        "llama3": with_ends(byte_level(LLAMA3)),
        "qwen": byte_level(LLAMA3.replace("{1,3}", ""), normalizer=normalizers.NFC(), added=(longer,)),
        "o200k": byte_level(O200K, added=tuple(AddedToken("\n" * n, normalized=False) for n in (2, 3))),
        "deepseek": byte_level(*DEEPSEEK),
        "a token with a space": byte_level(LLAMA3, added=(spaced,)),
        "a token that eats spaces": byte_level(LLAMA3, added=(eats,)),
        "words": words(),
    }
    return {kind: PromptProcessor(bundle_of(tokenizer)) for kind, tokenizer in kinds.items()}


BY_WORDS = {"gpt2", "llama3", "qwen", "o200k", "deepseek", "words"}
KINDS = [*sorted(BY_WORDS), "a token with a space", "a token that eats spaces"]


def bundle_of(tokenizer: Tokenizer) -> PromptBundle:
    return PromptBundle(
        served_names=("m",), tokenizer=tokenizer.to_str(), special_tokens={}, block_size=4, hash_seed="s", max_model_len=10_000,
        chat_template="{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
    )  # fmt: skip


def compiled() -> Compiled:
    found = installed()
    assert found is not None
    return found


def held(memo: PrefixMemo) -> int:
    """Bytes of what is remembered of prompts."""
    texts = memo._texts if isinstance(memo, CompiledMemo) else None
    return memo.bytes + (texts.held if texts is not None else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_made_of_remembered_words_have_their_tokens_and_hashes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 30)
    processor = processors_by_kind()[kind]
    assert Cutter(processor.bundle.tokenizer).by_words == (kind in BY_WORDS)
    hasher, memo = BlockHasher(4, "s"), CompiledMemo(processor, compiled(), max_bytes=5_000)

    @settings(max_examples=60)
    @given(texts, texts, st.booleans(), st.sampled_from(["", "t"]))
    def check(text: str, more: str, special: bool, tenant: str) -> None:
        extra = ExtraKeys(tenant=tenant, lora=tenant or None)
        for prompt in (text, text + more, more + " " + text):
            body = {"prompt": prompt, "add_special_tokens": special}
            ids = processor.encode(prompt, special)
            if ids:
                [hashed] = memo.hashed(COMPLETIONS_PATH, body, extra)
                assert (hashed.tokens, list(hashed.block_hashes)) == (len(ids), hasher.hash(ids, extra))

    check()


def test_a_text_of_one_piece_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 30)
    for kind, kept in (("llama3", False), ("a token with a space", True)):
        processor = processors_by_kind()[kind]
        memo, plain = CompiledMemo(processor, compiled()), PrefixMemo(processor)
        for prompt in ("the river, the mill, the river", "the river"):
            body = {"prompt": prompt}
            assert memo.hashed(COMPLETIONS_PATH, body, ExtraKeys()) == plain.hashed(COMPLETIONS_PATH, body, ExtraKeys())
        assert bool(held(memo)) == kept
        memo.hashed(COMPLETIONS_PATH, {"prompt": "the river, " * 4}, ExtraKeys())
        assert held(memo)


def test_words_that_no_merges_tell_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, asked = processors_by_kind()["llama3"], list[list[str]]()
    encode = processor.encode_pieces

    def counted(pieces: list[str], *more: Any) -> list[list[int]]:
        asked.append(pieces)
        return encode(pieces, *more)

    monkeypatch.setattr(processor, "encode_pieces", counted)
    memo = CompiledMemo(processor, compiled())
    for prompt in ("the river, n\u0303, the \U0001f642", "the \U0001f642 \x80, the river", "\x80, the river\x80"):
        memo.hashed(COMPLETIONS_PATH, {"prompt": prompt}, ExtraKeys())
    assert asked == [[" n\u0303,", " \U0001f642"], [" \U0001f642 \x80,"], ["\x80,", " river\x80"]]
    body = {"messages": [{"role": "user", "content": "the mill " * 3}]}
    [chat] = memo.hashed(CHAT_PATH, body, ExtraKeys())
    assert asked[3:] == [["<|end|>"]]
    assert [chat] == PrefixMemo(processor).hashed(CHAT_PATH, body, ExtraKeys())
    memo.hashed(CHAT_PATH, {"messages": [{"role": "user", "content": "the mill"}]}, ExtraKeys())
    assert len(asked) == 5  # one more: of the memo without words


def test_half_of_a_pair_is_refused_in_the_same_words() -> None:
    processor = processors_by_kind()["qwen"]
    for memo in (PrefixMemo(processor), CompiledMemo(processor, compiled())):
        for _ in range(2):
            with pytest.raises(PromptError, match="prompt is not valid Unicode"):
                memo.hashed(COMPLETIONS_PATH, {"prompt": "the river \udfff turns"}, ExtraKeys())
        assert held(memo) == 0


def test_what_does_not_answer_each_text_is_an_error() -> None:
    make = partial(compiled().TextHasher, root=bytes(32), apart=[], merges=None, key=bytes(16), most_bytes=1_000)
    hasher = make(block_size=4, piece=2_048)
    with pytest.raises(ValueError, match="encode has not answered"):
        hasher.text("a b", lambda _: [], None, b"", b"", [], [])
    assert hasher.text("", lambda _: [], None, b"", b"", [1], [2])[0] == 2
    for block_size, piece in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="a block has no tokens, or a piece no bytes"):
            make(block_size=block_size, piece=piece)
    with pytest.raises(OverflowError):
        hasher.text("a", lambda _: [[-1]], None, b"", b"", [], [])


TEMPLATES = {
    "copies": "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}{{ 'x' if add_generation_prompt }}",
    "trims": "{% for m in messages %}{{ m['role'] }}{{ m['content'] | trim }} {{ '|' if loop.last }}{% endfor %}{{ tools }}",
    "joins": "{% for m in messages %}{% if m.content %}{{ m.role + ': ' + m.content }}{% endif %}{% endfor %}",
    "looks": "{% for m in messages %}{{ 'yes' if 'river' in m.content else m.content }}{% endfor %}",
    "refuses": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}{{ m.content.strip() }}{% endfor %}",
}
COPIED = TEMPLATES.keys() - {"looks"}
contents: st.SearchStrategy[Any] = texts | st.sampled_from(
    ["", "\udfff", "the river, " * 20, None, 7, [{"type": "text", "text": "x"}]]
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot"]), "content": contents},
    optional={"name": st.sampled_from(["n", 1]), "tool_calls": st.sampled_from([[], None]), "x": st.just(1)},
)
plain = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts})
fields = st.dictionaries(
    st.sampled_from([*sorted(CHANGES_CHATS), "max_tokens", "temperature"]),
    st.sampled_from([None, True, False, 1, "x", [], {}, [{"type": "function", "function": {"name": "f"}}]]),
    max_size=2,
)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_chats_have_the_hashes_and_the_errors_that_python_has(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 30)
    of = msgspec.structs.replace(processors_by_kind()["llama3"].bundle, chat_template=TEMPLATES[template], max_model_len=400)
    memos = [CompiledMemo(PromptProcessor(of), compiled(), max_bytes=20_000), PrefixMemo(PromptProcessor(of))]

    def outcome(memo: PrefixMemo, body: Any, extra: ExtraKeys) -> Any:
        try:
            return [(it.tokens, list(it.block_hashes), it.images) for it in memo.hashed(CHAT_PATH, body, extra)]
        except PromptError as error:
            return str(error), error.param, error.code

    @settings(max_examples=200)
    @given(
        st.lists(plain, max_size=4) | st.lists(messages, max_size=4) | st.none() | st.just("x"),
        fields,
        st.sampled_from(["", "t"]),
    )
    def check(given: Any, more: dict[str, Any], tenant: str) -> None:
        body, extra = {"messages": given, **more}, ExtraKeys(tenant=tenant, lora=tenant or None)
        assert outcome(memos[0], body, extra) == outcome(memos[1], body, extra)

    check()


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_usual_chat_is_read_without_python(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = msgspec.structs.replace(processors_by_kind()["llama3"].bundle, chat_template=TEMPLATES[template])
    memo, shapes = CompiledMemo(PromptProcessor(of), compiled()), list[Any]()
    skeleton = memo.processor.skeleton
    monkeypatch.setattr(memo.processor, "skeleton", lambda shape: shapes.append(shape) or skeleton(shape))
    monkeypatch.setattr(memo.processor, "render_chat", lambda body: "rendered")
    expected = len(memo.processor.encode("rendered", False))
    for content in ("the river, the mill", "7 wheels"):
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        [hashed] = memo.hashed(CHAT_PATH, body, ExtraKeys())
        assert (hashed.tokens == expected) == (template not in COPIED)
    assert shapes == [[("user", False)]]


def test_a_usual_chat_takes_twelve_calls_of_python_from_its_body_to_its_hashes() -> None:
    memo, calls = CompiledMemo(processors_by_kind()["llama3"], compiled()), list[str]()
    raw = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "the river, the mill"}]}'

    def hashed() -> tuple[Prompt, ...]:
        body = parse_body(raw)
        return exact(memo, CHAT_PATH, body.fields, extra_keys(body.fields, "t", None))

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    first = hashed()
    former = sys.getprofile()
    sys.setprofile(called)
    try:
        again = hashed()
    finally:
        sys.setprofile(former)
    assert again == first
    assert len(calls[1:]) <= 12, calls  # the first is this one's own


def test_a_chat_of_new_words_is_not_read_where_little_may_be() -> None:
    memo = CompiledMemo(processors_by_kind()["llama3"], compiled())
    body = {"messages": [{"role": "user", "content": " ".join(f"wheel{n}" for n in range(50))}]}
    with pytest.raises(Unremembered):
        memo.hashed(CHAT_PATH, body, ExtraKeys(), most=100)
    [hashed] = memo.hashed(CHAT_PATH, body, ExtraKeys())
    assert memo.hashed(CHAT_PATH, body, ExtraKeys(), most=0) == [hashed]


def test_pieces_are_named_by_a_key_of_each_memos_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list[bytes]()
    hasher = compiled().TextHasher
    made = SimpleNamespace(chain=compiled().chain, TextHasher=lambda *given: keys.append(given[4]) or hasher(*given))
    for _ in range(2):
        CompiledMemo(processors_by_kind()["llama3"], cast(Compiled, made))
    assert [len(key) for key in keys] == [16, 16]
    assert keys[0] != keys[1]
