"""A way to the API server that can be made worse: it dawdles, refuses, fails, conflicts, forgets, hangs up, is silent or away."""

import asyncio
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
from aiohttp import web

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""What to answer instead; None: what the API server does."""
HOP_BY_HOP = {"connection", "content-length", "transfer-encoding", "host", "keep-alive"}
WRITES = {"POST", "PUT", "PATCH", "DELETE"}


@dataclass(frozen=True)
class Seen:
    """One request, and how it was answered."""

    at: float
    """As time.monotonic()."""
    method: str
    path: str
    status: int


def failure(status: int, reason: str) -> dict[str, object]:
    """As the API server says no."""
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status, "message": "a fault"}


def refusal(status: int, reason: str, **headers: str) -> web.Response:
    """The answer that says no."""
    return web.json_response(failure(status, reason), status=status, headers=headers)


async def healthy(_: web.Request) -> None:
    """Nothing is wrong."""


async def slow(_: web.Request) -> None:
    """A second and a half before each request."""
    await asyncio.sleep(1.5)


async def silent(_: web.Request) -> None:
    """No answer, ever."""
    await asyncio.Event().wait()


def sometimes(what: Callable[[web.Request], web.Response | None], share: float) -> Fault:
    """That answer for a share of all requests. Leases are spared, as the API server's own priorities spare them."""
    random = Random(7)

    async def fault(request: web.Request) -> web.Response | None:
        return what(request) if random.random() < share and "/leases" not in request.path else None

    return fault


def busy(_: web.Request) -> web.Response:
    """429."""
    return refusal(429, "TooManyRequests", **{"Retry-After": "1"})


def failing(_: web.Request) -> web.Response:
    """500."""
    return refusal(500, "InternalError")


def conflicting(request: web.Request) -> web.Response | None:
    """409 for what writes."""
    return refusal(409, "Conflict") if request.method in WRITES else None


async def cut(request: web.Request) -> None:
    """Each connection breaks after two seconds, watches and all."""
    if request.transport is not None:
        asyncio.get_running_loop().call_later(2.0, request.transport.abort)


async def away(request: web.Request) -> web.Response:
    """Nobody answers: the connection ends at once."""
    if request.transport is not None:
        request.transport.abort()
    return refusal(503, "Away")  # to nobody


def expired() -> Fault:
    """410 to every second watch of a collection, by turns after it has begun and instead of it; lists come in pages of two, and
    the first continuation of each is answered with 410 as well."""
    watches, pages = Counter[str](), Counter[str]()

    async def fault(request: web.Request) -> web.StreamResponse | None:
        if "continue" in request.query:
            pages[request.path] += 1
            if pages[request.path] == 1:
                return refusal(410, "Expired")
        if "watch" not in request.query:
            request["target"] = request.raw_path.replace("limit=500", "limit=2")
            return None
        watches[request.path] += 1
        match watches[request.path] % 4:
            case 1:
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(json.dumps({"type": "ERROR", "object": failure(410, "Expired")}).encode() + b"\n")
                return response
            case 3:
                return refusal(410, "Expired")
            case _:
                return None

    return fault


class Way:
    """Plain HTTP on a port of this machine, to the API server; runs in a thread of its own from start() to stop()."""

    def __init__(self, url: str, authority: Path) -> None:
        """
        Args:
            url: The API server's.
            authority: Certificate of who vouches for it.
        """
        self.seen: list[Seen] = []
        self.url = ""
        self._fault: Fault = healthy
        self._target = url
        self._trust = ssl.create_default_context(cafile=authority)
        self._open: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Sets `url`."""
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(timeout=10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def turn(self, fault: Fault) -> None:
        """From now on things go like that. What is open is cut, so that nobody goes on with a watch from before."""

        def turn() -> None:
            self._fault = fault
            for transport in self._open:
                transport.abort()

        self._loop.call_soon_threadsafe(turn)

    async def _serve(self) -> str:
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, trust_env=False)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:  # gone already
            raise ConnectionResetError
        self._open.add(transport)
        try:
            answer = await self._fault(request) or await self._pass_on(request)
        finally:
            self._open.discard(transport)
        self.seen.append(Seen(time.monotonic(), request.method, request.path, answer.status))
        return answer

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        kept = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        asked = self._session.request(
            request.method,
            self._target + request.get("target", request.raw_path),
            headers=kept,
            data=await request.read() or None,
            skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
            ssl=self._trust,
        )
        async with asked as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
