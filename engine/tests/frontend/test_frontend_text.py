"""From token ids to text: incremental decode, single tokens, stop strings."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.stop import StopBuffer
from penstock.engine.frontend.vocabulary import Vocabulary

TEXTS = ["the mill", "naïve café", "水車 turns 🌊🌊", "👩‍👩‍👧 family", " leading and  double ", "e\u0301", "\n\n\t"]
same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer), prompt or [])
    return [*(detokenizer.step(token) for token in ids), detokenizer.flush()]


@pytest.mark.req("EG-01")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_add_up(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.req("EG-01")
def test_an_emoji_of_four_tokens_comes_with_the_last(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(character) for character in byte_characters(byte_level, "🎻")]
    assert stream(byte_level, ids) == ["", "", "", "🎻", ""]


def byte_characters(tokenizer: Tokenizer, text: str) -> list[str]:
    """The byte-level stand-ins of a text."""
    [(characters, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert len(characters) == len(text.encode())
    return list(characters)


@pytest.mark.req("EG-03")
@same_fixture
@given(ids=st.lists(st.integers(0, 700), max_size=150))
def test_any_ids_at_all_are_survived_and_add_up(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)


@pytest.mark.req("EG-01")
@same_fixture
@given(parts=st.lists(st.integers(0, 263) | st.sampled_from("é水🎻"), max_size=60))
def test_byte_fallback_of_any_ids_adds_up(byte_fallback: Tokenizer, parts: list[int | str]) -> None:
    """Text that can be decoded comes as it is. In other text the tokenizer also replaces the good bytes beside a bad one."""
    first = byte_fallback.token_to_id("<0x00>")
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else [first + byte for byte in part.encode()])]
    whole, told = byte_fallback.decode(ids), "".join(stream(byte_fallback, ids))
    assert told == whole if "\ufffd" not in whole else "\ufffd" in told


def test_a_character_that_never_ends_is_shown_as_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the 🎻").ids[:-1]
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)
    assert "".join(stream(byte_level, ids)).endswith("\ufffd")


def test_bytes_that_are_no_character_do_not_wait_for_ever(byte_level: Tokenizer) -> None:
    bad = byte_level.token_to_id(byte_characters(byte_level, "🎻")[1])
    pieces = stream(byte_level, [bad] * 200)
    assert any(pieces[:100])
    assert "".join(pieces) == "\ufffd" * 200


def test_the_prompt_decides_about_the_first_space(byte_fallback: Tokenizer) -> None:
    the = byte_fallback.token_to_id("▁the")
    assert "".join(stream(byte_fallback, [the, the])) == "the the"
    assert "".join(stream(byte_fallback, [the, the], prompt=[the])) == " the the"


@pytest.mark.req("EG-04")
def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|end|> mill<s>").ids
    assert "".join(stream(byte_level, ids)) == "the mill"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_single_tokens_are_the_bytes_of_the_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    vocabulary = Vocabulary(tokenizer)
    joined = b"".join(vocabulary.bytes_of(token) for token in tokenizer.encode(text).ids)
    assert joined.decode().removeprefix(" " if kind == "byte_fallback" else "") == tokenizer.decode(tokenizer.encode(text).ids)


def test_tokens_that_are_special_or_unknown(byte_level: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level)
    assert vocabulary.bytes_of(byte_level.token_to_id("<|end|>")) == b"<|end|>"
    assert vocabulary.bytes_of(10**6) == b""


def test_the_text_of_a_whole_token_is_known_alone(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level)
    [the, *_] = byte_level.encode("the").ids
    part = byte_level.token_to_id(byte_characters(byte_level, "🎻")[0])
    texts = [vocabulary.whole_text(token) for token in (the, part, byte_level.token_to_id("<|end|>"), 10**6)]
    assert texts == [byte_level.decode([the]), "", "", ""]
    # Its space depends on what stands before it.
    assert Vocabulary(byte_fallback).whole_text(byte_fallback.token_to_id("▁the")) == ""


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    buffer, shown = StopBuffer(stops), ""
    for piece in pieces:
        text, stop = buffer.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + buffer.flush(), None


@pytest.mark.req("EG-05", "EG-07", "EG-08")
@pytest.mark.parametrize("first", range(11))
@pytest.mark.parametrize("second", range(11))
def test_a_stop_string_is_found_at_every_split(first: int, second: int) -> None:
    text = "the END of"
    cuts = [0, *sorted((first, second)), len(text)]
    assert run(["END"], [text[a:b] for a, b in pairwise(cuts)]) == ("the ", "END")


@pytest.mark.req("EG-05")
def test_no_part_of_a_stop_string_leaks() -> None:
    buffer = StopBuffer(["END"])
    assert "".join(buffer.feed(character)[0] for character in "the EN") == "the "


@pytest.mark.req("EG-06")
def test_the_held_tail_is_released_at_the_end() -> None:
    assert run(["END"], ["the ", "EN"]) == ("the EN", None)
    assert run(["END"], ["E"]) == ("E", None)
    assert run([], ["E", "ND"]) == ("END", None)


@pytest.mark.req("EG-07")
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 29)),
)
def test_the_result_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: set[int]) -> None:
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = run(stops, [text])
    assert run(stops, [text[a:b] for a, b in pairwise(borders)]) == whole
    if whole[1] is None:
        assert whole[0] == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(whole[0] + whole[1]) and not any(stop in whole[0] for stop in stops)


@given(
    before=st.text("abc", max_size=12),
    after=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.integers(0, 12),
)
def test_a_stop_string_counts_by_where_it_ends(before: str, after: str, stops: list[str], cut: int) -> None:
    """Against a search of the whole text."""
    text, buffer = before + after, StopBuffer(stops)
    shown = "".join(buffer.feed(piece, search=False)[0] for piece in (before[:cut], before[cut:]))
    more, stop = buffer.feed(after)
    ends = [
        (at + len(it), at, it)
        for it in stops
        for at in range(len(text))
        if text.startswith(it, at) and at + len(it) > len(before)
    ]
    _, start, expected = min(ends, default=(0, len(text), None))
    assert stop == expected
    assert shown + more + buffer.flush() == text[:start]
