"""OpenAI's endpoint for embeddings."""

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from aiohttp import web

from penstock.engine.core.plan import Float32
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.http.exchange import (
    PICKED_KEY,
    RANK_KEY,
    REQUEST_ID_KEY,
    Active,
    deadline,
    name_request,
    priority,
    tenant,
)
from penstock.engine.frontend.http.intake import Intake
from penstock.engine.frontend.observe.traces import Traces
from penstock.engine.frontend.openai.embeddings import (
    EmbeddingRequest,
    check_embeddings,
    embedding_of,
    embedding_spec,
    embeddings_answer,
    parse_embeddings,
)
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.frontend.spec import GenerationSpec
from penstock.prompt.processor import EMBEDDINGS_PATH

log = logging.getLogger(__name__)

AT_ONCE: Final = 256
"""Inputs of a request in the core's queue, which others need too: at most, where the queue takes as many."""


class EmbeddingRoutes:
    """The embeddings endpoint.

    Args:
        llm: The engine.
        active: Counts the requests that a drain waits for.
        traces: Receives requests' spans; None: no tracing.
    """

    def __init__(self, llm: AsyncLLM, active: Active, traces: Traces | None = None) -> None:
        self._llm = llm
        self._active = active
        self._traces = traces
        self._intake = Intake(llm, ParserConfig())

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [web.post(EMBEDDINGS_PATH, self.embeddings)]

    async def embeddings(self, request: web.Request) -> web.Response:
        """`POST /v1/embeddings`."""
        async with self._active.answering(request):
            arrival, pooling = time.time(), self._llm.require_embedding()
            self._llm.require_ready()
            params, body, size = await self._intake.read(request, parse_embeddings)
            name_request(request, params.request_id)
            await self._intake.served(params.model)
            prompts = [prompt.token_ids for prompt in await self._intake.prompts(request, EMBEDDINGS_PATH, body, size)]
            check_embeddings(prompts, params, self._llm.model)
            vectors: list[Float32] = []
            at_once = min(AT_ONCE, self._llm.window // len(self._llm.ranks))  # they all wait on one rank
            for start in range(0, len(prompts), at_once):
                spec = self._spec(request, params, prompts[start : start + at_once], arrival)
                pooled = await self._pooled(request, spec)
                vectors += [embedding_of(vector, pooling, params.dimensions) for vector in pooled]
            count, name = sum(map(len, prompts)), self._llm.model.served_names[0]
            given = (request[REQUEST_ID_KEY], len(prompts), count, time.time() - arrival)
            log.info("request_id=%s inputs=%d prompt_tokens=%d seconds=%.3f", *given)
            answer = await asyncio.to_thread(embeddings_answer, vectors, params, name, count)
            return web.Response(body=answer, content_type="application/json")

    def _spec(self, request: web.Request, params: EmbeddingRequest, prompts: list[list[int]], arrival: float) -> GenerationSpec:
        return embedding_spec(
            prompts,
            params,
            request_id=request[REQUEST_ID_KEY],
            arrival=arrival,
            tenant=tenant(request),
            granted_priority=priority(request),
            deadline=deadline(request, arrival),
            data_parallel_rank=request.get(PICKED_KEY, request.get(RANK_KEY)),  # all prompts run on the rank of the first ones
        )

    async def _pooled(self, request: web.Request, spec: GenerationSpec) -> list[Float32]:
        async with self._llm.running(spec) as generation, self._watching(request, spec, generation):
            request[PICKED_KEY] = generation.rank
            return await generation.pooled()

    def _watching(self, request: web.Request, spec: GenerationSpec, generation: Generation) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._traces is None else self._traces.watching(request, spec, generation)
