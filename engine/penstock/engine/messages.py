"""What frontend and core say to each other (msgpack).

Requests are known by an integer that the frontend draws (`index`); the core answers with one columnar frame a step, so that
egress does not cost an object a token.
"""

from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.commands import Command
from penstock.engine.config import EngineConfig
from penstock.engine.core.wave import WaveEnd
from penstock.engine.grammar import Grammar
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.parallel.expert_group import CoreExperts
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import CoreStats


class FinishReason(IntEnum):
    """Why a request ended; `str` values for the API are in `FINISH_REASONS`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    IGNORED = 4
    """It can never run, since its prompt fills the context. Clients see an output of no tokens that was cut by its length."""
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
    address: str | None
    """The path of the Unix socket of the frontend that starts it, in a folder of its own; None: the frontend is on another node,
    at the other end of `stream`."""
    events_addresses: list[str]
    """Addresses of the event stream: the first free one is used. Empty: no event stream."""
    replay_addresses: list[str]
    """Addresses of the replay of batches: the first free one is used."""
    runner: str | None
    """`module:Class` of the model runner; None: the device's."""
    kv_events: KVEventsConfig | None = None
    """Where it publishes KV events in vLLM's form too; None: nowhere."""
    wave: WaveEnd | None = None
    """How it joins the steps of other cores; None: its steps are its own."""
    experts: CoreExperts | None = None
    """The core's place among those whose ranks divide experts; None: none do."""
    frontends_address: str | None = None
    """The path of the socket where further frontends connect, in the same folder; None: there are none."""
    stream: int | None = None
    """File descriptor of the connection between the frontend's node and the core's; None: they are on one node."""


FRONTEND_SHIFT = 40
"""`index` and `call_id` carry their frontend's number in the bits from here on; 0 is the one that started the core."""


class FrontendJoined(msgspec.Struct, frozen=True, tag="joined"):
    """The first word of a further frontend; answered by `CoreReady`."""

    frontend: int
    """From 1 on, never used again."""


class FrontendLeft(msgspec.Struct, frozen=True, tag="left"):
    """A further frontend has died: its requests end, and its last messages are dropped. Sent by the process that started the
    core."""

    frontend: int


