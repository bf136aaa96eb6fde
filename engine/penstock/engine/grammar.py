"""What a request's output must look like: the part of a request that travels from the frontend to the core's grammars."""

from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "lark", "tags"]


class ReasoningMarkers(msgspec.Struct, frozen=True, array_like=True):
    """How reasoning comes before the answer, which alone follows the grammar."""

    end: tuple[int, ...]
    """The tokens after which the answer begins."""
    begin: int | None = None
    """The token that begins reasoning where the model may choose to; None: the output begins inside it."""


class Tag(msgspec.Struct, frozen=True):
    """JSON within markup."""

    begin: str
    schema: Any
    """Of the JSON."""
    end: str
    trigger: str = ""
    """Among free text, the beginning of `begin` that says that this tag comes; several tags may have the same."""


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """An output of tags, of which special tokens of the model may be parts: those are never text."""

    tags: list[Tag]
    """Alternatives."""
    free: bool
    """Whether text comes between the tags, as much as the model likes. False: tags alone, at least one."""
    begin: str = ""
    """Before the first tag, where there is no free text; so are the next three."""
    separator: str = ""
    """Between two."""
    end: str = ""
    """After the last."""
    several: bool = True
    """Whether more than one may come."""
    answer: list[Any] = []
    """Where tags alone come: the schemas of JSON that may come in place of all of them."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """One grammar. Checked for its form by the frontend; whether it can be enforced shows when it is compiled."""

    kind: GrammarKind
    text: str
    """As JSON: of `json_schema` the schema, of `choice` the list of strings, of `tags` a `Tags`. Else the grammar as it was
    given."""
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
