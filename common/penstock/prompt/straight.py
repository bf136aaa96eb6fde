"""The usual part of a chat template as a plain Python function: what Jinja's own form of it costs is mostly its contexts, its
loop objects and its look-ups.

What is translated means the same to Python as to Jinja: text, fields of dictionaries, loops over lists, conditions, variables,
comparisons, strings put together. All else becomes a call that raises `BeyondError`, where it is reached: Jinja then renders
from the start, as it does for whatever raises. So errors are Jinja's own, and a template whose tools are written by macros is
plain for requests without tools.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count
from typing import Any, Final, NamedTuple, NoReturn

from jinja2 import nodes
from jinja2.idtracking import VAR_LOAD_RESOLVE, symbols_for_node
from jinja2.runtime import Undefined

from penstock.prompt import skeleton
from penstock.prompt.errors import BeyondError
from penstock.prompt.skeleton import Content

OF_DICTIONARIES: Final = frozenset(dir(dict))
_UNDEFINED: Final = Undefined()
_BEYOND: Final = "beyond()"
_COMPARISONS: Final = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip
_BINARY: Final[dict[type[nodes.Expr], str]] = {nodes.Add: "+", nodes.Sub: "-", nodes.Mod: "%", nodes.And: "and", nodes.Or: "or"}
_TESTS: Final = {
    "defined": "(not isinstance({}, Undefined))",
    "undefined": "isinstance({}, Undefined)",
    "none": "({} is None)",
    "string": "isinstance({}, TEXTS)",
    "true": "({} is True)",
    "false": "({} is False)",
}
_FILTERS: Final = {"trim": "trimmed({})", "length": "len(sized({}))"}
_METHODS: Final = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})
_LOOP: Final = {
    "index0": "at{0}",
    "index": "(at{0} + 1)",
    "first": "(at{0} == 0)",
    "last": "(at{0} == size{0} - 1)",
    "length": "size{0}",
}
_LARGE: Final = 2**63
_WHOLE: Final = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
"""With these a template is more than its body."""


class Straight(NamedTuple):
    """The function of a template, given the variables. Raises `BeyondError`, or what an expression raises: then the text is
    Jinja's."""

    text: Callable[[Mapping[str, Any]], str]
    parts: Callable[[Mapping[str, Any]], Content]
    """The same where a `Content` stands for each message's."""


def straight(tree: nodes.Template, known: Mapping[str, Any]) -> Straight | None:
    """The function of a template; None where it is more than a body.

    Args:
        tree: As `Environment.parse` has it.
        known: The environment's own variables.
    """
    names = list(tree.find_all(nodes.Name))
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    of_body = _stored(tree.body)
    elsewhere = frozenset({name.name for name in names if name.ctx == "store"} - of_body | macros)
    if next(iter(tree.find_all(_WHOLE)), None) is not None or (elsewhere | of_body) & known.keys():
        return None
    if not all(name.name.isascii() for name in names):  # others may be the same to Python
        return None
    space: dict[str, Any] = {"beyond": _beyond, "field": _field, "item": _item, "text": _text, "sized": _sized, "listed": _listed}
    space |= {"Space": _Space, "spaced": _spaced, "Undefined": Undefined, "UNDEFINED": _UNDEFINED, "ELSEWHERE": elsewhere}
    of_text: dict[str, Any] = space | {"written": str, "joined": "".join, "trimmed": _trimmed, "TEXTS": str}
    of_parts: dict[str, Any] = space | {"TEXTS": (str, Content)}
    of_parts |= {"written": skeleton.written, "joined": skeleton.joined, "trimmed": skeleton.trimmed}
    # Names come from Jinja's parser, constants are written by `repr`: nothing else of the template is in the source.
    try:
        code = compile("\n".join(_Writer(known.keys() | macros).function(tree, of_body)), "<straight template>", "exec")
    except (SyntaxError, RecursionError):  # too much within each other
        return None
    exec(code, of_text)
    exec(code, of_parts)
    return Straight(of_text["render"], of_parts["render"])


class _Scope:
    """The variables of the body, or of a loop's."""

    def __init__(self, names: set[str], number: int, outer: "_Scope | None") -> None:
        self.own = {name: f"v{number}_{name}" for name in names}
        self.number, self.outer = number, outer

    def find(self, name: str) -> str | None:
        """The variable that a name stands for."""
        return self.own.get(name) or (self.outer.find(name) if self.outer is not None else None)


