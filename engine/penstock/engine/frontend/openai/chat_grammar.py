"""What the answer of a chat must look like: its format, the calls that it is forced to make, or both as alternatives."""

from collections.abc import Collection

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.frontend.openai.parsing.shapes import calls_or_answer, forced_calls, strict_calls
from penstock.engine.frontend.openai.protocol import ChatRequest, NamedToolChoice
from penstock.engine.frontend.openai.structured import grammar_of
from penstock.engine.grammar import Grammar


def wants_calls(request: ChatRequest) -> bool:
    """Whether calls are to be found in the answer."""
    return bool(request.tools) and request.tool_choice != "none"


def chat_grammar(request: ChatRequest, parsers: ParserConfig, special_tokens: Collection[str]) -> Grammar | None:
    """The grammar of a chat's answer; None: it is free. `ApiError` 400 names the field at fault.

    Args:
        request: The checked body, its tools included.
        parsers: What takes this answer apart.
        special_tokens: The model's.
    """
    if not wants_calls(request):
        return grammar_of(request.response_format, request.structured_outputs, request.schema_field)
    shape = parsers.shape(special_tokens)
    if request.forces_call:
        if request.structured_outputs is not None:
            message = "structured_outputs and a tool_choice that forces a call exclude each other"
            raise ApiError(400, message, param="structured_outputs")
        assert shape is not None, "formats for forced calls have shapes"
        return forced_calls(request.tools, shape, _named(request), request.parallel_tool_calls)
    asked = grammar_of(request.response_format, request.structured_outputs, request.schema_field)
    if asked is not None and request.structured_outputs is not None:
        return asked
    if asked is not None:
        if shape is None or asked.kind != "json_schema":
            raise _unsupported("response_format beside tools", "response_format", "none, required or a function")
        return calls_or_answer(request.tools, shape, asked, request.parallel_tool_calls)
    strict = next((at for at, tool in enumerate(request.tools) if tool["function"].get("strict")), None)
    if strict is None:
        return None
    if shape is None or not shape.trigger:
        where = f"tools[{strict}].function.strict"
        raise _unsupported(where, where, "required or a function")
    return strict_calls(request.tools, shape)


def _unsupported(what: str, param: str, choices: str) -> ApiError:
    message = f"{what} cannot be enforced in the way in which this model writes calls: it needs a tool_choice that is {choices}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _named(request: ChatRequest) -> str | None:
    """Return the function that must be called; None: any."""
    if not isinstance(request.tool_choice, NamedToolChoice):
        return None
    name = request.tool_choice.function.name
    if name not in [tool["function"]["name"] for tool in request.tools]:
        raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    return name
