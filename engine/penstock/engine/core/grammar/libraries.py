"""What the engine asks of a grammar library, and what it gets from one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.engine.core.plan import Int32
from penstock.engine.core.scheduling.guides import Batcher
from penstock.engine.grammar import Grammar

MAX_SPACES = 32
"""Characters of space between the tokens of JSON, where a request says nothing. Without a bound a model may write space until its
limit."""


class GrammarError(ValueError):
    """The grammar cannot be enforced; the message says why."""


class GrammarsUnavailable(RuntimeError):
    """The library cannot be used; the message says why."""


class Matcher(Protocol):
    """How far one answer has come in its grammar."""

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on; None: it can."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        ...

    def copy(self) -> "Matcher":
        """A matcher in the same state, which goes on by itself."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as the tokenizer writes them; empty where there is a choice."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes the next token. False: the grammar does not allow it, and the matcher cannot go on."""
        ...

    def try_accept(self, token_id: int) -> bool:
        """Takes a token that `rollback` may take back. False: the grammar does not allow it, and nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens of `try_accept`.

        Raises:
            ValueError: There are not as many since the last `accept`, whose tokens stay.
        """
        ...

    def mask(self) -> Int32:
        """The mask of the next token, [words], valid until the next call: EOS tokens are allowed where the answer may end. Sets
        `error` where nothing can follow."""
        ...


class Prototype(NamedTuple):
    """A compiled grammar in its first state. Requests take copies of the matcher."""

    matcher: Matcher
    num_words: int
    """Words of a mask, for all of the model's logits. The matcher's has more where the tokenizer has more tokens."""
    warnings: list[str]
    """What a lenient grammar leaves out."""
    batcher: Batcher | None = None
    """Asks guides with such matchers together; None: each is asked itself."""


class Library(Protocol):
    """Compiles grammars for one model; safe to call from several threads."""

    def prepare(self) -> None:
        """Imports the library and reads the tokenizer, which the first grammar does otherwise; raises `GrammarsUnavailable`."""
        ...

    def compile(self, grammar: Grammar) -> Prototype:
        """Compiles a grammar.

        Raises:
            GrammarError: It is not well-formed, or asks for what cannot be enforced.
            GrammarsUnavailable: The library is not there, or does not understand the tokenizer.
        """
        ...

    def close(self) -> None:
        """Ends whatever it runs beside this process."""
        ...


def without(num_tokens: int, num_tried: int) -> int:
    """How many of the tokens of `try_accept` are left after a rollback; raises what `Matcher.rollback` says."""
    if num_tokens > num_tried:
        raise ValueError(f"{num_tokens} tokens cannot be taken back: {num_tried} were tried")
    return num_tried - num_tokens