class _Writer:
    def __init__(self, known: Set[str]) -> None:
        self._known = known
        self._numbers = count()
        self._given: set[str] = set()
        """Names that requests give."""

    def function(self, tree: nodes.Template, of_body: set[str]) -> list[str]:
        """`of_body`: the names that are set outside of loops."""
        scope = _Scope(of_body, next(self._numbers), None)
        body = list(self._all(tree.body, scope))
        begins = ["if not ELSEWHERE.isdisjoint(given): beyond()", "out = []", "add = out.append"]
        symbols = symbols_for_node(tree)
        for name, variable in scope.own.items():  # what is read before it is set may be given
            how, _ = symbols.loads[symbols.refs[name]]
            begins.append(
                f"{variable} = given.get({name!r}, UNDEFINED)" if how == VAR_LOAD_RESOLVE else f"{variable} = UNDEFINED"
            )
        names = [f"g_{name} = given.get({name!r}, UNDEFINED)" for name in sorted(self._given)]
        return ["def render(given):", *_indented([*begins, *names, *body, "return joined(out)"])]

    def _all(self, body: Sequence[nodes.Node], scope: _Scope) -> Iterator[str]:
        for node in body:
            yield from self._statement(node, scope)

    def _statement(self, node: nodes.Node, scope: _Scope) -> Iterator[str]:
        match node:
            case nodes.Output():
                yield from self._output(node.nodes, scope)
            case nodes.If():
                yield from self._if(node, scope)
            case nodes.For(target=nodes.Name(), else_=[], test=None, recursive=False):
                yield from self._for(node, scope)
            case nodes.Assign(target=nodes.Name() as target):
                yield f"{scope.find(target.name)} = {self._value(node.node, scope)}"
            case nodes.Assign(target=nodes.NSRef() as target):
                yield f"spaced({scope.find(target.name) or _BEYOND}).fields[{target.attr!r}] = {self._value(node.node, scope)}"
            case nodes.Break() | nodes.Continue():
                yield type(node).__name__.lower()
            case nodes.Macro():  # who calls it is beyond
                return
            case _:
                yield _BEYOND

    def _output(self, parts: Sequence[nodes.Expr], scope: _Scope) -> Iterator[str]:
        for part in parts:
            yield (
                f"add({part.data!r})"
                if isinstance(part, nodes.TemplateData)
                else f"add(written({self._expression(part, scope)}))"
            )

    def _if(self, node: nodes.If, scope: _Scope) -> Iterator[str]:
        for word, branch in [("if", node), *(("elif", other) for other in node.elif_)]:
            yield f"{word} {self._expression(branch.test, scope)}:"
            yield from _indented([*self._all(branch.body, scope), "pass"])
        if node.else_:
            yield "else:"
            yield from _indented([*self._all(node.else_, scope), "pass"])

    def _for(self, node: nodes.For, scope: _Scope) -> Iterator[str]:
        assert isinstance(node.target, nodes.Name)
        number, target = next(self._numbers), node.target.name
        inner = _Scope(_stored(node.body) | {target}, number, scope)
        yield f"list{number} = listed({self._expression(node.iter, scope)})"
        yield f"size{number} = len(list{number})"
        yield f"for at{number}, {inner.own[target]} in enumerate(list{number}):"
        yield from _indented([*_unset(inner, target), *self._all(node.body, inner), "pass"])

    def _value(self, node: nodes.Node, scope: _Scope) -> str:
        """What is assigned."""
        match node:
            case nodes.Call(node=nodes.Name(name="namespace"), args=[], dyn_args=None, dyn_kwargs=None):
                pairs = (f"{pair.key!r}: {self._expression(pair.value, scope)}" for pair in node.kwargs)
                return f"Space({{{', '.join(pairs)}}})"
            case _:
                return self._expression(node, scope)

    def _expression(self, node: nodes.Node, scope: _Scope) -> str:
        match node:
            case nodes.Const(value=None | bool() | str()):
                return f"({node.value!r})"
            case nodes.Const(value=int() as value) if abs(value) < _LARGE:
                return f"({value})"
            case nodes.Name():
                return self._name(node.name, scope)
            case nodes.Getattr() | nodes.Getitem():
                return self._within(node, scope)
            case nodes.List():
                return f"[{', '.join(self._expression(entry, scope) for entry in node.items)}]"
            case nodes.Concat():
                return f"joined([{', '.join(f'written({self._expression(part, scope)})' for part in node.nodes)}])"
            case nodes.Not():
                return f"(not {self._expression(node.node, scope)})"
            case nodes.Neg():
                return f"(-{self._expression(node.node, scope)})"
            case nodes.BinExpr() if type(node) in _BINARY:
                return f"({self._expression(node.left, scope)} {_BINARY[type(node)]} {self._expression(node.right, scope)})"
            case nodes.Compare():
                others = [f"{_COMPARISONS[other.op]} {self._expression(other.expr, scope)}" for other in node.ops]
                return f"({self._expression(node.expr, scope)} {' '.join(others)})"
            case nodes.CondExpr():
                no = self._expression(node.expr2, scope) if node.expr2 is not None else "UNDEFINED"
                return f"({self._expression(node.expr1, scope)} if {self._expression(node.test, scope)} else {no})"
            case nodes.Test(args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if node.name in _TESTS:
                return _TESTS[node.name].format(self._expression(node.node, scope))
            case nodes.Filter(args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if (
                node.name in _FILTERS and node.node is not None
            ):
                return _FILTERS[node.name].format(self._expression(node.node, scope))
            case nodes.Call(node=nodes.Getattr(attr="strip") as of, args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return f"trimmed({self._expression(of.node, scope)})"
            case nodes.Call(node=nodes.Getattr(attr=attr) as of, kwargs=[], dyn_args=None, dyn_kwargs=None) if attr in _METHODS:
                arguments = ", ".join(self._expression(argument, scope) for argument in node.args)
                return f"text({self._expression(of.node, scope)}).{attr}({arguments})"
            case _:
                return _BEYOND

    def _name(self, name: str, scope: _Scope) -> str:
        if (variable := scope.find(name)) is not None:
            return variable
        if name in self._known or name == "loop":
            return _BEYOND
        self._given.add(name)
        return f"g_{name}"

    def _within(self, node: nodes.Getattr | nodes.Getitem, scope: _Scope) -> str:
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            figure = _LOOP.get(node.attr) if isinstance(node, nodes.Getattr) and scope.outer is not None else None
            return figure.format(scope.number) if figure is not None else _BEYOND
        of = self._expression(node.node, scope)
        name = node.attr if isinstance(node, nodes.Getattr) else node.arg.value if isinstance(node.arg, nodes.Const) else None
        if isinstance(name, str):
            return _BEYOND if name in OF_DICTIONARIES else f"field({of}, {name!r})"
        assert isinstance(node, nodes.Getitem)
        if isinstance(node.arg, nodes.Slice):
            ends = (node.arg.start, node.arg.stop, node.arg.step)
            return f"listed({of})[{':'.join('' if end is None else self._expression(end, scope) for end in ends)}]"
        return f"item({of}, {self._expression(node.arg, scope)})"


def _stored(body: Sequence[nodes.Node]) -> set[str]:
    """The names that are set in a body, those in loops left out: each of their rounds has its own."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            found.add(node.target.name)
        elif not isinstance(node, nodes.For | nodes.Macro):
            found |= _stored(list(node.iter_child_nodes()))
    return found


def _unset(scope: _Scope, *but: str) -> Iterator[str]:
    """What a loop's variables are before they are set."""
    for name in scope.own.keys() - set(but):
        outer = scope.outer.find(name) if scope.outer is not None else None
        yield f"{scope.own[name]} = {outer or 'UNDEFINED'}"


def _indented(lines: Sequence[str] | Iterator[str]) -> list[str]:
    return [f" {line}" for line in lines]


def _beyond() -> NoReturn:
    raise BeyondError


class _Space:
    """A `namespace`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def __str__(self) -> NoReturn:
        _beyond()


def _spaced(value: Any) -> _Space:
    return value if type(value) is _Space else _beyond()


def _field(of: Any, name: str) -> Any:
    if type(of) is dict:
        return of.get(name, _UNDEFINED)
    return of.fields.get(name, _UNDEFINED) if type(of) is _Space else _beyond()


def _item(of: Any, at: Any) -> Any:
    if type(of) is list and type(at) is int and -len(of) <= at < len(of):
        return of[at]
    return of.get(at, _UNDEFINED) if type(of) is dict and type(at) is str and at not in OF_DICTIONARIES else _beyond()


def _listed(value: Any) -> list[Any]:
    return value if type(value) is list else _beyond()


def _text(value: Any) -> str:
    return value if type(value) is str else _beyond()


def _trimmed(value: Any) -> str:
    return _text(value).strip()


def _sized(value: Any) -> Any:
    return value if type(value) in (list, str, dict) else _beyond()
