"""The HTTP server: OpenAI's endpoints, and those by which gateway, operator and kubelet watch a replica."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final, get_args

import msgspec
import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from penstock.api import load_report
from penstock.api.headers import LOAD, LOAD_FORMAT, REQUEST_ID
from penstock.engine.frontend.async_llm import AsyncLLM, GenerationSpec, State
from penstock.engine.frontend.errors import ApiError, unavailable
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.protocol import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_json
from penstock.engine.frontend.requests import bad_word_tokens, check_prompts, sampling_params
from penstock.engine.frontend.responses import DONE, ChatFormat, CompletionFormat, Format
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 20 * 2**20
# Longer bodies are tokenized in a thread, where the streams of others do not wait for them.
_INLINE_BYTES = 4096
_MAX_REQUEST_ID = 256
_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_REQUEST_ID_KEY = web.RequestKey("request_id", str)
_LOAD_FORMAT_KEY = web.RequestKey("load_format", str)


class ApiServer:
    """The endpoints of one engine; `docs/design/contracts.md` lists them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._bundle = llm.processor.bundle.to_json()
        self._etag = llm.processor.bundle.digest
        self._registry = llm.metrics.registry()
        self._created = int(time.time())
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """The application; see `runner`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._boundary])
        app.on_response_prepare.append(self._add_headers)
        app.add_routes(
            [
                web.post(CHAT_PATH, self.chat_completions),
                web.post(COMPLETIONS_PATH, self.completions),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/load", self.load),
                web.get("/metrics", self.metrics),
                web.get("/prompt-bundle", self.prompt_bundle),
                web.get("/version", self.version),
            ]
        )
        return app

    def runner(self, shutdown_timeout: float) -> web.AppRunner:
        """What serves the application: a client's disconnect ends its request, and bodies come as they are.

        Args:
            shutdown_timeout: Seconds that handlers get when it is cleaned up.
        """
        return web.AppRunner(
            self.app(), handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=shutdown_timeout
        )

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self._active == 0

    async def drained(self) -> None:
        """Waits until no request is being answered."""
        await self._idle.wait()

    # --- OpenAI's endpoints ---

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        with self._counted():
            spec, params = await self._spec(request, CHAT_PATH, parse_chat)
            usage = params.stream_options.include_usage
            answer = ChatFormat(spec.request_id, self._llm.model.served_names[0], self._llm.vocabulary, usage)
            return await self._answer(request, spec, answer, usage)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        with self._counted():
            spec, params = await self._spec(request, COMPLETIONS_PATH, parse_completion)
            usage = params.stream_options.include_usage
            answer = CompletionFormat(spec.request_id, self._llm.model.served_names[0], self._llm.vocabulary, usage)
            return await self._answer(request, spec, answer, usage)

    async def models(self, _request: web.Request) -> web.Response:
        """`GET /v1/models`: every served name."""
        return _json({"object": "list", "data": [self._entry(name) for name in self._llm.model.served_names]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        return _json(self._entry(self._served(request.match_info["name"])))

    def _entry(self, name: str) -> dict[str, Any]:
        shared = {"object": "model", "created": self._created, "owned_by": "penstock"}
        return {"id": name, **shared, "max_model_len": self._llm.model.max_model_len}

    def _served(self, name: str) -> str:
        """The name, if it is one of this model's; else `ApiError` 404."""
        if name not in self._llm.model.served_names:
            raise ApiError(404, f"there is no model {name!r} here", param="model", code="model_not_found")
        return name

    async def _spec(
        self,
        request: web.Request,
        path: str,
        parse: Callable[[dict[str, Any]], ChatRequest] | Callable[[dict[str, Any]], CompletionRequest],
    ) -> tuple[GenerationSpec, ChatRequest | CompletionRequest]:
        """Reads and checks a request; `ApiError` for what cannot be served."""
        arrival = time.time()
        self._llm.require_ready()
        data = await _read(request)
        body = parse_json(data)
        params = parse(body)
        model, processor = self._llm.model, self._llm.processor
        self._served(params.model)
        try:
            if len(data) > _INLINE_BYTES:
                prompts = await asyncio.to_thread(processor.tokens_of, path, body)
            else:
                prompts = processor.tokens_of(path, body)
        except PromptError as error:
            raise ApiError.from_prompt(error) from None
        check_prompts(prompts, params, model.max_model_len)
        seed = self._llm.draw_seed()
        bad_words = bad_word_tokens(params.bad_words, processor.tokenizer)
        spec = GenerationSpec(
            request_id=request[_REQUEST_ID_KEY],
            prompts=prompts,
            # Equal prompts of a list differ, unless the client's seed says otherwise.
            sampling=[
                sampling_params(params, len(prompt), model, processor.vocab_size, seed + at * params.n, bad_words)
                for at, prompt in enumerate(prompts)
            ],
            n=params.n,
            stream=params.stream,
            stops=params.stops,
            client_stop_token_ids=frozenset(params.stop_token_ids),
            priority=params.priority,
            cache_salt=params.cache_salt,
            arrival=arrival,
        )
        return spec, params

    async def _answer(
        self, request: web.Request, spec: GenerationSpec, answer: Format, include_usage: bool
    ) -> web.StreamResponse:
        async with self._llm.generate(spec) as generation:
            if spec.stream:
                response = await _stream(request, generation, answer, include_usage)
            else:
                while not generation.finished:
                    await generation.changed()
                body = answer.full(generation.choices, generation.usage)
                response = web.Response(body=body, content_type="application/json")
            usage = generation.usage
            log.info(
                "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d finished=%s seed=%d seconds=%.3f",
                *(spec.request_id, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
                *(generation.finished, spec.sampling[0].seed, time.time() - spec.arrival),
            )
            return response

    # --- what watches a replica ---

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: liveness, by progress."""
        if (reason := self._llm.unhealthy()) is not None:
            raise ApiError(503, reason, "server_error", code="unhealthy")
        return _json({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`: readiness."""
        self._llm.require_ready()
        return _json({"status": "ready"})

    async def load(self, _request: web.Request) -> web.Response:
        """`GET /load`: the newest load report."""
        report = self._llm.load
        if report is None:
            raise unavailable("there is no load report yet", "not_ready")
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    async def metrics(self, _request: web.Request) -> web.Response:
        """`GET /metrics`: Prometheus."""
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def prompt_bundle(self, request: web.Request) -> web.Response:
        """`GET /prompt-bundle`: what the picker needs to count and hash tokens as this engine does."""
        known = request.if_none_match or ()
        fresh = any(tag.value in ("*", self._etag) for tag in known)
        response = web.Response(status=304) if fresh else web.Response(body=self._bundle, content_type="application/json")
        response.etag = self._etag
        return response

    async def version(self, _request: web.Request) -> web.Response:
        """`GET /version`."""
        return _json({"version": version("penstock")})

    # --- what all answers share ---

    @web.middleware
    async def _boundary(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the headers that every endpoint knows, and gives every error OpenAI's shape."""
        try:
            request[_REQUEST_ID_KEY] = _request_id(request)
            request[_LOAD_FORMAT_KEY] = _load_format(request)
            return await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            response = _http_error(error)
        except web.RequestPayloadError as error:
            response = ApiError(400, f"the body cannot be read: {error}").response()
        except Exception:
            log.exception("request failed: %s %s", request.method, request.path)
            response = ApiError(500, "an error inside the engine; its log says more", "server_error").response()
        if self._llm.state is not State.READY:
            response.force_close()  # a client's kept connection would lead it here again
        return response

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if (request_id := request.get(_REQUEST_ID_KEY)) is not None:
            response.headers[REQUEST_ID] = request_id
        form, report = request.get(_LOAD_FORMAT_KEY), self._llm.load
        if form and report is not None:
            response.headers[LOAD] = load_report.encode(report, msgspec.convert(form, load_report.Format))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """A request that a drain waits for."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()


async def _stream(request: web.Request, generation: Generation, answer: Format, include_usage: bool) -> web.StreamResponse:
    """Sends events as they come. What goes wrong before the first token is a status, later an event."""
    await generation.changed()
    response = web.StreamResponse(headers=_SSE)
    await response.prepare(request)
    opened: set[int] = set()
    try:
        while True:
            if data := _events(generation, answer, opened):
                await response.write(data)
            if generation.finished:
                break
            await generation.changed()
        await response.write((answer.usage_chunk(generation.usage) if include_usage else b"") + DONE)
    except ApiError as error:
        response.force_close()
        await response.write(b"data: " + error.body() + b"\n\n")
    await response.write_eof()
    return response


def _events(generation: Generation, answer: Format, opened: set[int]) -> bytes:
    """The events for everything that is new; adds to `opened` the choices that get their first."""
    events: list[bytes] = []
    for choice in generation.choices:
        if choice.num_tokens and choice.number not in opened:
            opened.add(choice.number)
            events.append(answer.first(choice.number))
        if (delta := choice.take()) is not None:
            events.append(answer.chunk(choice.number, delta))
    return b"".join(events)


async def _read(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        message = f"the body must be application/json, not {request.content_type}"
        raise ApiError(415, message, param="content-type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":  # unpacking could make any size out of little
        message = f"content-encoding {encoding} is not supported: send the body as it is"
        raise ApiError(415, message, param="content-encoding")
    return await request.read()


def _request_id(request: web.Request) -> str:
    """The client's, since events and logs name it, or a new one."""
    given = request.headers.get(REQUEST_ID)
    if given is None:
        return uuid.uuid4().hex
    if not given.isascii() or not given.isprintable() or not 0 < len(given) <= _MAX_REQUEST_ID:
        raise ApiError(400, f"{REQUEST_ID} must be 1 to {_MAX_REQUEST_ID} printable ASCII characters", param=REQUEST_ID)
    return given


def _load_format(request: web.Request) -> str:
    """The form of the load report asked for; empty: none."""
    given = request.headers.get(LOAD_FORMAT)
    if given is None:
        return ""
    if given.upper() not in get_args(load_report.Format):
        raise ApiError(400, f"{LOAD_FORMAT} must be TEXT, JSON or BIN", param=LOAD_FORMAT)
    return given.upper()


def _http_error(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals."""
    message = {
        404: "there is no such endpoint",
        405: "the endpoint has no such method",
        413: f"the body is larger than {MAX_BODY_BYTES} bytes",
    }.get(error.status, error.reason)
    response = ApiError(error.status, message).response()
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
