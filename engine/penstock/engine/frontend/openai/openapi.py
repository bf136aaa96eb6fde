"""`/openapi.json`, made of the types that requests are checked with."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from penstock.engine.frontend.http.keys import OPEN_PATHS
from penstock.engine.frontend.http.routes.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    RenderAnswer,
    TokenizeAnswer,
    TokenizeRequest,
)
from penstock.engine.frontend.openai import answers
from penstock.engine.frontend.openai.embeddings import EmbeddingRequest
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest
from penstock.engine.frontend.openai.responses_protocol import ResponsesRequest
from penstock.prompt.messages import MAX_MESSAGES, ROLES
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH
from penstock.prompt.tools import EFFORTS, MAX_TOOLS

_ERRORS: Final = {
    "400": "a parameter, which `param` names, is wrong, unknown or not supported",
    "401": "no API key of this server",
    "404": "no such model or endpoint",
    "413": "the body is too large",
    "415": "the body is not plain JSON",
    "429": "the tenant has too many requests waiting",
    "500": "this request failed; others go on",
    "503": "try another replica, or later",
    "504": "the request's own time limit is over",
}


class Endpoint(NamedTuple):
    """A path that takes a body."""

    path: str
    summary: str
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    streams: bool = False
    lists: bool = False
    """It answers a list of them."""


ENDPOINTS: Final = (
    Endpoint(CHAT_PATH, "Answers a conversation", ChatRequest, answers.ChatCompletion, streams=True),
    Endpoint(COMPLETIONS_PATH, "Continues texts", CompletionRequest, answers.Completion, streams=True),
    Endpoint(RESPONSES_PATH, "Answers a conversation with items", ResponsesRequest, answers.Response, streams=True),
    Endpoint(EMBEDDINGS_PATH, "Texts to vectors", EmbeddingRequest, answers.Embeddings),
    Endpoint("/tokenize", "Text to tokens", TokenizeRequest, TokenizeAnswer),
    Endpoint("/detokenize", "Tokens to text", DetokenizeRequest, DetokenizeAnswer),
    Endpoint(f"{CHAT_PATH}/render", "A conversation's prompt as tokens", ChatRequest, RenderAnswer),
    Endpoint(f"{COMPLETIONS_PATH}/render", "Texts as tokens", CompletionRequest, RenderAnswer, lists=True),
)

_OPEN_SUMMARIES: Final = {
    "/health": "Whether the engine can answer requests",
    "/live": "Liveness: whether the engine makes progress",
    "/ready": "Readiness: whether the engine takes requests",
    "/load": "The newest load report",
    "/metrics": "Prometheus metrics",
    "/prompt-bundle": "Tokenizer, chat template and hash settings",
    "/version": "Version, kernels and ports of the event stream",
    "/openapi.json": "This description of the API",
    "/docs": "A page over this description",
}
_TEXT: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": _TEXT, "name": _TEXT},
}
_TOOL: Final = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
        },
    },
}
_PLAIN: Final = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
# What makes the prompt is checked by `penstock.prompt`, not by these types.
_PROMPT_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
    "prompt": _PLAIN,
    "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
    "instructions": _TEXT,
    "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
    "reasoning_effort": {"enum": list(EFFORTS)},
    "chat_template_kwargs": {"type": "object"},
}


def document(version: str, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The OpenAPI 3.1 document of this server.

    Args:
        version: Of the server.
        defaults: The model's, of sampling parameters; None: OpenAI's.
    """
    types = [kind for endpoint in ENDPOINTS for kind in (endpoint.request, endpoint.answer)]
    types += [answers.ModelList, answers.Model, answers.ErrorAnswer]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for endpoint in ENDPOINTS:
        properties = components[endpoint.request.__name__]["properties"]
        for name, schema in _PROMPT_FIELDS.items():
            if name in properties:
                properties[name] = _PLAIN if endpoint.path == EMBEDDINGS_PATH else schema
        for name, value in (defaults or {}).items():
            if name in properties:
                properties[name]["default"] = value
    paths: dict[str, Any] = {endpoint.path: {"post": _operation(endpoint)} for endpoint in ENDPOINTS}
    paths["/v1/models"] = {"get": _read("Every served name", answers.ModelList)}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{name}"] = {"get": _read("One served name", answers.Model) | {"parameters": [name]}}
    for path in sorted(OPEN_PATHS):
        answer = {"200": {"description": "see docs/engine/serve.md"}, "503": {"description": "not now"}}
        paths[path] = {"get": {"summary": _OPEN_SUMMARIES[path], "security": [], "responses": answer}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "array", "items": _ref(endpoint.answer)} if endpoint.lists else _ref(endpoint.answer)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(endpoint.request)}}},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors()},
    }


def _read(summary: str, answer: type[msgspec.Struct]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answer)}}
    return {"summary": summary, "responses": {"200": {"description": "the answer", "content": content}, **_errors()}}


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
    return {status: {"description": words, "content": content} for status, words in _ERRORS.items()}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
