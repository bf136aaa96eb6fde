"""OpenAI's endpoints."""

import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from aiohttp import web

from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.http.exchange import PICKED_KEY, Active, json_response, name_request
from penstock.engine.frontend.http.intake import Intake
from penstock.engine.frontend.http.prefill import Prefill
from penstock.engine.frontend.http.streaming import stream
from penstock.engine.frontend.observe.timeline import wants_timeline, with_timeline
from penstock.engine.frontend.observe.traces import Traces
from penstock.engine.frontend.openai.chat_format import ChatFormat
from penstock.engine.frontend.openai.completion_format import CompletionFormat
from penstock.engine.frontend.openai.encoding import Format
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.frontend.openai.protocol import CompletionRequest, parse_chat, parse_completion
from penstock.engine.frontend.openai.responses_format import ResponsesFormat
from penstock.engine.frontend.openai.responses_protocol import as_chat_request, parse_responses
from penstock.engine.frontend.spec import GenerationSpec
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH

log = logging.getLogger(__name__)


class OpenAIRoutes:
    """The endpoints of generation and of the list of models.

    Args:
        llm: The engine.
        active: Counts the requests that a drain waits for.
        parsers: Parsers of the model's answers.
        prefill: Has prompts computed elsewhere.
        traces: Receives requests' spans; None: no tracing.
    """

    def __init__(
        self, llm: AsyncLLM, active: Active, parsers: ParserConfig, prefill: Prefill, traces: Traces | None = None
    ) -> None:
        self._prefill = prefill
        self._traces = traces
        self._llm = llm
        self._active = active
        self._intake = Intake(llm, parsers)
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.post(CHAT_PATH, self.chat_completions),
            web.post(COMPLETIONS_PATH, self.completions),
            web.post(RESPONSES_PATH, self.responses),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        async with self._active.answering(request):
            params, spec = await self._intake.chat_or_completion(request, CHAT_PATH, parse_chat)
            spec = self._prefill.with_params(spec, params)
            assembler = self._intake.assembler(params, spec)
            answer = ChatFormat(params, spec, self._name(params.model), self._llm.vocabulary, assembler)
            return await self._answer(request, spec, answer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        async with self._active.answering(request):
            params, spec = await self._intake.chat_or_completion(request, COMPLETIONS_PATH, parse_completion)
            spec = self._prefill.with_params(spec, params)
            echoes = self._echoes(params, spec) if params.echo else None
            answer = CompletionFormat(params, spec, self._name(params.model), self._llm.vocabulary, echoes)
            return await self._answer(request, spec, answer)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`, stateless."""
        async with self._active.answering(request):
            arrival = time.time()
            self._llm.require_generating()
            self._llm.require_ready()
            params, body, size = await self._intake.read_generation(request, parse_responses)
            name_request(request, params.request_id)
            await self._intake.served(params.model)
            prompts = await self._intake.prompts(request, RESPONSES_PATH, body, size)
            chat = as_chat_request(params, body)
            spec = self._intake.spec(request, prompts, chat, arrival)
            answer = ResponsesFormat(
                params, spec, self._name(params.model), self._llm.vocabulary, self._intake.parser(chat, spec), self._llm.processor
            )
            return await self._answer(request, spec, answer)

    async def models(self, _request: web.Request) -> web.Response:
        """`GET /v1/models`: every served name, then every adapter."""
        names = [*self._llm.model.served_names, *self._llm.adapters]
        return json_response({"object": "list", "data": [self._entry(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        return json_response(self._entry(await self._intake.served(request.match_info["name"])))

    def _name(self, asked: str) -> str:
        """What answers say: the adapter, or the model's first name."""
        return asked if asked in self._llm.adapters else self._llm.model.served_names[0]

    def _entry(self, name: str) -> dict[str, Any]:
        model = self._llm.model
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "penstock"}
        # vLLM's clients look for a tokenizer at the root.
        entry |= {"max_model_len": model.max_model_len, "root": model.source or str(model.path), "parent": None}
        if (adapter := self._llm.adapters.get(name)) is not None:
            entry |= {"root": adapter.uri, "parent": model.served_names[0]}
            if adapter.revision is not None:
                entry["revision"] = adapter.revision
        return entry

    def _echoes(self, params: CompletionRequest, spec: GenerationSpec) -> list[str]:
        """Each prompt's text: as it was given, or what its token ids say where those were given or cut."""
        given = [params.prompt] if isinstance(params.prompt, str) else params.prompt
        if isinstance(given[0], str) and params.truncate_prompt_tokens is None:
            return given
        return [self._llm.processor.tokenizer.decode(ids, skip_special_tokens=True) for ids in spec.prompts]

    def _watching(self, request: web.Request, spec: GenerationSpec, generation: Generation) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._traces is None else self._traces.watching(request, spec, generation)

    async def _answer(self, request: web.Request, spec: GenerationSpec, answer: Format) -> web.StreamResponse:
        tell_timeline = wants_timeline(request)
        spec = await self._prefill.computed(request, spec)
        async with self._llm.running(spec) as generation, self._watching(request, spec, generation):
            request[PICKED_KEY] = generation.rank
            if spec.stream:
                response = await stream(request, generation, answer)
            else:
                while not generation.finished:
                    await generation.changed()
                body = answer.full(generation.choices, generation.usage)
                body = with_timeline(body, generation) if tell_timeline else body
                body = self._prefill.answered(body, generation) if spec.lends else body
                response = web.Response(body=body, content_type="application/json")
            usage = generation.usage
            log.info(
                "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d finished=%s seed=%d seconds=%.3f",
                *(spec.request_id, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
                *(generation.finished, spec.sampling[0].seed, time.time() - spec.arrival),
            )
            return response
