"""`/tokenize`, `/detokenize` and `…/render`, as vLLM has them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.http.exchange import json_response
from penstock.engine.frontend.http.intake import Intake
from penstock.engine.frontend.images import Placed
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest, convert, parse_chat, parse_completion
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH

MAX_TOKENS: Final = 2**18
"""Most tokens of `/detokenize`, unless the context is longer. No stream advances while they become text, which holds the GIL."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A completion's `prompt`, or what makes the prompt of a chat."""

    model: str | None = None
    """None: the model served."""
    prompt: Any = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    mm_processor_kwargs: Any = None
    reasoning_effort: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Their text, special tokens included."""

    prompt: str


class Placeholder(msgspec.Struct, frozen=True):
    """Where an image stands in a prompt, in tokens."""

    offset: int
    length: int


class RenderFeatures(msgspec.Struct, frozen=True):
    """The images of a prompt, each list under `image`."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]


class RenderAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine would be given for a request: of vLLM's answer what pickers read to compare prompts."""

    model: str
    token_ids: list[int]
    features: RenderFeatures | None = None


class TokenRoutes:
    """Text to tokens and back, by the same code that reads prompts.

    Args:
        llm: Has the tokenizer.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._intake = Intake(llm, ParserConfig())

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post(f"{CHAT_PATH}/render", self.render_chat),
            web.post(f"{COMPLETIONS_PATH}/render", self.render_completion),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`."""
        params, body, size = await self._intake.read(request, parse_tokenize)
        await self._served(params.model)
        path = CHAT_PATH if params.prompt is None else COMPLETIONS_PATH
        prompts = [prompt.token_ids for prompt in await self._intake.prompts(request, path, body, size)]
        if len(prompts) != 1:
            raise ApiError(400, f"prompt holds {len(prompts)} prompts; /tokenize takes one", param="prompt")
        texts = [self._llm.vocabulary.text_of(token) for token in prompts[0]] if params.return_token_strs else None
        limit = self._llm.model.max_model_len
        answer = TokenizeAnswer(count=len(prompts[0]), max_model_len=limit, tokens=prompts[0], token_strs=texts)
        return json_response(msgspec.to_builtins(answer))

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`."""
        params, _, _ = await self._intake.read(request, parse_detokenize)
        await self._served(params.model)
        if len(params.tokens) > (most := max(MAX_TOKENS, self._llm.model.max_model_len)):
            raise ApiError(400, f"tokens has {len(params.tokens)} ids; at most {most} become text at once", param="tokens")
        last = self._llm.processor.vocab_size - 1
        if params.tokens and not 0 <= min(params.tokens) <= max(params.tokens) <= last:
            raise ApiError(400, f"tokens holds an id outside 0 to {last}", param="tokens")
        text = self._llm.processor.tokenizer.decode(params.tokens, skip_special_tokens=False)
        return json_response(msgspec.to_builtins(DetokenizeAnswer(prompt=text)))

    async def render_chat(self, request: web.Request) -> web.Response:
        """`POST /v1/chat/completions/render`: the prompt of a chat."""
        (answer,) = await self._render(request, CHAT_PATH, parse_chat)
        return json_response(answer)

    async def render_completion(self, request: web.Request) -> web.Response:
        """`POST /v1/completions/render`: a list of the completion's prompts."""
        return json_response(await self._render(request, COMPLETIONS_PATH, parse_completion))

    async def _render(
        self, request: web.Request, path: str, parse: Callable[[dict[str, Any]], ChatRequest | CompletionRequest]
    ) -> list[Any]:
        params, body, size = await self._intake.read_generation(request, parse)
        await self._intake.served(params.model)
        prompts = await self._intake.prompts(request, path, body, size)
        return [msgspec.to_builtins(_rendered(params.model, prompt)) for prompt in prompts]

    async def _served(self, model: str | None) -> None:
        if model is not None:
            await self._intake.served(model)


def _rendered(model: str, prompt: Placed) -> RenderAnswer:
    features = None
    if prompt.images:
        items = [image.item for image in prompt.images]
        places = [Placeholder(item.start, item.length) for item in items]
        features = RenderFeatures({"image": [item.identifier for item in items]}, {"image": places})
    return RenderAnswer(model=model, token_ids=prompt.token_ids, features=features)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """`ApiError` 400 names the field; what makes the prompt is checked later."""
    request = convert(body, TokenizeRequest, {})
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    return request


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """`ApiError` 400 names the field."""
    return convert(body, DetokenizeRequest, {})
