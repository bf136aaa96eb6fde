"""The shapes of answers, for `/openapi.json`; tests hold what the formats write against them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=0)]


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct that refuses unknown fields."""


class PromptTokensDetails(_Shape, frozen=True, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: _Count
    image_tokens: _Count | msgspec.UnsetType = msgspec.UNSET
    """Present if there are any."""


class Usage(_Shape, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Shape, frozen=True, kw_only=True):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Shape, frozen=True, kw_only=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape, frozen=True, kw_only=True):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Shape, frozen=True, kw_only=True):
    """Columns, of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[_Count]


class PromptToken(_Shape, frozen=True, kw_only=True):
    """A candidate for a token of the prompt."""

    logprob: float
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


FinishReason = Literal["stop", "length", "tool_calls", "repetition"]
PromptLogprobs = list[dict[str, PromptToken] | None]


class Function(_Shape, frozen=True, kw_only=True):
    """What is called."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class ToolCall(_Shape, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Function


class Message(_Shape, frozen=True, kw_only=True):
    """The assistant's."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same, by DeepSeek's name."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(_Shape, frozen=True, kw_only=True):
    """One answer of a chat."""

    index: _Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(_Shape, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(_Shape, frozen=True, kw_only=True):
    """One text."""

    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(_Shape, frozen=True, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/responses`: besides these, what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class Model(_Shape, frozen=True, kw_only=True):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    """A folder, or a name on the Hub."""
    parent: str | None
    """For an adapter: the model that it is on."""
    revision: str | msgspec.UnsetType = msgspec.UNSET
    """For an adapter that was loaded at a revision."""


class ModelList(_Shape, frozen=True, kw_only=True):
    """All served names."""

    object: Literal["list"]
    data: list[Model]


class ErrorDetail(_Shape, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Shape, frozen=True, kw_only=True):
    """Every answer that is none."""

    error: ErrorDetail


class Embedding(_Shape, frozen=True, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: _Count
    embedding: list[float] | str


class EmbeddingUsage(_Shape, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: _Count
    total_tokens: _Count


class Embeddings(_Shape, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
