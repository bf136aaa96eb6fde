"""The HTTP server: what all endpoints share. The endpoints themselves are in `routes/`, one file an audience."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, get_args

import msgspec
from aiohttp import web

from penstock.api import load_report
from penstock.api.headers import DATA_PARALLEL_RANK, LOAD, LOAD_FORMAT, REQUEST_ID
from penstock.engine.frontend.async_llm import AsyncLLM, State
from penstock.engine.frontend.data_parallel import header_rank
from penstock.engine.frontend.errors import ApiError, internal_error
from penstock.engine.frontend.http.connection import Runner
from penstock.engine.frontend.http.cors import Cors
from penstock.engine.frontend.http.exchange import (
    MAX_BODY_BYTES,
    PICKED_KEY,
    RANK_KEY,
    REQUEST_ID_KEY,
    Active,
    header_request_id,
    is_gone,
)
from penstock.engine.frontend.http.keys import ApiKeys
from penstock.engine.frontend.http.prefill import Prefill
from penstock.engine.frontend.http.routes.adapters import AdapterRoutes
from penstock.engine.frontend.http.routes.control import ControlRoutes
from penstock.engine.frontend.http.routes.embeddings import EmbeddingRoutes
from penstock.engine.frontend.http.routes.openai import OpenAIRoutes
from penstock.engine.frontend.http.routes.replica import ReplicaRoutes
from penstock.engine.frontend.http.routes.tokens import TokenRoutes
from penstock.engine.frontend.http.settings import ApiSettings
from penstock.engine.frontend.http.tls import check_certificate
from penstock.engine.frontend.observe.traces import Traces
from penstock.engine.frontend.openai.kv_transfer import KVTransfer

log = logging.getLogger(__name__)

_LOAD_FORMAT_KEY = web.RequestKey("load_format", str)
_CORS_KEY = web.AppKey("cors", Cors)


class _Routes(Protocol):
    def routes(self) -> list[web.RouteDef]: ...


class ApiServer:
    """The endpoints of one engine; `docs/design/contracts.md` lists them.

    Args:
        llm: The engine.
        settings: Parsers and keys; None: neither.
        vllm_names: Whether metrics also have vLLM's names.
        traces: Receives requests' spans; None: no tracing.
        control: Whether it can be paused, put to sleep and reloaded over HTTP.
        admin_apart: Whether endpoints that change the engine are in `admin_app` instead of `app`.
        transfer: How KV pages go to other replicas; None: they do not.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ApiSettings | None = None,
        vllm_names: bool = False,
        *,
        control: bool = False,
        traces: Traces | None = None,
        admin_apart: bool = False,
        transfer: KVTransfer | None = None,
    ) -> None:
        settings = settings or ApiSettings()
        self._llm = llm
        self._keys = ApiKeys(settings.api_keys)
        self._cors = Cors(settings.allowed_origins)
        self._asks_certificates = settings.tls is not None and settings.tls.clients is not None
        self.active = Active()
        self._admin: list[_Routes] = [
            *([ControlRoutes(llm)] if control else []),
            *([AdapterRoutes(llm)] if settings.runtime_lora_updating else []),
        ]
        self._prefill = Prefill(llm, transfer)
        self._routes: list[_Routes] = [
            OpenAIRoutes(llm, self.active, settings.parsers, self._prefill, traces),
            EmbeddingRoutes(llm, self.active, traces),
            TokenRoutes(llm),
            ReplicaRoutes(llm, self.active, vllm_names),
            *([] if admin_apart else self._admin),
        ]

    def app(self) -> web.Application:
        """The application; see `runner`."""
        app = self._app(self._routes, self._cors)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _app: web.Application) -> None:
        await self._prefill.close()

    def admin_app(self) -> web.Application:
        """What changes the engine, for a port that fewer people reach."""
        return self._app(self._admin, Cors(()))

    def _app(self, all_routes: Sequence["_Routes"], cors: Cors) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._boundary])
        app[_CORS_KEY] = cors
        app.on_response_prepare.append(self._add_headers)
        for routes in all_routes:
            app.add_routes(routes.routes())
        return app

    def runner(self, shutdown_timeout: float, *, admin: bool = False) -> web.AppRunner:
        """What serves an application: a client's disconnect ends its request, and bodies come as they are.

        Args:
            shutdown_timeout: Seconds that handlers get when it is cleaned up.
            admin: `admin_app` instead of `app`.
        """
        app = self.admin_app() if admin else self.app()
        return Runner(app, shutdown_timeout)

    @web.middleware
    async def _boundary(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the headers that every endpoint knows, and gives every error OpenAI's shape."""
        try:
            request[REQUEST_ID_KEY] = header_request_id(request)
            request[_LOAD_FORMAT_KEY] = _load_format(request)
            if (rank := header_rank(request.headers.get(DATA_PARALLEL_RANK), len(self._llm.ranks))) is not None:
                request[RANK_KEY] = rank
            if self._asks_certificates:
                check_certificate(request)
            if (response := request.app[_CORS_KEY].preflight(request)) is not None:
                return response
            self._keys.check(request)
            return await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            response = _http_error(error)
        except web.RequestPayloadError as error:
            response = ApiError(400, f"the body cannot be read: {error}").response()
        except Exception as error:
            if not (isinstance(error, ConnectionError) and is_gone(request)):
                log.exception("request failed: %s %s", request.method, request.path)
            response = internal_error().response()
        if self._llm.state is not State.READY:
            response.force_close()  # a client's kept connection would lead it here again
        return response

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if (request_id := request.get(REQUEST_ID_KEY)) is not None:
            response.headers[REQUEST_ID] = request_id
        request.app[_CORS_KEY].add_headers(request, response)
        rank = request.get(RANK_KEY)
        ran = request.get(PICKED_KEY, rank) if len(self._llm.ranks) > 1 else rank
        if ran is not None:
            response.headers[DATA_PARALLEL_RANK] = str(ran)
        if form := request.get(_LOAD_FORMAT_KEY):
            report = self._llm.load if rank is None else self._llm.ranks[rank].load
            if report is not None:
                response.headers[LOAD] = load_report.encode(report, msgspec.convert(form, load_report.Format))


def _load_format(request: web.Request) -> str:
    """The form of the load report asked for; empty where none is, or one that we do not know: proxies ask on behalf of clients,
    whose requests are sound."""
    given = request.headers.get(LOAD_FORMAT, "").upper()
    return given if given in get_args(load_report.Format) else ""


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
