"""What the Envoy wire and the director say to each other: a request, its destination or its refusal, its response."""

import functools
from collections.abc import Sequence

import msgspec

from penstock.api import headers
from penstock.api.tracing import TRACEPARENT
from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.subset import Subset
from penstock.gateway.picker.usual import Made

READ = frozenset(
    (
        *(":method", ":path", "authorization", *headers.API_KEYS, "content-encoding", "content-length"),
        *(headers.REQUEST_ID, headers.DECISION, headers.TIMEOUT, TRACEPARENT),
        *(":status", "content-type", *headers.LOADS, headers.RETRIABLE, headers.DATA_PARALLEL_RANK),
    )
)
"""The headers that anybody here looks at, of requests and of responses: our own Envoy sends no others, and no others are read."""
LOGGED: tuple[str, ...] = (
    headers.BOOKING,
    "model",
    headers.NAME,
    "tenant",
    "policy",
    "score",
    "prompt_tokens",
    "resident_tokens",
    "waited_ms",
)
"""Notes of each request that our own Envoy gets."""
MAX_NAME = 256
SHUTTING_DOWN = "shutting_down"
"""Why a gateway process that is going refuses what it has not decided."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request that the gateway asks about."""

    headers: dict[str, str]
    """Request headers in `READ`, with lower-case names."""
    body: bytes = b""
    subset: Subset | None = None
    inference_pool: str | None = None
    """`InferencePool.id` by whose port the request came; None: by the gateway's own."""
    traceparent: str | None = None
    """Trace context of the exchange with the picker, if the gateway traces it."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.headers.get(":method", "")

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.headers.get(":path", "").partition("?")[0]


class Routed(msgspec.Struct, kw_only=True):
    """The destination of a request. Nothing changes once it was sent on, but that `choice` goes."""

    endpoints: list[str]
    """`ip:port` in order of preference."""
    pool: str | None
    """The Envoy cluster; None where a foreign gateway has its own."""
    booking: Booking
    model: str
    """`Model.id` of what serves it."""
    name: str
    """What serves it, as engines call it."""
    came: float
    """When the request was complete; monotonic seconds."""
    tenant: str = ""
    """Name of the tenant; empty if the gateway does not tell clients apart."""
    adapter: str | None = None
    """The LoRA adapter that it names."""
    choice: Made | None = None
    """What made it, until the request has been sent on: it has figures of all replicas, and there may be many requests underway.
    None from then on, and where nobody chose among replicas."""
    prompt_tokens: int = 0
    decided: float = 0.0
    """When it was picked; monotonic seconds."""
    finishes: int = 1
    """How many ends its engine will tell: one for each answer to each prompt."""
    prefill_booking: Booking | None = None
    """Booking at the replica that computes the prompt."""
    explanation: str | None = None
    """Why, where the client asked."""
    request_id: str | None = None
    """Made up here, where the request came without one."""
    named: str | None = None
    """What our own Envoy calls it when it tells of its response and of its end; None: another gateway asks."""
    sets: list[tuple[str, str]] = []
    """More request headers for the replica."""
    removes: tuple[str, ...] = ()
    """Request headers that the replica does not get to see."""
    body: bytes | None = None
    """What goes on instead of the client's body; None where that goes on unchanged."""

    @property
    def usual(self) -> bool:
        """Whether it goes on as nearly all do that our own Envoy asks about: with its destination, and `notes`."""
        return (
            self.named is not None
            and self.pool is not None
            and self.choice is not None
            and self.prefill_booking is None
            and self.explanation is None
            and self.request_id is None
            and not self.sets
            and not self.removes
        )

    @property
    def notes(self) -> tuple[str | float, ...]:
        """The values of `LOGGED`. The request is `named`, and has a choice."""
        named, choice = self.named, self.choice
        assert named is not None
        assert choice is not None
        return (
            *(named, self.model, printable(self.name), self.tenant, choice.policy, choice.scores[0], self.prompt_tokens),
            *(choice.resident_tokens, round((self.decided - self.came) * 1e6) / 1e3),
        )

    @property
    def log(self) -> dict[str, str | float]:
        """What our own Envoy's access log shows of the decision, and comes back with the response: names and figures, nothing of
        the prompt."""
        if self.named is None or self.choice is None:
            return {}
        log = dict(zip(LOGGED, self.notes, strict=True))
        if self.explanation is not None:
            log[headers.REASONS] = self.explanation
        return log


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway answers itself."""

    status: int
    body: bytes
    headers: list[tuple[str, str]] = []
    reason: str = "answered"


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a replica's response."""

    headers: dict[str, str]
    served: str | None = None
    """`ip:port` of who really answered, where the gateway says so."""

    @property
    def streams(self) -> bool:
        """Whether the response is an event stream."""
        kind = self.headers.get("content-type", "")
        return kind.partition(";")[0].strip().lower() == "text/event-stream"


class Refused(Exception):
    """A request that goes nowhere, as an HTTP error in OpenAI's shape.

    Args:
        status: HTTP status.
        message: A sentence for people.
        reason: A word for machines, in a header and a metric.
        param: The request field at fault.
        code: OpenAI's `code`; `reason` where there is none.
        retry_after_s: Whole seconds after which trying again makes sense.
        sets: Further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        reason: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        sets: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.code = code or reason
        self.retry_after_s = retry_after_s
        self.sets = sets
        self.tenant: str | None = None
        """Name of the tenant, once it is known."""
        self.model: str | None = None
        """`Model.id` of what it asked for, as far as that was found."""


@functools.lru_cache(maxsize=1024)
def printable(name: str) -> str:
    """A name as the value of a header: that of an open pool is whatever a client has called it."""
    if len(name) <= MAX_NAME and name.isascii() and name.isprintable():
        return name
    return "".join(letter if " " <= letter <= "~" else "?" for letter in name[:MAX_NAME])
