"""Model servers of the suite's own: they say what reached them, and answer what pickers poll."""

import asyncio
import contextlib
import hashlib

import orjson
from aiohttp import web

MAX_BODY_BYTES = 64 * 1024 * 1024
EVENTS = 5
EVENT_GAP_S = 0.05


class Steps:
    """Sends one event after another, each when the client has seen the one before. A proxy that holds an event back stalls the
    stream."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen = asyncio.Semaphore(0)
        self.stalled_at: int | None = None
        """The first event that was not seen before its successor had to be sent all the same."""

    def saw(self) -> None:
        """The client has one more event."""
        self._seen.release()

    async def wait(self, number: int) -> None:
        """Wait until the client has seen event `number`. Return at once if the stream has stalled."""
        if self.stalled_at is not None:
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await self._seen.acquire()
        except TimeoutError:
            self.stalled_at = number


class Backend:
    """One server at an address that the picker knows.

    It answers a POST with JSON: `endpoint`, `method`, `path`, `headers` (pairs, in order), `length` and digests of the body. If
    the
    request has the header `x-conformance-events`, it answers with events: each when the one before was seen (`stepwise`), or one
    every `EVENT_GAP_S`.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self.endpoint = endpoint
        self.steps: Steps | None = None
        self._model = model
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens; OSError where the address is taken or not this machine's."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._echo)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        host, _, port = self.endpoint.rpartition(":")
        await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()

    async def stop(self) -> None:
        """Refuses connections from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "conformance"}
        return web.json_response({"object": "list", "data": [entry], "endpoint": self.endpoint, **_seen(request, b"")})

    async def _metrics(self, _: web.Request) -> web.Response:
        """An idle server, in the names that pickers look for."""
        label = f'{{model_name="{self._model}"}}'
        gauges = {"num_requests_waiting": 0, "num_requests_running": 0, "kv_cache_usage_perc": 0, "gpu_cache_usage_perc": 0}
        lines = [f"# TYPE vllm:{name} gauge\nvllm:{name}{label} {value}\n" for name, value in gauges.items()]
        return web.Response(text="".join(lines))

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if (pace := request.headers.get("x-conformance-events")) is not None:
            return await _events(request, self.steps if pace == "stepwise" else None)
        return web.json_response({"endpoint": self.endpoint, **_seen(request, body)})


def _seen(request: web.Request, body: bytes) -> dict[str, object]:
    return {
        "method": request.method,
        "path": request.path_qs,
        "headers": [[name.decode("latin-1").lower(), value.decode("latin-1")] for name, value in request.raw_headers],
        "length": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "json_sha256": json_digest(body),
    }


def json_digest(body: bytes) -> str | None:
    """What the JSON in `body` is known by, however it is written; None where it is none."""
    try:
        canonical = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        return None
    return hashlib.sha256(canonical).hexdigest()


async def _events(request: web.Request, steps: Steps | None) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    with contextlib.suppress(ConnectionResetError):  # clients that leave are part of a check
        await response.prepare(request)
        for number in range(EVENTS):
            await response.write(b'data: {"n": %d}\n\n' % number)
            await (asyncio.sleep(EVENT_GAP_S) if steps is None else steps.wait(number))
        await response.write_eof()
    return response
