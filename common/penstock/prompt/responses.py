"""The input of `/v1/responses` as the messages and tools of a chat: from then on both are the same prompt."""

from collections.abc import Mapping
from typing import Any, Final

from penstock.prompt.errors import PromptError
from penstock.prompt.images import check_detail, refuse_part

_PART_TYPES: Final = ("input_text", "output_text", "text")
_IMAGE_FIELDS: Final = ("type", "image_url", "detail", "file_id")
_PART_FIELDS: Final = ("type", "text", "annotations", "logprobs")
"""The latter two are those of an answer that comes back."""
_ITEM_FIELDS: Final = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
}
_STRINGS: Final = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
_ROLES: Final = ("system", "developer", "user", "assistant")
_OWN_NAMES: Final = (("reasoning_effort", "reasoning.effort"), (".function.", "."))
"""What a chat calls a field, and what a response does."""


def as_chat(body: Mapping[str, Any], *, reads_images: bool = False) -> dict[str, Any]:
    """The body of a chat request with the same prompt; raises `PromptError` naming the field of this one."""
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise PromptError("instructions must be a string", "instructions")
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        for at, item in enumerate(given):
            _add(messages, item, f"input[{at}]", reads_images)
        if not messages:
            raise PromptError("input holds nothing that the model could read", "input")
    else:
        raise PromptError("input must be a string or a list with at least one item", "input")
    chat: dict[str, Any] = {"messages": messages, "tools": chat_tools(body.get("tools"))}
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def chat_tools(tools: Any) -> list[dict[str, Any]]:
    """`{"type": "function", "name": …}` as a chat has it; raises `PromptError` for tools that are no functions."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise PromptError("tools must be a list of functions", "tools")
    out: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise PromptError(f"tools[{at}] must be an object with type: function; there are no others here", f"tools[{at}]")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        out.append({"type": "function", "function": function})
    return out


def _add(messages: list[dict[str, Any]], item: Any, where: str, reads_images: bool) -> None:
    if not isinstance(item, dict):
        raise PromptError(f"{where} must be an object", where)
    kind = item.get("type", "message")
    fields = _ITEM_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise PromptError(f"{where}.type must be one of {', '.join(_ITEM_FIELDS)}", f"{where}.type")
    for name in item:
        if name not in fields:
            raise PromptError(f"{where}.{name} is not supported", f"{where}.{name}")
    for name in _STRINGS.get(kind, ()):
        if not isinstance(item.get(name), str):
            raise PromptError(f"{where}.{name} must be a string", f"{where}.{name}")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise PromptError(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
        content = _content(item.get("content"), f"{where}.content", reads_images)
        last = messages[-1] if messages else {}
        if item.get("role") == "assistant" and last.get("role") == "assistant" and "content" not in last:
            last["content"] = content  # the answer to the reasoning before it
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _open_turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output", reads_images)
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
    elif text := _reasoning(item.get("content"), f"{where}.content"):
        messages.append({"role": "assistant", "reasoning_content": text})


def _open_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that calls belong to: the last one, if it is the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def in_own_words(error: PromptError) -> PromptError:
    """What a chat's body was refused for, with the names of a response's fields."""
    if error.param.startswith("messages"):  # all of them were sound by themselves: the template refuses the conversation
        return PromptError(str(error), "input", error.code)
    message, param = str(error), error.param
    for theirs, ours in _OWN_NAMES:
        message, param = message.replace(theirs, ours), param.replace(theirs, ours)
    return PromptError(message, param, error.code)


def image_params(body: Mapping[str, Any]) -> list[str]:
    """The fields of a sound body that hold images, in the order in which its chat has them."""
    given = body.get("input")
    return [
        f"input[{at}].{field}[{place}].image_url"
        for at, item in enumerate(given if isinstance(given, list) else ())
        for field in ("content", "output")
        if isinstance(item.get(field), list)
        for place, part in enumerate(item[field])
        if part.get("type") == "input_image"
    ]


def _content(content: Any, where: str, reads_images: bool) -> Any:
    """Parts as a chat has them; a text is itself."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise PromptError(f"{where} must be a string or a list of text parts", where)
    return [_part(part, f"{where}[{at}]", reads_images) for at, part in enumerate(content)]


def _part(part: Any, where: str, reads_images: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image" and reads_images:
        return _image(part, where)
    if kind not in _PART_TYPES:
        raise refuse_part(kind, where, "an input_text", reads_images)
    if not isinstance(part.get("text"), str):
        raise PromptError(f"{where}.text must be a string", f"{where}.text")
    for field in part:
        if field not in _PART_FIELDS:
            raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")
    return {"type": "text", "text": part["text"]}


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    for field in part:
        if field not in _IMAGE_FIELDS or (field == "file_id" and part[field] is not None):
            raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")
    if not isinstance(part.get("image_url"), str):
        raise PromptError(f"{where}.image_url must be a string", f"{where}.image_url")
    check_detail(part.get("detail"), f"{where}.detail")
    return {"type": "image_url", "image_url": {"url": part["image_url"]}}


def _reasoning(content: Any, where: str) -> str:
    if content is None:
        return ""
    texts = [part.get("text") if isinstance(part, dict) else None for part in content] if isinstance(content, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise PromptError(f"{where} must be a list of reasoning_text parts", where)
    return "\n".join(map(str, texts))
