"""Tokenizers whose words can be read without them: byte-level BPE, of which pattern, vocabulary and merges say all."""

import unicodedata
from typing import Any, Final, NamedTuple

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""By which the pre-tokenizer `ByteLevel` cuts."""


class Merges(NamedTuple):
    """A byte-level BPE."""

    patterns: list[str]
    """Of the pre-tokenizer's steps, each of which cuts what the one before it has left."""
    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    """By rank."""
    whole: bool
    """Whether a word that is in the vocabulary is one token, whatever its merges."""
    added: list[str]
    """Added tokens: what holds one of them is for the tokenizer to read."""


def merges_of(tokenizer: str) -> Merges | None:
    """What a tokenizer's words are read by, where it is one whose texts `penstock.prompt.cuts.Cutter.by_words` cuts.

    Args:
        tokenizer: The text of tokenizer.json.
    """
    spec = msgspec.json.decode(tokenizer)
    model, patterns = spec.get("model") or {}, _patterns(spec.get("pre_tokenizer") or {})
    if patterns is None or model.get("type") != "BPE":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    if not set(ByteLevel.alphabet()) <= vocabulary.keys():
        return None
    pairs = [(left, right) for left, right in (m.split(" ") if isinstance(m, str) else m for m in model["merges"])]
    names = {token["content"] for token in spec.get("added_tokens") or []}
    added = names | {unicodedata.normalize("NFC", name) for name in names}
    return Merges(patterns, vocabulary, pairs, bool(model.get("ignore_merges")), sorted(added - {""}))


def _patterns(before: dict[str, Any]) -> list[str] | None:
    """None where a step cuts otherwise than by a pattern, or none makes letters of bytes."""
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    patterns = [_pattern(step) for step in steps]
    return None if None in patterns else [pattern for pattern in patterns if pattern]


def _pattern(step: dict[str, Any]) -> str | None:
    """Empty where a step does not cut."""
    match step:
        case {"type": "ByteLevel"}:
            return GPT2 if step.get("use_regex", True) else ""
        case {"type": "Digits"}:
            return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
        case _:
            return None
