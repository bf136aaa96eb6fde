"""Chat templates: sandboxed Jinja with the conventions that checkpoints in Hugging Face format rely on."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.prompt.errors import BeyondError, BundleError, PromptError
from penstock.prompt.skeleton import Content, Gap
from penstock.prompt.straight import OF_DICTIONARIES, straight

# What the expressions of a template raise on messages that its author did not foresee.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_ABSENT = object()


class _Generation(Extension):
    """`{% generation %}` marks what the model writes, for training masks; to a server it is its content."""

    tags = {"generation"}  # noqa: RUF012 - typed by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Finds what messages hold without the exception that Jinja raises and handles for each field: a dictionary has no such
    attribute."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja has it: an attribute, else an item."""
        if type(obj) is not dict or attribute in OF_DICTIONARIES:
            return super().getattr(obj, attribute)
        found = obj.get(attribute, _ABSENT)
        return self.undefined(obj=obj, name=attribute) if found is _ABSENT else found


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token`, … as variables of the template.
        now: The clock of `strftime_now`.

    Raises `BundleError` where the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            # Copied at each rendering, which takes three times as long of Jinja's chain of mappings.
            self._template.globals = dict(self._template.globals)
            tree = environment.parse(source)
            self._straight = straight(tree, environment.globals)
            self.takes_parts = _takes_parts(tree)
            """Whether it reads a content that is a list of parts."""
            # The last to read the tree: constants are folded in it.
            self.variables = frozenset(find_undeclared_variables(tree) - environment.globals.keys())
            """The names that it reads and does not set."""
        except jinja2.TemplateError as error:
            raise BundleError(f"the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt's text; raises `PromptError` where the template refuses the messages."""
        given = {**self._special_tokens, "messages": messages, **variables}
        if self._straight is not None:
            with contextlib.suppress(BeyondError, *_RENDER_ERRORS):  # Jinja renders what is beyond it, and says what is wrong
                return self._straight.text(given)
        try:
            return self._template.render(given)
        except _RENDER_ERRORS as error:
            raise PromptError(f"the model's chat template refuses these messages: {error}", "messages") from None

    def skeleton(self, messages: Sequence[tuple[str, bool]], **variables: Any) -> tuple[str | Gap, ...] | None:
        """What `render` makes of all messages with these roles and no other field but a content; None where that depends on the
        contents.

        Args:
            messages: The role of each, and whether its content is empty.
            variables: As in `render`.
        """
        if self._straight is None:
            return None
        stand_ins = [
            {"role": role, "content": Content((Gap(at, False),), not empty)} for at, (role, empty) in enumerate(messages)
        ]
        with contextlib.suppress(BeyondError, *_RENDER_ERRORS):
            return self._straight.parts({**self._special_tokens, "messages": stand_ins, **variables}).parts
        return None


def _takes_parts(tree: nodes.Node) -> bool:
    """Whether a loop goes over something's `content`, filtered or not."""
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        while isinstance(over, nodes.Filter) and over.node is not None:
            over = over.node
        if isinstance(over, nodes.Getattr) and over.attr == "content":
            return True
        if isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Const) and over.arg.value == "content":
            return True
    return False


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which would put other tokens into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
