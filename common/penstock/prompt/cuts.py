"""Where a text may be cut so that the tokens of the pieces are the tokens of the whole.

Two kinds of places are proven; others are not used.

**Before an added token** (`<|im_start|>`), for every tokenizer of the library: added tokens are found first, leftmost and
longest, and what stands between them goes through normalizer, pre-tokenizer and model by itself. That needs a token that no
longer added token can begin before and run into, that does not reach over spaces to its left, and none that looks at its
neighbours. **After** it as well, where no other added token begins with it, and it does not reach over spaces to its right.

**Between a letter and a space, a line feed or a Chinese full stop or comma**, for byte-level BPE: the pre-tokenizer's patterns
match from left to right without looking back; where every alternative of a pattern ends at such a place once it has taken the
letter, one word ends there and another begins, whatever follows. The alternatives of the patterns in use (GPT-2, GPT-4, o200k,
Llama 3, Qwen, Mistral's Tekken, DeepSeek) are listed below; a pattern with any other is not cut at all. Pre-tokenizers that drop
white space end words there for every model that reads word by word.
"""

import re
from typing import Any, Final

import msgspec

MIN_PIECE: Final = 2048
"""Characters of a piece, at least: about 0.2 ms of tokenising, which is what a cut a little too early costs."""

_LETTER = "A-Za-zа-яА-Яぁ-ゖァ-ヺ一-鿿가-힣"
_AFTER = " \n。，"
_WORD_END = re.compile(f"[{_LETTER}][{_AFTER}]")

_SPACED = re.compile(r"\S ")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_WITH_MARKS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_LETTERS: Final = frozenset(
    (
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *(letters + end for letters in _LETTERS_WITH_MARKS for end in ("", f"{_CONTRACTIONS}?")),
    )
)
"""Alternatives that take every run of letters to its end."""
_SPACES: Final = r"\s+"
_ALTERNATIVES: Final = _LETTERS | {
    _SPACES,
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
    *(r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]"),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", "[一-龥぀-ゟ゠-ヿ]+"),
}
"""None of them takes a letter and then one of `_AFTER`, nor looks beyond its own end but after spaces."""


class Cutter:
    """Cuts texts for one tokenizer.

    Args:
        tokenizer: The text of tokenizer.json.
    """

    def __init__(self, tokenizer: str) -> None:
        spec = msgspec.json.decode(tokenizer)
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        self._words = _cuts_words(spec, added)
        names = _cut_tokens(added)
        self._tokens = re.compile("|".join(map(re.escape, names))) if names else None
        self._longest = max(map(len, names), default=0)
        if not _repeats(spec.get("model") or {}) or any(token.get("single_word") for token in added):
            self._words, self._tokens = False, None
        self.by_words = self._words and not any(_SPACED.search(token["content"]) or token.get("rstrip") for token in added)
        """Whether texts may be cut before every space that follows a visible character of ASCII, too: no alternative takes a
        space after such a one. And on both sides of each of `apart`."""
        self.apart = _apart(names, added)
        """Added tokens, which are that wherever they stand."""

    def pieces(self, text: str) -> list[str]:
        """The pieces of `text`, in order. Where two texts begin alike, so do their pieces, but for the last of the shorter."""
        pieces: list[str] = []
        start = 0
        while len(text) - start > MIN_PIECE and (end := self._cut(text, start + MIN_PIECE)) is not None:
            pieces.append(text[start:end])
            start = end
        pieces.append(text[start:])
        return pieces

    def _cut(self, text: str, at: int) -> int | None:
        """The first place for a cut from `at` on."""
        word = _WORD_END.search(text, at - 1) if self._words else None
        end = word.start() + 1 if word else len(text)
        if self._tokens is not None and (token := self._tokens.search(text, at, end + self._longest)) and token.start() < end:
            return token.start()
        return end if word else None


def _repeats(model: dict[str, Any]) -> bool:
    """Equal texts have equal tokens: BPE with dropout draws lots."""
    return not model.get("dropout")


def _cut_tokens(added: list[dict[str, Any]]) -> list[str]:
    """The added tokens before which a text may be cut, the longest first."""
    raw = [token["content"] for token in added if not token.get("normalized")]
    cut = [t["content"] for t in added if not t.get("normalized") and not t.get("lstrip") and t["content"]]
    return sorted((name for name in cut if not any(_runs_into(other, name) for other in raw)), key=len, reverse=True)


def _apart(names: list[str], added: list[dict[str, Any]]) -> list[str]:
    """Those of `names` after which a text may be cut as well."""
    raw = {token["content"]: bool(token.get("rstrip")) for token in added if not token.get("normalized")}
    return [name for name in names if not raw[name] and not any(other != name and other.startswith(name) for other in raw)]


def _runs_into(other: str, name: str) -> bool:
    """Whether an occurrence of `other` can begin before one of `name` and overlap it."""
    return any(name.startswith(other[at : at + len(name)]) for at in range(1, len(other)))


def _cuts_words(spec: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether words end and begin between a letter and one of `_AFTER`."""
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    if (spec.get("model") or {}).get("type") not in ("BPE", "WordLevel", "WordPiece"):
        return False
    if any(_WORD_END.search(t["content"]) or (t.get("rstrip") and re.search(f"[{_LETTER}]$", t["content"])) for t in added):
        return False
    before = spec.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if any(step.get("type") == "ByteLevel" for step in steps[:-1]):  # what follows sees no spaces
        return False
    # Each step must leave words whole, one of them must end them.
    kinds = [_ends_words(step) for step in steps]
    return None not in kinds and any(kinds)


def _ends_words(step: dict[str, Any]) -> bool | None:
    """Whether a step of the pre-tokenizer ends a word at every cut; None where it is not known to leave those on both sides as
    they are without the other."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return bool(step.get("use_regex", True))
        case {"type": "Digits"}:
            return False
        case {"type": "Whitespace" | "WhitespaceSplit"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            alternatives = _alternatives(pattern)
            if not alternatives <= _ALTERNATIVES:
                return None
            return bool(alternatives & _LETTERS) and _SPACES in alternatives
        case _:
            return None


def _alternatives(pattern: str) -> set[str]:
    """What stands between the `|` of a regular expression that are in no group and no class."""
    found: list[str] = [""]
    depth, in_class, at = 0, False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            found[-1] += pattern[at : at + 2]
            at += 2
            continue
        if char == "|" and not depth and not in_class:
            found.append("")
        else:
            found[-1] += char
            depth += ((char == "(") - (char == ")")) * (not in_class)
            in_class = (in_class or char == "[") and char != "]"
        at += 1
    return set(found)
