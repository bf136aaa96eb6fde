"""The endpoints by which gateway, operator and kubelet watch a replica."""

from importlib.metadata import version
from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError, unavailable
from penstock.engine.frontend.http.exchange import Active, json_response
from penstock.engine.frontend.observe.metrics import Metrics
from penstock.engine.frontend.openai import openapi
from penstock.engine.messages import CoreReady

_PAGE_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
"""The page has its script and its style within itself, and loads nothing from elsewhere."""


class ReplicaRoutes:
    """Health, load, metrics, and what the picker must know of prompts.

    Args:
        llm: What is watched.
        active: The requests that this server answers.
        vllm_names: Whether metrics have vLLM's names too.
    """

    def __init__(self, llm: AsyncLLM, active: Active, vllm_names: bool = False) -> None:
        self._llm = llm
        self._active = active
        self._bundle = llm.processor.bundle.to_json()
        self._etag = llm.processor.bundle.digest
        self._page = files("penstock.engine.frontend.http").joinpath("docs.html").read_text("utf-8")
        self._registry = Metrics([rank.metrics for rank in llm.ranks], vllm_names).registry()

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.get("/health", self.health),
            web.get("/live", self.live),
            web.get("/ready", self.ready),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/prompt-bundle", self.prompt_bundle),
            web.get("/version", self.version),
            web.get("/openapi.json", self.openapi),
            web.get("/docs", self.docs),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: whether the engine can answer requests, as load balancers and start scripts ask; asleep too."""
        self._require_progress()
        self._llm.require_running()
        return json_response({"status": "ok"})

    async def live(self, _request: web.Request) -> web.Response:
        """`GET /live`: liveness, by progress; also while the model loads and while the engine drains."""
        self._require_progress()
        return json_response({"status": "live"})

    def _require_progress(self) -> None:
        """Raises a 503 that says what is wrong where only a restart helps."""
        if (reason := self._llm.unhealthy()) is not None:
            raise ApiError(503, reason, "server_error", code="unhealthy")

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`: readiness."""
        self._llm.require_ready()
        return json_response({"status": "ready"})

    async def load(self, _request: web.Request) -> web.Response:
        """`GET /load`: the newest load report, of several data-parallel ranks together and then of each; and as `server_load` the
        requests that this server answers."""
        report, ranks = self._llm.load, self._llm.ranks
        if report is None:
            raise unavailable("there is no load report yet", "not_ready")
        told = {**msgspec.to_builtins(report), "server_load": self._active.count}
        if len(ranks) > 1:
            told["data_parallel_ranks"] = [msgspec.to_builtins(rank.load) for rank in ranks]
        return json_response(told)

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

    async def openapi(self, _request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return json_response(openapi.document(version("penstock"), self._llm.model.generation_defaults.sampling))

    async def docs(self, _request: web.Request) -> web.Response:
        """`GET /docs`: a page over `/openapi.json`."""
        return web.Response(text=self._page, content_type="text/html", headers={"content-security-policy": _PAGE_POLICY})

    async def version(self, _request: web.Request) -> web.Response:
        """`GET /version`. `kernels` is the form of the model's operations that runs. `load_seconds` is how long the weights took,
        and `load_floor_seconds` how long they take at least from their storage. The ports are those of the event stream: of the
        first data-parallel rank, and as `data_parallel_ranks` of each. Before the engine has started these are empty, 0 and
        null."""
        ready, ranks = self._llm.ready, self._llm.ranks
        return json_response(
            {
                "version": version("penstock"),
                "kernels": "" if ready is None else ready.kernels,
                "quantization": self._llm.model.quantization_name,
                "load_seconds": 0.0 if ready is None else ready.load_seconds.get("weights", 0.0),
                "load_floor_seconds": 0.0 if ready is None else ready.load_floor_s,
                **_ports(ready),
                "data_parallel_size": len(ranks),
                "data_parallel_ranks": [_ports(rank.ready) for rank in ranks],
            }
        )


def _ports(ready: CoreReady | None) -> dict[str, int | None]:
    ports = None if ready is None else ready.event_ports
    return {"events_port": None if ports is None else ports.events, "replay_port": None if ports is None else ports.replay}
