"""What of a chat request's body changes the prompt besides its messages: tools and the chat template's variables."""

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.prompt.bundle import SPECIAL_TOKENS
from penstock.prompt.errors import PromptError

MAX_TOOLS: Final = 128
MAX_DEPTH: Final = 64
"""Deepest nesting of objects and lists that a template gets: templates write them with a recursive function."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", *SPECIAL_TOKENS)


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools of a chat request as templates read them, which is how they came; raises `PromptError` naming the field."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise PromptError(f"tools must be a list of at most {MAX_TOOLS} functions", "tools")
    for at, tool in enumerate(tools):
        _check_tool(tool, f"tools[{at}]")
    check_depth(tools, "tools")
    return tools


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise PromptError(f"{where} must be an object with type: function and function", where)
    _refuse_others(tool, ("type", "function"), where)
    check_function(tool["function"], f"{where}.function")


def check_function(function: Mapping[str, Any], where: str) -> None:
    """Checks name, description and parameters of one function."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PromptError(f"{where}.name must be 1 to 64 letters, digits, dots, dashes and underscores", f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise PromptError(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(function.get("parameters"), dict | None):
        raise PromptError(f"{where}.parameters must be a JSON schema object", f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise PromptError(f"{where}.strict must be true or false", f"{where}.strict")
    _refuse_others(function, _FUNCTION_FIELDS, where)


def _refuse_others(value: Mapping[str, Any], fields: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in fields:
            raise PromptError(f"{where}.{name} is not supported", f"{where}.{name}")


def template_variables(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """`chat_template_kwargs`, which may have variables that the template does not know (clients send `enable_thinking` to every
    model), and `reasoning_effort`, which may not be ignored.

    Args:
        body: Of a chat request.
        known: The variables of the template.

    Raises `PromptError` naming the field.
    """
    given = body.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise PromptError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in given:
        where = f"chat_template_kwargs.{name}"
        if name in _RESERVED:
            raise PromptError(f"{where} is not for requests to set", where)
    if given:
        check_depth(given, "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise PromptError(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    if "reasoning_effort" not in known:
        raise PromptError(
            "reasoning_effort is not supported: the model's chat template has no such variable",
            "reasoning_effort",
            "unsupported_parameter",
        )
    return {"reasoning_effort": effort, **given}


def check_depth(value: Any, where: str) -> None:
    """Raises `PromptError` for objects and lists that are too deep within each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise PromptError(f"{where} holds more than {MAX_DEPTH} objects and lists within each other", where)
