"""What the Envoy wire and the director say to each other: a request, its destination or its refusal, its response."""

import msgspec

from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.subset import Subset


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request that the gateway asks about. Header names are lower case."""

    headers: dict[str, str]
    body: bytes = b""
    subset: Subset | None = None

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.headers.get(":method", "")

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.headers.get(":path", "").partition("?")[0]


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes."""

    endpoints: list[str]
    """`ip:port` in order of preference."""
    pool: str
    booking: Booking
    explanation: str | None = None
    """Why, where the client asked."""
    request_id: str | None = None
    """Made up here, where the request came without one."""


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


class Refused(Exception):
    """A request that goes nowhere, as an HTTP error in OpenAI's shape.

    Args:
        status: HTTP status.
        message: A sentence for people.
        reason: A word for machines, in a header and a metric.
        param: The request field at fault.
        code: OpenAI's `code`; `reason` where there is none.
        retry_after_s: Whole seconds after which trying again makes sense.
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.code = code or reason
        self.retry_after_s = retry_after_s
