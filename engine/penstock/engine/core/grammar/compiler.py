"""From a grammar to a matcher over the model's tokens, by llguidance. It is imported with the first grammar."""

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.schema_errors import located
from penstock.engine.core.grammar.tags import lark_of, with_options
from penstock.engine.grammar import Grammar, Tags

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t\r\n]{0,32}"
"""Between the tokens of JSON, where a request says nothing. Without a bound a model may write space until its limit."""


class GrammarError(ValueError):
    """The grammar cannot be enforced; the message says why."""


class GrammarsUnavailable(RuntimeError):
    """The engine cannot enforce any grammar; the message says why."""


class Prototype(NamedTuple):
    """A compiled grammar in its first state. Requests take copies, which share what is worked out as they go on."""

    matcher: "LLMatcher"
    num_words: int
    """Words of a mask, for all of the model's logits."""
    matcher_words: int
    """Words of a mask as the matcher makes it: more, where the tokenizer has tokens that the model does not know."""
    warnings: list[str]
    """What a lenient grammar leaves out."""


class Compiler:
    """Compiles grammars for one model; safe to call from several threads.

    Args:
        model: Its tokenizer, stop tokens and number of logits count.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.eos_token_ids = model.eos_token_ids
        self._vocab_size = model.vocab_size
        self._file: Path = (model.tokenizer or model.path) / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Prototype:
        """Compiles a grammar.

        Raises:
            GrammarError: It is not well-formed, or asks for what cannot be enforced.
            GrammarsUnavailable: There is no llguidance, or it does not understand the tokenizer.
        """
        tokenizer = self._load()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, _definition(grammar, tokenizer), log_level=0, limits=LLParserLimits(verbose_errors=False))
        words = -(-tokenizer.vocab_size // 32)
        if not matcher.is_error():
            # Some errors show with the first mask; and it is the slowest.
            first = matcher.deep_copy()
            mask = np.empty(words, np.int32)
            first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            error = first.get_error()
        else:
            error = matcher.get_error()
        if error:
            error = error.partition("\n<state>")[0].strip()
            raise GrammarError(located(error, json.loads(grammar.text)) if grammar.kind == "json_schema" else error)
        of_model = words if self._vocab_size is None else -(-self._vocab_size // 32)
        return Prototype(matcher, of_model, words, matcher.get_grammar_warnings())

    def _load(self) -> "LLTokenizer":
        with self._lock:
            if self._tokenizer is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError as error:
                    message = f"grammars need llguidance, which cannot be imported ({error}): install penstock[engine]"
                    raise GrammarsUnavailable(message) from error
                eos = list(self.eos_token_ids) or None
                try:
                    known = LLTokenizer(str(self._file), eos_token=eos)
                except ValueError as error:
                    raise GrammarsUnavailable(f"llguidance cannot use {self._file}: {error}") from error
                # A model may have more logits than its tokenizer has tokens: none of those beyond is ever allowed.
                larger = self._vocab_size is not None and self._vocab_size > known.vocab_size
                self._tokenizer = LLTokenizer(str(self._file), self._vocab_size, eos) if larger else known
            return self._tokenizer


def _definition(grammar: Grammar, tokenizer: "LLTokenizer") -> str:
    """As llguidance takes it."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json_schema":
                schema = json.dumps(with_options(msgspec.json.decode(grammar.text), _options(grammar)))
                return LLMatcher.grammar_from_json_schema(schema)
            case "choice":
                words = [json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text)]
                return LLMatcher.grammar_from_lark("start: " + " | ".join(words))
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "tags":
                tags = msgspec.json.decode(grammar.text, type=Tags)
                return LLMatcher.grammar_from_lark(lark_of(tags, tokenizer, _options(grammar)))
            case "ebnf" | "lark":
                return grammar_from(grammar.kind, grammar.text)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _options(grammar: Grammar) -> dict[str, Any]:
    """How JSON is written and how far a schema is enforced, where the schema itself says nothing."""
    # Alternatives that exclude each other are told apart by no grammar: it takes any of them.
    options: dict[str, Any] = {"coerce_one_of": True, "lenient": grammar.lenient, "json_allow_general_unicode_escapes": True}
    if grammar.any_whitespace:
        return options | {"whitespace_pattern": grammar.whitespace_pattern or WHITESPACE}
    return options | {"whitespace_flexible": False}
