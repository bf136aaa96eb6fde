"""Grammars by llguidance, which is imported with the first one."""

import itertools
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.guidance_batch import GuidanceBatcher
from penstock.engine.core.grammar.libraries import MAX_SPACES, GrammarError, GrammarsUnavailable, Prototype, without
from penstock.engine.core.grammar.schema_errors import MAX_OPTIONAL, LargeChoice, beyond_limits, large_choices, located
from penstock.engine.core.grammar.tags import lark_of, with_options
from penstock.engine.core.plan import Int32
from penstock.engine.grammar import Grammar, Tags

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_ITEMS = 8 * MAX_OPTIONAL
"""What may come next at a place, as the library counts it: four for each optional property of an object. Its own limit would end
an answer at the first key of an object with 500 of them."""
WHITESPACE = rf"[ \t\r\n]{{0,{MAX_SPACES}}}"


class GuidanceMatcher:
    """A `Matcher` of llguidance. Copies share what is worked out as they go on.

    Args:
        matcher: The library's, for this object alone.
        num_words: Words of its mask.
    """

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        self.inner = matcher
        """The library's."""
        self.num_words = num_words
        self.consume, self.compute = matcher.consume_token, matcher.unsafe_compute_mask_ptr
        self.stopped = matcher.is_stopped
        self.forced = matcher.compute_ff_tokens
        self._mask = np.empty(num_words, np.int32)
        # To ask numpy for it takes longer than most masks.
        self._mask_at = self._mask.ctypes.data, self._mask.nbytes
        self._num_tried = 0

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on; None: it can."""
        if not self.inner.is_error():
            return None
        return self.inner.get_error().partition("\n<")[0].strip()  # its state follows, or a word that there is none

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self.stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self.inner.is_accepting()

    def copy(self) -> "GuidanceMatcher":
        """A matcher in the same state, which goes on by itself."""
        return GuidanceMatcher(self.inner.deep_copy(), self.num_words)

    def accept(self, token_id: int) -> bool:
        """Takes the next token, if the grammar allows it."""
        self._num_tried = 0
        return self.consume(token_id)

    def try_accept(self, token_id: int) -> bool:
        """Takes a token, or changes nothing."""
        taken = self.inner.try_consume_tokens([token_id]) == 1
        self._num_tried += taken
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens; raises what `Matcher.rollback` says."""
        self._num_tried = without(num_tokens, self._num_tried)
        self.inner.rollback(num_tokens)

    def mask(self) -> Int32:
        """The mask of the next token, [words], valid until the next call."""
        self.compute(*self._mask_at)
        return self._mask


