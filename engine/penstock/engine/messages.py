"""What frontend and core say to each other over ZMQ (msgpack).

Requests are known by an integer that the frontend draws (`index`); the core answers with one columnar frame a step, so that
egress does not cost an object a token.
"""

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from penstock.api.load_report import LoadReport
from penstock.engine.config import EngineConfig
from penstock.engine.cost import StepCost
from penstock.engine.sampling import SamplingParams


class FinishReason(IntEnum):
    """Why a request ended; `str` values for the API are in `FINISH_REASONS`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    IGNORED = 4
    """It could never run, since its prompt fills the context; to clients that is an output of no tokens cut by its length."""
    REPETITION = 5


FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.IGNORED: "length",
    FinishReason.REPETITION: "repetition",
}


# --- frontend → core ---


class CoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """How a core starts: the first thing on its standard input, which the frontend then keeps open. Its end is the frontend's
    end, and the core's."""

    config: EngineConfig
    engine_index: int
    address: str
    """The frontend's ROUTER socket; the core's DEALER has the identity `core_identity(engine_index)`."""
    events_address: str | None
    """Where the event stream is published; None: nowhere."""
    replay_address: str | None
    runner: str
    """`module:Class` of the model runner."""
    frontends_address: str | None = None
    """The core's ROUTER for further frontends; None: the one that starts it is the only one."""


FRONTEND_SHIFT = 40
"""`index` and `call_id` carry their frontend's number in the bits from here on; 0 is the one that started the core."""


class FrontendJoined(msgspec.Struct, frozen=True, tag="joined"):
    """The first word of a further frontend; answered by `CoreReady`."""

    frontend: int
    """From 1 on, never used again."""


class FrontendLeft(msgspec.Struct, frozen=True, tag="left"):
    """A further frontend has died: its requests end, and what it said last is not heard. Said by whoever started the core."""

    frontend: int


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """One sequence to generate; `n` choices of a client's request are `n` of these."""

    index: int
    """Unique among the live requests of this frontend."""
    request_id: str
    """The client's `x-request-id`, for events and logs."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    """Unix time in seconds."""
    priority: int = 0
    """Smaller is served first; ties by arrival."""
    cache_salt: str | None = None
    tenant: str = ""
    """Among whom service is shared fairly; requests that name none are one tenant together."""
    deadline: float | None = None
    """Unix time in seconds at which the answer is of no use any more."""
    input_complete: bool = True
    """False: more of the prompt comes with `ExtendPrompt`; until its last part is here the request waits."""


class ExtendPrompt(msgspec.Struct, frozen=True, tag="extend_prompt"):
    """More of a prompt that is still arriving; of no effect where the request has ended."""

    index: int
    token_ids: list[int]
    last: bool
    """The prompt is complete now."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """The clients are gone, or a stop string ended the text; unknown and finished indexes are ignored."""

    indexes: list[int]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached block; refused while requests hold any."""

    reset_running_requests: bool = False
    """Take the blocks from those that hold them; they compute their tokens anew."""


class PinPrefix(msgspec.Struct, frozen=True, tag="pin_prefix"):
    """Keep what is cached of these tokens, in full blocks, from being evicted; a forced reset, sleep and new weights end it.
    Refused where nothing of them is cached, the name is taken, or a sequence of full length would no longer fit. The result's
    `tokens`: how many are pinned."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]
    cache_salt: str | None = None
    """As the requests that are to find them say it."""
    tenant: str = ""


class UnpinPrefix(msgspec.Struct, frozen=True, tag="unpin_prefix"):
    """Let a pinned prefix go."""

    name: str


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests when the engine pauses: `abort` ends all with a retriable error; `wait` lets running ones finish;
`keep` stops running ones where they are. Those that `wait` and `keep` leave go on after the pause, as do those that come during
it."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Make no step until `Resume`; done when nothing runs any more."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Forget every cached block too, those of requests that `keep` keeps included."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on after a pause; refused while asleep. A `Pause` that still waits is answered with an error."""


