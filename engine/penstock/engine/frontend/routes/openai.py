"""OpenAI's endpoints."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.exchange import REQUEST_ID_KEY, Active, deadline, json_response, read_json, tenant
from penstock.engine.frontend.protocol import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_json
from penstock.engine.frontend.responses import ChatFormat, CompletionFormat, Format
from penstock.engine.frontend.spec import GenerationSpec, generation_spec
from penstock.engine.frontend.streaming import stream
from penstock.engine.frontend.timeline import wants_timeline, with_timeline
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH

log = logging.getLogger(__name__)

# Longer bodies are tokenized in a thread, where the streams of others do not wait for them.
_INLINE_BYTES = 4096


class OpenAIRoutes:
    """Generation, and the models there are.

    Args:
        llm: What answers.
        active: Counts the requests that a drain waits for.
    """

    def __init__(self, llm: AsyncLLM, active: Active) -> None:
        self._llm = llm
        self._active = active
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.post(CHAT_PATH, self.chat_completions),
            web.post(COMPLETIONS_PATH, self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        with self._active.counted():
            spec, params = await self._spec(request, CHAT_PATH, parse_chat)
            usage = params.stream_options.include_usage
            answer = ChatFormat(spec.request_id, self._llm.model.served_names[0], self._llm.vocabulary, usage)
            return await self._answer(request, spec, answer, usage)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        with self._active.counted():
            spec, params = await self._spec(request, COMPLETIONS_PATH, parse_completion)
            usage = params.stream_options.include_usage
            answer = CompletionFormat(spec.request_id, self._llm.model.served_names[0], self._llm.vocabulary, usage)
            return await self._answer(request, spec, answer, usage)

    async def models(self, _request: web.Request) -> web.Response:
        """`GET /v1/models`: every served name."""
        return json_response({"object": "list", "data": [self._entry(name) for name in self._llm.model.served_names]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        return json_response(self._entry(self._served(request.match_info["name"])))

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
        data = await read_json(request)
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
        spec = generation_spec(
            prompts,
            params,
            model,
            processor,
            seed=self._llm.draw_seed(),
            request_id=request[REQUEST_ID_KEY],
            arrival=arrival,
            tenant=tenant(request),
            deadline=deadline(request, arrival),
        )
        return spec, params

    async def _answer(
        self, request: web.Request, spec: GenerationSpec, answer: Format, include_usage: bool
    ) -> web.StreamResponse:
        tell_timeline = wants_timeline(request)
        async with self._llm.running(spec) as generation:
            if spec.stream:
                response = await stream(request, generation, answer, include_usage)
            else:
                while not generation.finished:
                    await generation.changed()
                body = answer.full(generation.choices, generation.usage)
                body = with_timeline(body, generation) if tell_timeline else body
                response = web.Response(body=body, content_type="application/json")
            usage = generation.usage
            log.info(
                "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d finished=%s seed=%d seconds=%.3f",
                *(spec.request_id, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
                *(generation.finished, spec.sampling[0].seed, time.time() - spec.arrival),
            )
            return response
