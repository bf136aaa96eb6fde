"""From an HTTP request to the engine's request, for every endpoint that generates."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from aiohttp import web

from penstock.api.headers import PREFILLER
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.http.exchange import (
    ASKED_KEY,
    RANK_KEY,
    REQUEST_ID_KEY,
    Asked,
    deadline,
    name_request,
    priority,
    read_json,
    tenant,
)
from penstock.engine.frontend.images import Placed, place_images, read_images
from penstock.engine.frontend.openai.chat_grammar import chat_grammar, wants_calls
from penstock.engine.frontend.openai.parsing.assembly import Assembler
from penstock.engine.frontend.openai.parsing.pieces import Parser
from penstock.engine.frontend.openai.parsing.registry import TOOL_FORMATS, ParserConfig
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest, parse_json
from penstock.engine.frontend.openai.structured import grammar_of
from penstock.engine.frontend.spec import GenerationSpec, generation_spec
from penstock.engine.grammar import ReasoningMarkers
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, RESPONSES_PATH

# Longer bodies are tokenized in a thread, where the streams of others do not wait for them.
_INLINE_BYTES: Final = 4096
# The tokens of a prompt that say whether the template opens reasoning, or closes it.
_PROMPT_END: Final = 8

_T = TypeVar("_T")


class Intake:
    """Reads, checks and tokenizes.

    Args:
        llm: What will run the requests.
        parsers: Of the model's answers.
    """

    def __init__(self, llm: AsyncLLM, parsers: ParserConfig) -> None:
        self._llm = llm
        self._parsers = parsers
        added = llm.processor.tokenizer.get_added_tokens_decoder().values()
        self._special_tokens = frozenset(token.content for token in added if token.special)
        self._defaults = llm.model.generation_defaults.sampling

    async def served(self, name: str) -> str:
        """The name, if it is one of this model's or of an adapter; else `ApiError` 404."""
        if name not in self._llm.model.served_names and not await self._llm.has_adapter(name):
            raise _no_model(name)
        return name

    async def read(self, request: web.Request, parse: Callable[[dict[str, Any]], _T]) -> tuple[_T, dict[str, Any], int]:
        """The body, checked, as it came, and its length in bytes; `ApiError` for what is wrong with it."""
        data = await read_json(request)
        body = parse_json(data)
        return parse(body), body, len(data)

    async def read_generation(
        self, request: web.Request, parse: Callable[[dict[str, Any]], _T]
    ) -> tuple[_T, dict[str, Any], int]:
        """As `read`, for requests that generate: sampling parameters that the body leaves out get the model's defaults."""

        def parse_whole(body: dict[str, Any]) -> _T:
            return parse(body | {name: value for name, value in self._defaults.items() if body.get(name) is None})

        return await self.read(request, parse_whole)

    async def prompts(self, request: web.Request, path: str, body: Mapping[str, Any], size: int) -> list[Placed]:
        """The prompts of a body with their images; `ApiError` 400 names the field.

        Args:
            request: The HTTP request, which keeps what a prefill replica needs of images.
            path: Of the API whose body it is.
            body: As it came.
            size: Its bytes: long ones are tokenized in a thread.
        """
        processor = self._llm.processor
        try:
            images = await read_images(path, body, processor, self._llm.images)
            if size > _INLINE_BYTES:
                prompts = await asyncio.to_thread(processor.tokens_of, path, body)
            else:
                prompts = processor.tokens_of(path, body)
            if path in (CHAT_PATH, RESPONSES_PATH):
                placed = [place_images(path, prompt, images, processor) for prompt in prompts]
                if images and PREFILLER in request.headers:
                    request[ASKED_KEY] = Asked(body, placed[0].fetched)
                return placed
            return [Placed(prompt, ()) for prompt in prompts]
        except PromptError as error:
            raise ApiError.from_prompt(error) from None

    def spec(
        self, request: web.Request, prompts: list[Placed], params: ChatRequest | CompletionRequest, arrival: float
    ) -> GenerationSpec:
        """What the engine runs; `ApiError` 400 for what it cannot, 404 where the adapter has been unloaded meanwhile.

        Args:
            request: The HTTP request, for its headers.
            prompts: As `prompts` gives them.
            params: The checked body.
            arrival: Unix time in seconds.
        """
        chat = params if isinstance(params, ChatRequest) else None
        parsers = self._parsers if chat is None else self._parsers_of(chat)
        if chat is None:
            grammar = grammar_of(params.response_format, params.structured_outputs, params.schema_field)
        else:
            grammar = chat_grammar(chat, parsers, self._special_tokens)
        adapter = self._llm.adapters.get(params.model)
        if adapter is None and params.model not in self._llm.model.served_names:
            raise _no_model(params.model)
        token_ids = [prompt.token_ids for prompt in prompts]
        return generation_spec(
            token_ids,
            params,
            self._llm.model,
            self._llm.processor,
            seed=self._llm.draw_seed(),
            request_id=request[REQUEST_ID_KEY],
            arrival=arrival,
            tenant=tenant(request),
            granted_priority=priority(request),
            deadline=deadline(request, arrival),
            lora_id=0 if adapter is None else adapter.lora_id,
            markers=parsers.markers(wants_calls(chat)) if chat is not None else (),
            grammar=grammar,
            reasoning=self._reasoning(chat, parsers, token_ids[0]) if chat is not None and grammar is not None else None,
            images=prompts[0].images if chat is not None else (),
            data_parallel_rank=request.get(RANK_KEY),
        )

    async def chat_or_completion(
        self, request: web.Request, path: str, parse: Callable[[dict[str, Any]], _T]
    ) -> tuple[_T, GenerationSpec]:
        """All of it for the two APIs whose bodies are what the engine takes."""
        arrival = time.time()
        self._llm.require_generating()
        self._llm.require_ready()
        params, body, size = await self.read_generation(request, parse)
        assert isinstance(params, ChatRequest | CompletionRequest)
        name_request(request, params.request_id)
        await self.served(params.model)
        prompts = await self.prompts(request, path, body, size)
        return params, self.spec(request, prompts, params, arrival)

    def parser(self, params: ChatRequest, spec: GenerationSpec) -> Callable[[], Parser] | None:
        """Makes what takes an answer's text apart; None where all of it is content."""
        parsers = self._parsers_of(params)
        names = [tool["function"]["name"] for tool in params.tools] if wants_calls(params) else None
        if parsers.parser(names, "") is None:
            return None
        end = self._prompt_end(spec.prompts[0])

        def make() -> Parser:
            parser = parsers.parser(names, end)
            assert parser is not None, "the end of the prompt does not decide whether there is one"
            return parser

        return make

    def assembler(self, params: ChatRequest, spec: GenerationSpec) -> Callable[[], Assembler] | None:
        """Makes what builds a choice's message; None where all text is content."""
        make = self.parser(params, spec)
        if make is None:
            return None
        parsers = self._parsers_of(params)
        short = parsers.tools is not None and TOOL_FORMATS[parsers.tools].short_ids
        return lambda: Assembler(make(), params.parallel_tool_calls, short, params.include_reasoning)

    def _parsers_of(self, params: ChatRequest) -> ParserConfig:
        """What takes the answers of a request apart; `ApiError` where calls are to be found and nothing finds them."""
        if params.forces_call:
            return self._parsers.forcing()
        if wants_calls(params) and not self._parsers.auto_tool_choice:
            message = (
                "tools need an engine started with --enable-auto-tool-choice and --tool-call-parser, or a tool_choice that is "
                "none, required or a function"
            )
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return self._parsers

    def _reasoning(self, params: ChatRequest, parsers: ParserConfig, prompt: list[int]) -> ReasoningMarkers | None:
        end = self._prompt_end(prompt)
        return parsers.reasoning_markers(self._llm.processor.tokenizer, end, calls=params.forces_call)

    def _prompt_end(self, prompt: list[int]) -> str:
        return self._llm.processor.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)


def _no_model(name: str) -> ApiError:
    return ApiError(404, f"there is no model {name!r} here", param="model", code="model_not_found")
