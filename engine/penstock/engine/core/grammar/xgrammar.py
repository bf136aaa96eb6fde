"""Grammars by xgrammar, which is imported with the first one.

xgrammar has no limits on the time that a grammar takes to compile. So a process compiles each grammar first, and is killed after
`COMPILE_S`; what it has compiled in time, this one compiles too.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.guidance import Guidance
from penstock.engine.core.grammar.libraries import MAX_SPACES, GrammarError, GrammarsUnavailable, Prototype, without
from penstock.engine.core.grammar.xgrammar_limits import beyond_xgrammar
from penstock.engine.core.grammar.xgrammar_process import CompileProcess, Work, compile_with
from penstock.engine.core.grammar.xgrammar_tags import structural_tag
from penstock.engine.core.plan import Int32
from penstock.engine.grammar import Grammar, Tags

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

COMPILE_S = 10.0
"""Seconds after which a compilation is given up."""


class XgrammarMatcher:
    """A `Matcher` of xgrammar.

    Args:
        matcher: The library's, for this object alone.
        tokenizer: Writes forced text as tokens.
        stops: [words]: the mask of EOS tokens.
    """

    def __init__(self, matcher: "GrammarMatcher", tokenizer: Tokenizer, stops: Int32) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._stops = stops
        self._mask = np.empty_like(stops)
        self._stopped: bool | None = None
        self._num_tried = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is complete and nothing can follow: its mask has EOS tokens alone."""
        if self._stopped is None:
            self._stopped = self._matcher.is_terminated() or (self._matcher.is_completed() and self._only_stops())
        return self._stopped

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_terminated() or self._matcher.is_completed()

    def copy(self) -> "XgrammarMatcher":
        """A matcher in the same state, which goes on by itself."""
        return XgrammarMatcher(self._matcher.fork(), self._tokenizer, self._stops)

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, without the last one: with what follows, its text may be part of a longer token."""
        if self._matcher.is_terminated() or not (text := self._matcher.find_jump_forward_string()):
            return ()
        taken: list[int] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids[:-1]:
            if not self._matcher.accept_token(token):
                break
            taken.append(token)
        if taken:
            self._matcher.rollback(len(taken))
        return taken

    def accept(self, token_id: int) -> bool:
        """Takes the next token, if the grammar allows it."""
        if not self.try_accept(token_id):
            self.error = self.error or "no rule of the grammar goes on with it"
            return False
        self._num_tried = 0
        return True

    def try_accept(self, token_id: int) -> bool:
        """Takes a token, or changes nothing."""
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            return False
        self._stopped = None
        self._num_tried += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens; raises what `Matcher.rollback` says."""
        self._num_tried = without(num_tokens, self._num_tried)
        self._matcher.rollback(num_tokens)
        self._stopped = None

    def mask(self) -> Int32:
        """The mask of the next token, [words], valid until the next call."""
        if self._matcher.is_terminated():
            return self._stops
        self._mask[:] = -1
        self._matcher.fill_next_token_bitmask(self._mask.reshape(1, -1))
        if not self._mask.any():
            self.error = "no token can follow"
        return self._mask

    def _only_stops(self) -> bool:
        return not (self.mask() & ~self._stops).any()


