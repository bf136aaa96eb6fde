"""Words read by their merges, against the tokenizer."""

import json
import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picker.test_compiled_texts import DEEPSEEK, LLAMA3, O200K, byte_level, compiled
from tokenizers import Tokenizer

from benchmarks.gatewaybench.texts import checkpoint
from penstock.gateway.load.merges import Merges, merges_of
from penstock.gateway.picker.compiled import MODULE, TextHasher
from penstock.prompt import cuts
from penstock.prompt.cuts import Cutter

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
READ_RANGES = ("\0\x7f", "ÀÖ", "Øö", "øÿ", "Ая", "ぁゖ", "ァヺ", "一七", "鿋鿌", "가각", "힢힣", "–—", "‘’", "“”", "……", "、。")
READ = "".join(chr(number) for first, last in READ_RANGES for number in range(ord(first), ord(last) + 1))
"""What is read: of the long ranges their ends."""
BLOCK_TOKENS = 1
ROOT = bytes(32)
REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|\s+"


def changed(tokenizer: Tokenizer, **model: Any) -> str:
    spec = json.loads(tokenizer.to_str())
    return json.dumps(spec | {"model": spec["model"] | model})


def whole() -> str:
    """A vocabulary like Llama 3's, whose words need not come of merges."""
    spec = json.loads(byte_level(LLAMA3).to_str())
    vocabulary = spec["model"]["vocab"]
    more = ["Ġriver,", "Ġmill", "Ġwheel", "Ã©tat", "xyzzy", "ĠĠĠ"]
    spec["model"] |= {"vocab": vocabulary | {text: 1_000 + at for at, text in enumerate(more)}, "ignore_merges": True}
    return json.dumps(spec)


KINDS = {
    "gpt2": lambda: byte_level().to_str(),
    "llama3": lambda: byte_level(LLAMA3).to_str(),
    "whole words": whole,
    "qwen": lambda: byte_level(LLAMA3.replace("{1,3}", "")).to_str(),
    "o200k": lambda: byte_level(O200K).to_str(),
    "deepseek": lambda: byte_level(*DEEPSEEK).to_str(),
    "penstock": lambda: checkpoint().tokenizer,
    **{f"with {one}": lambda one=one: byte_level(f"{one}|{REST}").to_str() for one in cuts._ALTERNATIVES},
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_words_that_are_read_have_the_tokenizers_tokens(kind: str) -> None:
    text = KINDS[kind]()
    tokenizer, merges = Tokenizer.from_str(text), merges_of(text)
    assert merges is not None
    assert Cutter(text).by_words

    def check(words: str) -> None:
        ids = tokenizer.encode(words, add_special_tokens=False).ids
        count, hashes = hasher(BLOCK_TOKENS, merges).text(words, refuse, None, b"", b"", [], [])  # remembers no word
        expected = compiled().chain(ROOT, array("I", ids), BLOCK_TOKENS, b"", b"")
        assert (count, list(hashes)) == (len(ids), expected), repr(words)

    chance = random.Random(0)
    for char in READ:
        check(f"a{char}b {char}{char} {char}'s\n{char}7{char}\n\n  x  {char}" + "".join(chance.choices(READ, k=8)))
    parts = st.sampled_from([" ", " ", "  ", "\n", "'LL", "the", "river,", " mill", "état", "xyzzy"])
    mixed = st.lists(st.text(READ, max_size=3) | parts, min_size=1, max_size=20).map("".join)
    settings(max_examples=5 if kind.startswith("with") else 40)(given(mixed)(lambda words: check(words) if words else None))()


def hasher(block_size: int, merges: Merges | None) -> TextHasher:
    return compiled().TextHasher(block_size, ROOT, [], merges, bytes(16), 2_048, 0)


def refuse(texts: list[str]) -> list[list[int]]:
    raise AssertionError(f"the tokenizer is asked for {texts}")


def test_what_merges_do_not_tell_is_asked_for() -> None:
    text = byte_level(LLAMA3).to_str()
    asked = list[str]()

    def encode(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[0] for _ in texts]

    texts = hasher(4, merges_of(text))
    texts.text("e\u0301, river x<mask> " + "a" * 257, encode, None, b"", b"", [], [])
    assert asked == ["e\u0301,", " x<mask>", " " + "a" * 257]
    asked.clear()
    texts.text("the mill turns", encode, 13, b"", b"", [], [])
    assert asked == ["the", " mill", " turns"]
    hasher(4, merges_of(text)).text("the mill turns", refuse, 14, b"", b"", [], [])


def test_tokenizers_that_are_no_plain_byte_level_bpe_are_asked() -> None:
    tokenizer = byte_level(LLAMA3)
    assert merges_of(tokenizer.to_str()) is not None
    spec = json.loads(tokenizer.to_str())
    steps = spec["pre_tokenizer"]["pretokenizers"]
    some = {text: at for text, at in spec["model"]["vocab"].items() if text != "!"}
    for other in (
        changed(tokenizer, continuing_subword_prefix="##"),
        changed(tokenizer, end_of_word_suffix="</w>"),
        changed(tokenizer, type="WordPiece"),
        changed(tokenizer, vocab=some),
        json.dumps(spec | {"pre_tokenizer": steps[0]}),
        json.dumps(spec | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, steps[-1]]}}),
        json.dumps(spec | {"pre_tokenizer": None}),
    ):
        assert merges_of(other) is None


def test_merges_are_read_in_both_forms_and_added_tokens_in_their_normal_form() -> None:
    tokenizer = byte_level(LLAMA3)
    merges = merges_of(tokenizer.to_str())
    assert merges is not None
    written = changed(tokenizer, merges=[" ".join(pair) for pair in merges.merges])
    assert merges_of(written) == merges
    tokenizer.add_tokens(["e\u0301"])
    named = merges_of(tokenizer.to_str())
    assert named is not None
    assert {"e\u0301", "é"} < set(named.added)
    spec = json.loads(written)
    for individual, pattern in ((True, r"\p{N}"), (False, r"\p{N}+")):
        digits = {"type": "Digits", "individual_digits": individual}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel", "add_prefix_space": False}]}
        by_digits = merges_of(json.dumps(spec))
        assert by_digits is not None
        assert by_digits.patterns[0] == pattern
        assert len(by_digits.patterns) == 2


def test_merges_without_their_tokens_are_an_error() -> None:
    merges = merges_of(byte_level(LLAMA3).to_str())
    assert merges is not None
    with pytest.raises(ValueError, match="the vocabulary has no token Ā"):
        hasher(4, merges._replace(vocabulary={}, merges=[]))
    with pytest.raises(ValueError, match="arsing error"):
        hasher(4, merges._replace(patterns=["("]))
