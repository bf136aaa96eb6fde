"""The bodies of `/v1/chat/completions` and `/v1/completions`: every parameter that is accepted is honoured, every other one is a
400 that names it.

A parameter that is not supported may still be given with the value that means its absence (`suffix: ""`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.structured import ResponseFormat, StructuredOutputs, read_guided
from penstock.engine.grammar import GrammarBackend
from penstock.engine.sampling import MAX_REPETITION_PATTERN, MinP, RepetitionPenalty, Temperature, TokenCount, TopK, TopP
from penstock.plain_errors import explained
from penstock.prompt.processor import COMPLETIONS_PATH, MAX_PROMPTS
from penstock.suggest import suggestion

MAX_CHOICES: Final = MAX_PROMPTS[COMPLETIONS_PATH]
"""`n` times prompts of one request."""
MAX_TOP_LOGPROBS: Final = 20
MAX_REQUEST_ID: Final = 256

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
"""Printable ASCII, as `exchange.name_request` checks."""
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
"""Metadata with OpenAI's limit of 16 entries: checking a million would block every stream."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_ExtraArg = bool | int | float | str | list[int | float | str]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides text."""

    include_usage: bool = False
    """One more event at the end, with the counts."""
    continuous_usage_stats: bool = False
    """vLLM's: every event has the counts of its choice so far."""
    include_obfuscation: bool = False
    """OpenAI's padding against who counts the bytes of events: there is none here, and true is refused."""


class RepetitionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: ends an output where a pattern of `min_pattern_size` to `max_pattern_size` tokens stands `min_count` times in a row
    at its end, with the finish reason `repetition`."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=MAX_REPETITION_PATTERN)]
    min_count: Annotated[int, Meta(ge=2, le=1024)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=MAX_REPETITION_PATTERN)] = 1


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function to call."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen, and how many. Ranges are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
    `bad_words`, `allowed_token_ids`, `prompt_logprobs`, `stop_token_ids`, `ignore_eos`, `repetition_detection`, `vllm_xargs`,
    `structured_outputs` and `guided_decoding_backend` are vLLM's; `speculative_decoding` is ours."""

    max_tokens: TokenCount | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """-1 and 0: all tokens."""
    min_p: MinP = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] = msgspec.field(default_factory=list)
    """At most 16 strings (OpenAI: 4)."""
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=128)] = msgspec.field(default_factory=list)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict
    )
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)] = msgspec.field(
        default_factory=list
    )
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_detection: RepetitionLimits | None = None
    speculative_decoding: bool = True
    """False: no drafts for this request."""
    vllm_xargs: Annotated[dict[str, _ExtraArg], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Arguments of the logits processors that the server was started with."""
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: GrammarBackend | None = None
    """vLLM's former field: the library that enforces this request's grammar. None: the server's."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class _Request(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both APIs share; `priority` and `cache_salt` are vLLM's."""

    schema_field: ClassVar[str] = "response_format.json_schema.schema"
    """Name of the parameter that holds the schema."""
    model: str
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None
    """vLLM's: names the request where no `x-request-id` does."""
    return_token_ids: bool = False
    """vLLM's: answers have `token_ids` and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool = False
    """vLLM's: logprobs name tokens `token_id:N`."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """As in vLLM: number of tokens to keep of a longer prompt; -1: as many as fit. `penstock.prompt` cuts."""
    truncation_side: Literal["left", "right"] | None = None
    """vLLM's: where a prompt is cut. None: left, which keeps its end."""
    add_special_tokens: bool | None = None
    """vLLM's: whether the tokenizer adds those that begin a text. None: for completions it does, for chats the template did."""
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's: another replica is to read this prompt's KV pages, or lends them."""
    user: str | None = None
    """Accepted and of no effect, as the rest of these are."""
    metadata: Metadata | None = None
    store: bool = False
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    """vLLM's."""


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`; `penstock.prompt` checks what makes the prompt."""

    prompt_field: ClassVar[str] = "messages"
    """What the client calls its prompt."""
    messages: Any
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Any = None
    """Checked with the messages, as all is that changes the prompt."""
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    """False: of several calls the first alone is given out."""
    include_reasoning: bool = True
    """vLLM's: false keeps what the reasoning parser finds from the client."""
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None
    mm_processor_kwargs: Any = None
    """Likewise."""
    add_generation_prompt: bool | None = None
    """None: unless the last message is continued."""
    continue_final_message: bool = False

    @property
    def forces_call(self) -> bool:
        """Whether the answer is to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def output_limit(self) -> int | None:
        """Tokens at most; None: as many as fit into the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """What the client calls its limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def generated(self) -> int:
        """Choices a prompt that are generated."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a token; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`; `penstock.prompt` checks the prompt."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: Any
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None: 16, as OpenAI has it, or what fits. 0 with `echo`: the prompt alone, with its logprobs."""
    max_completion_tokens: TokenCount | None = None
    """The same, by the name that chats have for it: llm-d's sidecar sets both."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    """The prompt begins the answer."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Number of generated choices. The `n` with the highest mean log-probability are the answer."""

    @property
    def output_limit(self) -> int | None:
        """Tokens at most; the engine always generates one."""
        if self.max_tokens == 0:
            return 1
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """What the client calls its limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def generated(self) -> int:
        """Choices a prompt that are generated."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a token; None: no logprobs."""
        return self.logprobs


_T = TypeVar("_T", bound=msgspec.Struct)

# Not supported, with the values that change nothing; `null` always is one. Anything else is refused.
_NEUTRAL_SHARED: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    # vLLM's, which its users' scripts may spell out.
    "ec_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
_NEUTRAL_CHAT = _NEUTRAL_SHARED | {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "return_prompt_text": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION = _NEUTRAL_SHARED | {"prompt_embeds": (), "suffix": ("",)}


def parse_json(data: bytes) -> dict[str, Any]:
    """The body as an object; `ApiError` 400 for anything else."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Checks everything but what makes the prompt; `ApiError` 400 names the field."""
    request = convert(read_guided(body), ChatRequest, _NEUTRAL_CHAT)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    _check_limits(request)
    check_tool_choice(request.tool_choice, request.tools)
    _check_stream(request, body)
    return request


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Checks everything but the prompt; `ApiError` 400 names the field."""
    request = convert(read_guided(body), CompletionRequest, _NEUTRAL_COMPLETION)
    _check_limits(request)
    _check_stream(request, body)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens of 0 needs echo: true", param="max_tokens")
    if request.echo and request.stream and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not given with stream: true", param="echo")
    if request.best_of is not None and request.best_of < request.n:
        raise ApiError(400, f"best_of is {request.best_of} and n is {request.n}; it must be at least n", param="best_of")
    if request.best_of is not None and request.best_of > request.n and request.stream:
        raise ApiError(400, "best_of above n is not given with stream: true", param="best_of")
    return request


def check_tool_choice(choice: ToolChoice, tools: Any) -> None:
    """Refuses a choice of tools where there are none; `ApiError` 400."""
    if choice not in (None, "none") and not tools:
        given = choice if isinstance(choice, str) else "of a function"
        raise ApiError(400, f"tool_choice {given} needs tools", param="tool_choice")


def _check_limits(request: ChatRequest | CompletionRequest) -> None:
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")


def _check_stream(request: _Request, body: Mapping[str, Any]) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not given with stream: true", param="prompt_logprobs")
    if body.get("stream_options") is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if request.stream_options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")


def convert(body: Mapping[str, Any], kind: type[_T], neutral: Mapping[str, tuple[Any, ...]]) -> _T:
    """The body as a struct; `ApiError` 400 names the field that is wrong, unknown or not supported."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in neutral:
            if value is not None and not any(type(value) is type(v) and value == v for v in _spellings(neutral[name])):
                raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        elif name not in kind.__struct_fields__:
            known = [*kind.__struct_fields__, *neutral]
            raise ApiError(400, f"there is no parameter {name}{suggestion(name, known)}", param=name, code="unknown_parameter")
        elif value is not None:  # null is absence
            fields[name] = value
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        wrong = explained(error, kind)
        raise ApiError(400, str(wrong), param=wrong.field or None) from None


def _spellings(values: tuple[Any, ...]) -> list[Any]:
    """0 may also be written 0.0; but `false` is no number."""
    return [*values, *(float(value) for value in values if type(value) is int)]
