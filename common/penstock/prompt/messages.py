"""Checks chat messages and brings them into the form that chat templates read: role, plain text, calls with their arguments as
objects."""

import json
from typing import Any, Final, NamedTuple

from penstock.prompt.errors import PromptError
from penstock.prompt.images import ImagePart, read_image_part, refuse_part
from penstock.prompt.tools import check_depth

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES: Final = 8192
MAX_CALLS: Final = 128
"""Tool calls of one message."""
_FIELDS: Final = {
    "assistant": ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_PLAIN_FIELDS: Final = ("role", "content", "name")
# An assistant's message that a client sends back as it got it has these fields, all empty.
_EMPTY_IN_ANSWERS: Final = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content", "reasoning")


class Conversation(NamedTuple):
    """Messages that a template can read."""

    messages: list[dict[str, Any]]
    images: list[ImagePart]
    """The images, in the order of their parts."""


def normalize(messages: Any, *, reads_images: bool = False) -> Conversation:
    """`role` and `content`; `name`, `tool_calls`, `tool_call_id` and `reasoning_content` where given. The content's text parts
    are joined by line feeds as vLLM joins them; arguments of calls become objects, as templates in Hugging Face format expect.
    A content with images is a list of `{"type": "text", "text": …}` and `{"type": "image"}`.

    Raises `PromptError` naming the field for anything that the model cannot read.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise PromptError(f"messages has {len(messages)} messages; at most {MAX_MESSAGES}", "messages")
    images: list[ImagePart] | None = [] if reads_images else None
    return Conversation([_message(message, f"messages[{at}]", images) for at, message in enumerate(messages)], images or [])


def _message(message: Any, where: str, images: list[ImagePart] | None) -> dict[str, Any]:
    """`images`: takes those of the message; None: there must be none."""
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    known = _FIELDS.get(role, _PLAIN_FIELDS)
    for field, value in message.items():
        if field in known or (field in _EMPTY_IN_ANSWERS and not value):
            continue
        raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")
    content = message.get("content")
    calls = message.get("tool_calls") if role == "assistant" else None
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if content is None and (calls or (reasoning and role == "assistant")):  # calls alone, or an answer cut while it reasoned
        out: dict[str, Any] = {"role": role, "content": ""}
    else:
        out = {"role": role, "content": _content(content, f"{where}.content", images)}
    for field in ("name", "tool_call_id"):
        if field in known and message.get(field) is not None:
            out[field] = _string(message[field], f"{where}.{field}")
    if reasoning:
        out["reasoning_content"] = _string(reasoning, f"{where}.reasoning_content")
    if calls:
        out["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return out


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where} must be a string", where)
    return value


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise PromptError(f"{where} must be a list of at most {MAX_CALLS} calls", where)
    return [_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise PromptError(f"{where} must be an object with id, type: function and function", where)
    for field in call:
        if field not in ("id", "type", "function", "index"):
            raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")
    for field in function:
        if field not in ("name", "arguments"):
            raise PromptError(f"{where}.function.{field} is not supported", f"{where}.function.{field}")
    name = _string(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        out["id"] = _string(call["id"], f"{where}.id")
    return out


def _arguments(arguments: Any, where: str) -> Any:
    """An object; the text itself where a model wrote what is none."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        raise PromptError(f"{where} must be a string of JSON", where)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    check_depth(value, where)
    return value if isinstance(value, dict) else arguments


def _content(content: Any, where: str, images: list[ImagePart] | None) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise PromptError(f"{where} must be a string or a list of text parts", where)
    parts: list[dict[str, str]] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url" and images is not None:
            images.append(read_image_part(part, f"{where}[{at}]"))
            parts.append({"type": "image"})
            continue
        if kind != "text":
            raise refuse_part(kind, f"{where}[{at}]", "a text", images is not None)
        for field in part:
            if field not in ("type", "text"):
                raise PromptError(f"{where}[{at}].{field} is not supported", f"{where}[{at}].{field}")
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}[{at}].text must be a string", f"{where}[{at}].text")
        parts.append({"type": "text", "text": part["text"]})
    return parts if any(part["type"] == "image" for part in parts) else "\n".join(part["text"] for part in parts)
