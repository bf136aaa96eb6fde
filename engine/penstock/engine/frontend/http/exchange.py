"""What the handlers of all endpoints share: reading a request, writing JSON, and the count of requests being answered."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from penstock.api.headers import PRIORITY, REQUEST_ID, TENANT, TIMEOUT
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import MAX_REQUEST_ID
from penstock.engine.multimodal.reader import Fetched

MAX_BODY_BYTES: Final = 20 * 2**20
MAX_TENANT: Final = 256


class Asked(NamedTuple):
    """A request with images, for a replica that computes its prompt."""

    body: Mapping[str, Any]
    """As it came."""
    fetched: Sequence[Fetched]
    """Files of its images that this replica has fetched."""


ASKED_KEY = web.RequestKey("asked", Asked)
REQUEST_ID_KEY = web.RequestKey("request_id", str)
"""The request's name in events and logs: the client's, or one that the server has drawn."""
RANK_KEY = web.RequestKey("data_parallel_rank", int)
"""The data-parallel rank that a request has named."""
PICKED_KEY = web.RequestKey("picked_rank", int)
"""The data-parallel rank that runs a request."""


async def read_json(request: web.Request) -> bytes:
    """The body, as it was sent; `ApiError` 415 for what is not plain JSON."""
    if request.content_type != "application/json":
        message = f"the body must be application/json, not {request.content_type}"
        raise ApiError(415, message, param="content-type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":  # unpacking could make any size out of little
        message = f"content-encoding {encoding} is not supported: send the body as it is"
        raise ApiError(415, message, param="content-encoding")
    return await request.read()


def header_request_id(request: web.Request) -> str:
    """The client's, since events and logs name it, or a new one; `ApiError` 400 for one that no header could give back."""
    given = request.headers.get(REQUEST_ID)
    return uuid.uuid4().hex if given is None else _checked_request_id(given, REQUEST_ID)


def name_request(request: web.Request, given: str | None) -> None:
    """Takes the name that a body gives where no header has given one; `ApiError` 400 as of a header's."""
    if given is not None:
        name = _checked_request_id(given, "request_id")
        if REQUEST_ID not in request.headers:
            request[REQUEST_ID_KEY] = name


def _checked_request_id(given: str, param: str) -> str:
    if not given.isascii() or not given.isprintable() or not 0 < len(given) <= MAX_REQUEST_ID:
        raise ApiError(400, f"{param} must be 1 to {MAX_REQUEST_ID} printable ASCII characters", param=param)
    return given


def tenant(request: web.Request) -> str:
    """Return the tenant that the gateway names; empty: none."""
    name = request.headers.get(TENANT, "")
    if not name.isascii() or (name and not name.isprintable()) or len(name) > MAX_TENANT:
        raise ApiError(400, f"{TENANT} must be at most {MAX_TENANT} printable ASCII characters", param=TENANT)
    return name


def priority(request: web.Request) -> int | None:
    """What the request goes by, as the gateway says; None: it says nothing."""
    given = request.headers.get(PRIORITY)
    if given is None:
        return None
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise ApiError(400, f"{PRIORITY} must be a whole number of nine digits at most", param=PRIORITY)
    return int(given)


def deadline(request: web.Request, arrival: float) -> float | None:
    """When the client stops waiting, Unix time in seconds; None: it does not say."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and int(given[:10]) > 0 and len(given) <= 10):
        raise ApiError(400, f"{TIMEOUT} must be a whole number of milliseconds from 1 on, of ten digits at most", param=TIMEOUT)
    return arrival + int(given) / 1000


def json_response(body: Any) -> web.Response:
    """200 with JSON."""
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def is_gone(request: web.Request) -> bool:
    """Whether the client has closed its connection. The handler is about to be cancelled."""
    return request.transport is None or request.transport.is_closing()


class Active:
    """Requests that are being answered: a drain waits for them."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """How many there are, streams until their last chunk included."""
        return self._count

    @property
    def idle(self) -> bool:
        """Whether there are none."""
        return self._count == 0

    async def drained(self) -> None:
        """Waits until there are none."""
        await self._idle.wait()

    @asynccontextmanager
    async def answering(self, request: web.Request) -> AsyncIterator[None]:
        """One more, for as long as the context lasts. It begins when the body is here: a drain does not wait for a client that
        has not finished asking. Raises as `read_json` does, which gives the same body again."""
        await read_json(request)
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._idle.set()
