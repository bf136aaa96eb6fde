"""The body of `/v1/responses`. Nothing is stored: a conversation comes whole with every request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Metadata,
    NamedFunction,
    NamedToolChoice,
    RequestId,
    SamplingFields,
    ToolChoice,
    check_tool_choice,
    convert,
)
from penstock.engine.frontend.openai.structured import TextFormat, check_text_format, read_guided
from penstock.prompt.errors import PromptError
from penstock.prompt.responses import chat_tools

LOGPROBS: Final = "message.output_text.logprobs"


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model thinks, as far as its chat template knows."""

    effort: str | None = None
    summary: None = None
    """Not supported: reasoning is returned whole."""


class NamedResponseTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forces a call of one function."""

    type: Literal["function"]
    name: str


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer's text looks like."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None
    """Only `medium` is supported."""


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`input`, `instructions` and `tools` are checked where they become a prompt. Besides OpenAI's fields there are those of
    sampling, as for chats."""

    model: str
    input: Any
    instructions: Any = None
    text: Text = Text()
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool = False
    tools: Any = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool = True
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[Literal["message.output_text.logprobs"]] = msgspec.field(default_factory=list)
    reasoning: Reasoning = Reasoning()
    chat_template_kwargs: Any = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None
    """vLLM's, as in chats."""
    user: str | None = None
    """Accepted and of no effect, as the rest of these are."""
    metadata: Metadata | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
    # Of chats, and nothing here.
    "max_tokens": (),
    "n": (1,),
    "prompt_logprobs": (),
}


def parse_responses(body: Mapping[str, Any]) -> ResponsesRequest:
    """Checks everything but the prompt; `ApiError` 400 names the field."""
    request = convert(read_guided(body), ResponsesRequest, _NEUTRAL)
    check_tool_choice(_chat_choice(request.tool_choice), request.tools)
    if request.top_logprobs and LOGPROBS not in request.include:
        raise ApiError(400, f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
    return request


class ResponseAsChat(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A response's body as a chat's; its messages are tokens already."""

    prompt_field: ClassVar[str] = "input"
    schema_field: ClassVar[str] = "text.format.schema"

    @property
    def limit_field(self) -> str:
        """What the client calls its limit."""
        return "max_output_tokens"


def as_chat_request(request: ResponsesRequest, body: Mapping[str, Any]) -> ChatRequest:
    """The same as a chat, for what samples and takes apart."""
    sampling: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    sampling["max_tokens"] = request.max_output_tokens
    try:
        tools = chat_tools(body.get("tools"))
    except PromptError as error:
        raise ApiError.from_prompt(error) from None
    return ResponseAsChat(
        **sampling,
        model=request.model,
        messages=[],
        stream=request.stream,
        logprobs=LOGPROBS in request.include,
        top_logprobs=request.top_logprobs,
        tools=tools,
        tool_choice=_chat_choice(request.tool_choice),
        response_format=check_text_format(request.text.format),
        parallel_tool_calls=request.parallel_tool_calls,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _chat_choice(choice: Literal["none", "auto", "required"] | NamedResponseTool | None) -> ToolChoice:
    return NamedToolChoice("function", NamedFunction(choice.name)) if isinstance(choice, NamedResponseTool) else choice