Tag = Literal["weights", "kv_cache"]
"""Memory that sleeps and wakes by itself."""
TAGS: tuple[Tag, ...] = get_args(Tag)


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Pause, forget the KV cache and give its memory back; at level 2 also the weights'. New requests are refused meanwhile."""

    level: Literal[1, 2] = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Undo `Sleep`, for some of the memory or all; with the last of it the engine goes on. After level 2 the weights' memory is
    there and empty: `ReloadWeights` fills it."""

    tags: tuple[Tag, ...] = TAGS


class ReloadWeights(msgspec.Struct, frozen=True, tag="reload_weights"):
    """Read the weights again, between two steps. Running requests go on with the new ones and compute their tokens anew."""

    path: str | None = None
    """A checkpoint of the same architecture and shapes; None: the one that was read last."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Profile every step from now on."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile; its result is `{"path": …}`, the trace's file on the core's machine."""


Command = (
    ResetPrefixCache | PinPrefix | UnpinPrefix | Pause | Resume | Sleep | WakeUp | ReloadWeights | StartProfile | StopProfile
)
"""What a core can be told to do: carried out by `core.control.controls`, between two steps."""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command, answered by the `ControlDone` of the same call; at once or when it is done, whatever else happens meanwhile."""

    call_id: int
    """Unique among the open calls of this frontend."""
    command: Command


CoreInput = AddRequest | ExtendPrompt | AbortRequests | Control | FrontendJoined | FrontendLeft


# --- core → frontend ---


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The first forward pass has been made; sent once."""

    epoch: int
    max_model_len: int
    num_blocks: int
    load_seconds: float
    kernels: str = ""
    """Which form of the model's operations runs."""


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot start or cannot go on; the last message before its process ends."""

    message: str
    refused: bool = False
    """It was asked for what cannot be: a `ConfigError` there."""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request was scheduled for the first time in this step."""

    index: int
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    scheduled_time: float
    """Unix time in seconds; queue time ends here."""


QUEUE_FULL = "queue_full"
"""`Finished.code` of a request that the core refused at once because `max_num_waiting` others wait."""

TENANT_QUEUE_FULL = "tenant_queue_full"
"""Of one that was refused, or sent away before it ran, because the queue is full and its tenant has the most in it."""

QUEUE_TIMEOUT = "queue_timeout"
"""Of one that had not run when its deadline came."""

REQUEST_TIMEOUT = "request_timeout"
"""Of one that had begun to run by then."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request ended in this step."""

    index: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, which is in `token_ids` too."""
    error: str | None = None
    code: str | None = None
    """A word for machines, of an error that is the engine's and not the request's: it is retriable elsewhere."""


class LifecycleEvent(IntEnum):
    """A turn in a request's life, stamped in the core."""

    QUEUED = 1
    """It came; queue time begins."""
    SCHEDULED = 2
    """It took a row, for the first time or again after a preemption."""
    PREEMPTED = 3
    """It lost its row and waits again."""