class Xgrammar:
    """xgrammar as a `Library`.

    Args:
        model: Its tokenizer, stop tokens and number of logits count.
        guidance: Says which schemas cannot be enforced: xgrammar leaves out what it does not know.
    """

    def __init__(self, model: ModelConfig, guidance: Guidance) -> None:
        self._eos_token_ids = model.eos_token_ids
        self._vocab_size = model.vocab_size
        self._file: Path = (model.tokenizer or model.path) / "tokenizer.json"
        self._guidance = guidance
        self._lock = threading.Lock()
        self._loaded: tuple[Tokenizer, TokenizerInfo, GrammarCompiler] | None = None
        self._process: CompileProcess | None = None

    def prepare(self) -> None:
        """Imports the library, which takes seconds, and reads the tokenizer."""
        with self._lock:
            self._load()

    def compile(self, grammar: Grammar) -> Prototype:
        """Compiles a grammar; raises what `Library.compile` says."""
        if grammar.whitespace_pattern is not None:
            raise GrammarError("xgrammar takes no whitespace_pattern: it needs the backend guidance")
        if grammar.kind in ("json_schema", "tags") and not grammar.lenient:
            self._check(grammar)
        with self._lock:
            tokenizer, info, compiler = self._load()
            work = _work(grammar, tokenizer, info.stop_token_ids)
            if self._process is None:
                self._process = CompileProcess(info.serialize_json())
            self._process.check(work, COMPILE_S)
            compiled = compile_with(compiler, work)
        from xgrammar import GrammarMatcher

        words = -(-info.vocab_size // 32)
        stops = np.zeros(words * 32, np.uint8)
        stops[info.stop_token_ids] = 1
        matcher = XgrammarMatcher(GrammarMatcher(compiled), tokenizer, np.packbits(stops, bitorder="little").view(np.int32))
        first = matcher.copy()
        first.mask()
        if first.error is not None:
            raise GrammarError(f"the grammar has no answer: {first.error}")
        of_model = words if self._vocab_size is None else -(-self._vocab_size // 32)
        return Prototype(matcher, of_model, [])

    def close(self) -> None:
        """Ends the process that compiles."""
        if self._process is not None:
            self._process.close()

    def _check(self, grammar: Grammar) -> None:
        """Refuses schemas with keywords that xgrammar would leave out."""
        self._guidance.compile(msgspec.structs.replace(grammar, backend="guidance"))
        schemas = [json.loads(grammar.text)] if grammar.kind == "json_schema" else _schemas(grammar.text)
        for schema in schemas:
            if (found := beyond_xgrammar(schema)) is not None:
                raise GrammarError(f"xgrammar does not enforce {found}: it needs the backend guidance")

    def _load(self) -> "tuple[Tokenizer, TokenizerInfo, GrammarCompiler]":
        if self._loaded is None:
            try:
                from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
            except ImportError as error:
                message = f"the backend xgrammar cannot be imported ({error}): install penstock[xgrammar]"
                raise GrammarsUnavailable(message) from error
            tokenizer = Tokenizer.from_file(str(self._file))
            metadata: Any = TokenizerInfo._detect_metadata_from_hf(self._file.read_text())  # pyright: ignore[reportPrivateUsage]
            kind = metadata["vocab_type"]
            words = _words(tokenizer, {VocabType.BYTE_LEVEL: "ÿ".encode(), VocabType.BYTE_FALLBACK: b"<0xFF>"}.get(kind, b"\xff"))
            info = TokenizerInfo(
                words,
                kind,
                vocab_size=max(len(words), self._vocab_size or 0),
                stop_token_ids=list(self._eos_token_ids) or None,
                add_prefix_space=metadata["add_prefix_space"],
            )
            self._loaded = tokenizer, info, GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._loaded


def _words(tokenizer: Tokenizer, no_text: bytes) -> list[bytes]:
    """The vocabulary by number. Special tokens are `no_text`, a byte that UTF-8 does not have: as their own words they would be
    text like any other, and as empty ones no grammar could name them."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    words = [b""] * (max(vocabulary.values()) + 1)
    for word, at in vocabulary.items():
        words[at] = word.encode()
    for at, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            words[at] = no_text
    return words


def _work(grammar: Grammar, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Work:
    """What the process is to compile."""
    match grammar.kind:
        case "json_schema":
            return Work("json_schema", grammar.text, _options(grammar))
        case "choice":
            words = [json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text)]
            return Work("grammar", "root ::= " + " | ".join(words))
        case "ebnf":
            return Work("grammar", grammar.text)
        case "regex" | "lark":
            return Work(grammar.kind, grammar.text)
        case "tags":
            tags = msgspec.json.decode(grammar.text, type=Tags)
            return Work("structural_tag", structural_tag(tags, tokenizer, eos_token_ids))


def _options(grammar: Grammar) -> dict[str, Any]:
    """How JSON is written."""
    if grammar.any_whitespace:
        return {"any_whitespace": True, "max_whitespace_cnt": MAX_SPACES, "strict_mode": False}
    return {"any_whitespace": False, "separators": (",", ":"), "strict_mode": False}


def _schemas(text: str) -> list[Any]:
    tags = msgspec.json.decode(text, type=Tags)
    return [*(tag.schema for tag in tags.tags), *tags.answer]
