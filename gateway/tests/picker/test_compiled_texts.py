"""Texts hashed by the compiled parts, from what they remember of words, against the tokenizer and Python's hashes."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.picker.compiled import MODULE, Compiled, installed
from penstock.prompt import cuts
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.cuts import Cutter
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, PromptProcessor

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
        assert bool(memo.bytes) == kept
        memo.hashed(COMPLETIONS_PATH, {"prompt": "the river, " * 4}, ExtraKeys())
        assert memo.bytes


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
        assert memo.bytes == 0


def test_what_does_not_answer_each_text_is_an_error() -> None:
    hasher = compiled().TextHasher(4, [], None)
    for by_words in (True, False):
        with pytest.raises(ValueError, match="encode has not answered"):
            hasher.hashed(["a b", "c"], lambda _: [], by_words, None, [], [], b"", [], b"", b"")
    assert hasher.hashed([], lambda _: [], True, None, [1], [2], b"", [], b"", b"") == []
    with pytest.raises(ValueError, match="a block has no tokens"):
        compiled().TextHasher(0, [], None)
    with pytest.raises(OverflowError):
        hasher.hashed(["a"], lambda _: [[-1]], True, None, [], [], b"", [], b"", b"")
