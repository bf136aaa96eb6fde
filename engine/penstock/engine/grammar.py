"""What a request's output must look like: the part of a request that travels from the frontend to the core's grammars."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "lark"]


class ReasoningMarkers(msgspec.Struct, frozen=True, array_like=True):
    """How reasoning comes before the answer, which alone follows the grammar."""

    end: tuple[int, ...]
    """The tokens after which the answer begins."""
    begin: int | None = None
    """The token that begins reasoning where the model may choose to; None: the output begins inside it."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """One grammar. Checked for its form by the frontend; whether it can be enforced shows when it is compiled."""

    kind: GrammarKind
    text: str
    """Of `json_schema` the schema and of `choice` the list of strings, both as JSON; else the grammar as it was given."""
    param: str
    """The field of the request that it came in, for error messages."""
    lenient: bool = False
    """Whether keywords of a schema that cannot be enforced are left out. False: they are an error."""
    whitespace_pattern: str | None = None
    """A regular expression for the space between the tokens of JSON; None: up to 32 characters of it."""
    any_whitespace: bool = True
    """False: JSON is written without space."""
    reasoning: ReasoningMarkers | None = None
    """None: the output begins with the answer."""

    @property
    def source(self) -> "Grammar":
        """What is compiled: the same for requests that differ in the rest alone."""
        return msgspec.structs.replace(self, param="", reasoning=None)
