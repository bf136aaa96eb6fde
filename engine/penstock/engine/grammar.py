"""What a request's output must look like: the part of a request that travels from the frontend to the core's grammars."""

from importlib.util import find_spec
from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "lark", "tags"]


GrammarBackend = Literal["guidance", "xgrammar"]
"""The library that enforces a grammar, by vLLM's names: llguidance or xgrammar."""


class GrammarSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How grammars are enforced where a request says nothing: vLLM's keys of `--structured-outputs-config`."""

    backend: GrammarBackend = "guidance"
    disable_any_whitespace: bool = False
    """Whether JSON is written without space."""
    enable_in_reasoning: bool = False
    """Whether the grammar also holds for the reasoning, and so for all of the output."""


def is_installed(backend: GrammarBackend) -> bool:
    """Whether the library of a backend can be imported."""
    return find_spec("llguidance" if backend == "guidance" else backend) is not None


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
    """Schema of the JSON."""
    end: str
    trigger: str = ""
    """Among free text, the beginning of `begin` that says that this tag comes; several tags may have the same."""


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """An output of tags. Special tokens of the model may be parts of tags, and are never text."""

    tags: list[Tag]
    """Alternatives."""
    free: bool
    """Whether text comes between the tags, as much as the model likes. False: tags alone, at least one."""
    begin: str = ""
    """Before the first tag, where there is no free text; so are the next three."""
    separator: str = ""
    """Between two."""
    end: str = ""
    """Text after the last tag."""
    several: bool = True
    """Whether more than one may come."""
    answer: list[Any] = []
    """If only tags are allowed: the schemas of JSON that may come in place of all of them."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """One grammar. Checked for its form by the frontend; whether it can be enforced shows when it is compiled."""

    kind: GrammarKind
    text: str
    """As JSON: for `json_schema` the schema, for `choice` the list of strings, for `tags` a `Tags`. Else the grammar as given."""
    param: str
    """The field of the request that it came in, for error messages."""
    lenient: bool = False
    """Whether keywords of a schema that cannot be enforced are left out. False: they are an error."""
    whitespace_pattern: str | None = None
    """A regular expression for the space between the tokens of JSON; None: up to 32 characters of it."""
    any_whitespace: bool = True
    """False: JSON is written without space."""
    backend: GrammarBackend = "guidance"
    reasoning: ReasoningMarkers | None = None
    """None: the output begins with the answer."""

    @property
    def source(self) -> "Grammar":
        """What is compiled: the same for requests that differ in the rest alone."""
        return msgspec.structs.replace(self, param="", reasoning=None)