class Lifecycle(msgspec.Struct, frozen=True, array_like=True):
    """Columns of what happened to requests since the last frame, in the order in which it happened; nothing is said of those to
    which nothing happened. A request's times never fall. Arrays as little-endian bytes."""

    indexes: bytes
    """int64 [e]: the requests."""
    events: bytes
    """uint8 [e]: `LifecycleEvent`."""
    times: bytes
    """float64 [e]: Unix time in seconds."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Columns parallel to the frame's tokens, of the requests that asked: arrays as little-endian bytes."""

    positions: bytes
    """int32 [m]: which tokens of the frame."""
    sampled: bytes
    """float32 [m]: natural logarithm of the sampled token's probability."""
    ranks: bytes
    """int32 [m]: the sampled token's rank, 0 for the likeliest."""
    width: int
    """k: alternatives a token."""
    top_ids: bytes
    """int32 [m, k], likeliest first; -1 pads."""
    top_logprobs: bytes
    """float32 [m, k]."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Columns of prompt tokens, of the requests that asked: arrays as little-endian bytes. A request that was preempted sends
    them again."""

    indexes: bytes
    """int64 [p]: the requests."""
    positions: bytes
    """int32 [p]: of the token in its prompt."""
    token_ids: bytes
    """int32 [p]."""
    logprobs: bytes
    """float32 [p]: natural logarithm of the token's probability."""
    ranks: bytes
    """int32 [p]: 0 for the likeliest."""
    width: int
    """k: alternatives a token."""
    top_ids: bytes
    """int32 [p, k], likeliest first; -1 pads."""
    top_logprobs: bytes
    """float32 [p, k]."""


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """What one step produced, for all requests of one frontend. Arrays are little-endian bytes."""

    engine_index: int
    step_id: int
    time: float
    """Unix time in seconds."""
    indexes: bytes
    """int64 [r]: the requests with new tokens."""
    offsets: bytes
    """int32 [r + 1]: request i has tokens `token_ids[offsets[i]:offsets[i + 1]]` (CSR)."""
    token_ids: bytes
    """int32 [offsets[-1]]."""
    started: list[Started]
    finished: list[Finished]
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    lifecycle: Lifecycle | None = None


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """A histogram; its bounds are those of `core.measure.step_meter`."""

    counts: list[int]
    """One a bucket; the last has no upper bound."""
    total: float
    """Sum of the values."""


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """What the core's steps have been since its start."""

    seconds: Buckets
    tokens: Buckets
    """Tokens that a step computed."""
    sampled_tokens: int
    """Rows that passed the LM head for a next token, whether or not it could be used."""
    not_finite: int
    """Requests that failed because their logits were not finite."""
    cost: StepCost | None
    """Estimated; None: the model's shape is not known."""


class CoreStats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent on change, at most every 50 ms, and once a second while idle: the proof that the step loop turns."""

    report: LoadReport
    steps: int
    """Steps since the start."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache since the start."""
    prefix_hits: int
    """Prompt tokens found there since the start."""
    preempted_tokens: int = 0
    """Tokens whose KV preempted requests gave up, since the start."""
    resumed_cached_tokens: int = 0
    """Tokens that the prefix cache supplied to those requests when they ran again."""
    step: StepStats | None = None
    paused: bool = False
    """Requests wait until somebody resumes."""
    asleep: str | None = None
    """Why no request is taken, and what ends that; None: awake."""
    command: str | None = None
    """What the core does next, saying nothing until it is done; None: steps."""


class ControlDone(msgspec.Struct, frozen=True, tag="control_done"):
    """A command has been carried out, or could not be."""

    call_id: int
    result: Any = None
    """What the command's description says, as msgpack can carry it."""
    error: str | None = None
    """Why it was not carried out; None where it was."""


CoreOutput = CoreReady | CoreFailed | StepOutputs | CoreStats | ControlDone


# --- the wire ---


def core_identity(engine_index: int) -> bytes:
    """The ZMQ identity of a core."""
    return engine_index.to_bytes(2, "little")


def enc_hook(value: Any) -> Any:
    """What msgpack has no form for."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a message")


def dec_hook(kind: type, value: Any) -> Any:
    """Its inverse."""
    if kind is Path:
        return Path(value)
    raise TypeError(f"{kind.__name__} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_start_decoder = msgspec.msgpack.Decoder(CoreStart, dec_hook=dec_hook)
_input_decoder = msgspec.msgpack.Decoder(CoreInput)
_output_decoder = msgspec.msgpack.Decoder(CoreOutput)


def encode(message: CoreStart | CoreInput | CoreOutput) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_start(data: bytes) -> CoreStart:
    """The inverse of `encode`; raises `msgspec.MsgspecError` on anything else, as the next two do."""
    return _start_decoder.decode(data)


def decode_input(data: bytes) -> CoreInput:
    """A message from the frontend."""
    return _input_decoder.decode(data)


def decode_output(data: bytes) -> CoreOutput:
    """A message from the core."""
    return _output_decoder.decode(data)
