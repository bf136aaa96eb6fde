"""Checks chat messages and brings them into the form that chat templates read: role and plain text."""

from typing import Any

from penstock.prompt.errors import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
# An assistant's message that a client sends back as it got it has these fields, all empty.
_EMPTY_IN_ANSWERS = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content")


def normalize(messages: Any) -> list[dict[str, str]]:
    """`{"role", "content"}` and `name` where given, the content's text parts joined by line feeds as vLLM joins them.

    Raises `PromptError` naming the field for anything that a text model cannot read.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for field, value in message.items():
        if field in ("role", "content", "name") or (field in _EMPTY_IN_ANSWERS and not value):
            continue
        raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")
    out = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise PromptError(f"{where}.name must be a string", f"{where}.name")
        out["name"] = name
    return out


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise PromptError(f"{where} must be a string or a list of text parts", where)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PromptError(f"{where}[{at}] must be a text part; this model reads text alone", f"{where}[{at}]")
        text = part.get("text")
        if not isinstance(text, str):
            raise PromptError(f"{where}[{at}].text must be a string", f"{where}[{at}].text")
        texts.append(text)
    return "\n".join(texts)