class RemotePrefix(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a prompt whose KV pages another replica lends; see `kv_transfer_params`."""

    lease: str
    engine_id: str
    hosts: list[str]
    """By part of pages."""
    port: int
    fingerprint: str
    """What decides about the bytes of the pages there."""
    num_tokens: int
    num_blocks: list[int]
    """Blocks of each KV group."""
    optional: bool = False
    """Pages that do not fit are ignored. False: the request is refused."""


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
    """The tenant for fair sharing. Requests without a tenant share as one."""
    deadline: float | None = None
    """Unix time in seconds at which the answer is of no use any more."""
    lora_id: int = 0
    """The adapter, as `AdapterInfo` numbers it; 0: none."""
    input_complete: bool = True
    """False: more of the prompt comes with `ExtendPrompt`; until its last part is here the request waits."""
    grammar: Grammar | None = None
    """What its output must look like; None: anything. It needs the whole prompt at once."""
    images: list[ImageInput] = []
    """Images in the order of their placeholders."""
    remote: RemotePrefix | None = None
    """Pages that another replica lends; None: none."""
    lends: bool = False
    """Whether its prompt's pages are lent to another replica when it has ended."""


class ExtendPrompt(msgspec.Struct, frozen=True, tag="extend_prompt"):
    """More of a prompt that is still arriving. Ignored if the request has ended."""

    index: int
    token_ids: list[int]
    last: bool
    """The prompt is complete now."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """The clients are gone, or a stop string ended the text; unknown and finished indexes are ignored."""

    indexes: list[int]


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command, answered by the `ControlDone` of the same call; at once or when it is done, whatever else happens meanwhile."""

    call_id: int
    """Unique among the open calls of this frontend."""
    command: Command


CoreInput = AddRequest | ExtendPrompt | AbortRequests | Control | FrontendJoined | FrontendLeft


# --- core → frontend ---


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests can ask for."""

    lora_id: int
    """From 1 on. A reloaded adapter gets a new one."""
    name: str
    uri: str
    """Where it was read, as given."""
    revision: str | None


class AdaptersChanged(msgspec.Struct, frozen=True, tag="adapters"):
    """The adapters that requests can use from now on."""

    adapters: list[AdapterInfo]


class EventPorts(msgspec.Struct, frozen=True):
    """TCP ports of the event stream."""

    events: int
    replay: int


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The first forward pass has been made; sent once."""

    epoch: int
    max_model_len: int
    num_blocks: int
    load_seconds: dict[str, float]
    """Seconds of each phase of the start, in order: `imports`, `weights`, `memory`, `cache`, `warm_up`, `adapters`."""
    load_floor_s: float = 0.0
    """Seconds that reading the weights takes at least, at the bandwidth of their storage; 0: unknown, or nothing was read."""
    kernels: str = ""
    """The form of the model's operations in use."""
    adapters: list[AdapterInfo] = []
    event_ports: EventPorts | None = None
    """None: no event stream, or one that has no ports."""


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot start or cannot go on; the last message before its process ends."""

    message: str
    refused: bool = False
    """The start was refused by a `ConfigError`."""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request was scheduled for the first time in this step."""

    index: int
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""


QUEUE_FULL = "queue_full"
"""`Finished.code` of a request that the core refused at once because `max_num_waiting` others wait."""

TENANT_QUEUE_FULL = "tenant_queue_full"
"""The queue is full and its tenant has the most in it: the request was refused, or evicted before it ran."""

QUEUE_TIMEOUT = "queue_timeout"
"""It had not run at its deadline."""

REQUEST_TIMEOUT = "request_timeout"
"""It was running at its deadline."""


ADAPTER_GONE = "model_not_found"
"""Its adapter was unloaded."""

ADAPTER_FAILED = "adapter_failed"
"""Its adapter had to be read again, and that failed."""

GRAMMAR_REFUSED = "invalid_grammar"
"""Its grammar cannot be enforced."""

TRANSFER_REFUSED = "invalid_kv_transfer_params"
"""The pages that another replica lends do not fit."""

GRAMMAR_OPEN = "grammar_open"
"""`Finished.stop_reason` of an output that its limit cut before its grammar was at an end."""


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a prompt that another replica may read."""

    lease: str
    num_tokens: int
    blocks: list[list[int]]
    """Slots of the host's memory, of each KV group."""
    fingerprint: str
    engine_id: str
    """Of the core that lends: data-parallel ranks have addresses of their own."""
    hosts: list[str]
    """By part of pages: ranks may be on several nodes."""
    port: int
    """Of its first part of pages."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request ended in this step."""

    index: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, which is in `token_ids` too."""
    error: str | None = None
    code: str | None = None
    """A word for machines, of an error that `frontend.errors.engine_error` knows; None: a fault of the engine."""
    param: str | None = None
    """The request's field at fault."""
    stop_reason: str | None = None
    """Details of the reason, for the client: `GRAMMAR_OPEN`."""
    lent: Lent | None = None
    """Pages of its prompt that another replica may read."""


class LifecycleEvent(IntEnum):
    """A turn in a request's life, stamped in the core."""

    QUEUED = 1
    """It arrived. Its queue time begins."""
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


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of the requests that a step has ended, as pooled: neither cut nor normalised. Arrays as little-endian bytes."""

    indexes: bytes
    """int64 [m]: the requests."""
    size: int
    """Elements of each."""
    vectors: bytes
    """float32 [m, size]."""


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
    pooled: Pooled | None = None


class ControlDone(msgspec.Struct, frozen=True, tag="control_done"):
    """A command has been carried out, or could not be."""

    call_id: int
    result: Any = None
    """What the command's description says, as msgpack can carry it."""
    error: str | None = None
    """Why it was not carried out; None where it was."""


CoreOutput = CoreReady | CoreFailed | StepOutputs | CoreStats | AdaptersChanged | ControlDone


# --- the wire ---


def enc_hook(value: Any) -> Any:
    """What msgpack has no form for."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a message")


def dec_hook(kind: type, value: Any) -> Any:
    """Decode what `enc_hook` encodes."""
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