class Guidance:
    """llguidance as a `Library`.

    Args:
        model: Its tokenizer, stop tokens and number of logits count.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._eos_token_ids = model.eos_token_ids
        self._vocab_size = model.vocab_size
        self._file: Path = (model.tokenizer or model.path) / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._batcher: GuidanceBatcher | None = None

    def prepare(self) -> None:
        """Imports the library and reads the tokenizer."""
        self._load()

    def compile(self, grammar: Grammar) -> Prototype:
        """Compiles a grammar; raises what `Library.compile` says."""
        tokenizer = self._load()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)
        definition = _definition(grammar, tokenizer)
        for choice in itertools.chain.from_iterable(map(large_choices, _schemas(grammar))):
            _check_choice(choice, LLMatcher(tokenizer, _json(choice.schema, grammar), log_level=0, limits=limits), tokenizer)
        compiled = LLMatcher(tokenizer, definition, log_level=0, limits=limits)
        words = -(-tokenizer.vocab_size // 32)
        matcher = GuidanceMatcher(compiled, words)
        if (error := matcher.error) is None:
            # Some errors show with the first mask; and it is the slowest.
            first = matcher.copy()
            first.mask()
            error = first.error
        if error is not None:
            raise GrammarError(located(error, json.loads(grammar.text)) if grammar.kind == "json_schema" else error)
        of_model = words if self._vocab_size is None else -(-self._vocab_size // 32)
        return Prototype(matcher, of_model, compiled.get_grammar_warnings(), self._batcher)

    def close(self) -> None:
        """Has nothing to end: all of it is in this process."""

    def _load(self) -> "LLTokenizer":
        with self._lock:
            if self._tokenizer is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError as error:
                    message = f"grammars need llguidance, which cannot be imported ({error}): install penstock[engine]"
                    raise GrammarsUnavailable(message) from error
                eos = list(self._eos_token_ids) or None
                try:
                    known = LLTokenizer(str(self._file), eos_token=eos)
                except ValueError as error:
                    raise GrammarsUnavailable(f"llguidance cannot use {self._file}: {error}") from error
                # A model may have more logits than its tokenizer has tokens: none of those beyond is ever allowed.
                larger = self._vocab_size is not None and self._vocab_size > known.vocab_size
                self._tokenizer = LLTokenizer(str(self._file), self._vocab_size, eos) if larger else known
                self._batcher = GuidanceBatcher(self._eos_token_ids)
            return self._tokenizer


def _definition(grammar: Grammar, tokenizer: "LLTokenizer") -> str:
    """Return the grammar in llguidance's form."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json_schema":
                (schema,) = _schemas(grammar)
                _check_limits(schema)
                return _json(schema, grammar)
            case "choice":
                words = [json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text)]
                return LLMatcher.grammar_from_lark("start: " + " | ".join(words))
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "tags":
                _check_limits(*_schemas(grammar))
                tags = msgspec.json.decode(grammar.text, type=Tags)
                return LLMatcher.grammar_from_lark(lark_of(tags, tokenizer, _options(grammar)))
            case "ebnf" | "lark":
                return grammar_from(grammar.kind, grammar.text)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _json(schema: Any, grammar: Grammar) -> str:
    """A schema in llguidance's form, with the grammar's options."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema, _options(grammar))))


def _schemas(grammar: Grammar) -> list[Any]:
    """The JSON schemas in a grammar."""
    match grammar.kind:
        case "json_schema":
            return [msgspec.json.decode(grammar.text)]
        case "tags":
            tags = msgspec.json.decode(grammar.text, type=Tags)
            return [*(tag.schema for tag in tags.tags), *tags.answer]
        case _:
            return []


def _check_choice(choice: LargeChoice, matcher: "LLMatcher", tokenizer: "LLTokenizer") -> None:
    """Raises GrammarError where an object of the choice cannot begin: an answer would only find out when it comes there."""
    if not matcher.is_error() and matcher.consume_tokens(tokenizer.tokenize_str("{")):
        matcher.compute_bitmask()
    if _is_too_large(GuidanceMatcher(matcher, 0).error):
        keyword = choice.path.rpartition(".")[2]
        raise GrammarError(
            f"{keyword} has objects with {choice.optional} properties that are not required between them, any of which may be "
            f"next, and about {2 * MAX_OPTIONAL} can be, at {choice.path}"
        )


def _is_too_large(error: str | None) -> bool:
    return error is not None and "items" in error


def _check_limits(*schemas: Any) -> None:
    """Raises GrammarError for an object that only an answer would find to be too large."""
    for schema in schemas:
        if (beyond := beyond_limits(schema)) is not None:
            raise GrammarError(beyond)


def _options(grammar: Grammar) -> dict[str, Any]:
    """How JSON is written and how far a schema is enforced, where the schema itself says nothing."""
    # Alternatives that exclude each other are told apart by no grammar: it takes any of them.
    options: dict[str, Any] = {"coerce_one_of": True, "lenient": grammar.lenient, "json_allow_general_unicode_escapes": True}
    if grammar.any_whitespace:
        return options | {"whitespace_pattern": grammar.whitespace_pattern or WHITESPACE}
    return options | {"whitespace_flexible": False}
