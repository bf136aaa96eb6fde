"""Has a prefill replica compute a prompt, where a header names one. Whatever goes wrong there, this replica computes it."""

import asyncio
import logging
import re
import time
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from penstock.api.headers import PREFILLER, PRIORITY, TENANT, TIMEOUT
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.http.exchange import ASKED_KEY, MAX_BODY_BYTES, Asked
from penstock.engine.frontend.images import with_files
from penstock.engine.frontend.openai.kv_transfer import FIELD, KVTransfer
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest
from penstock.engine.frontend.spec import GenerationSpec
from penstock.plain_errors import words_of
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH
from penstock.prompt.responses import as_chat

MAX_ANSWER_BYTES = 16 << 20
CONNECT_S = 3.0
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
_PASSED_ON = ("authorization", TENANT, PRIORITY)
_CHAT_FIELDS = (
    *("messages", "tools", "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""What of a chat's body decides on its prompt."""
_FILES_BYTES = MAX_BODY_BYTES * 3 // 4
"""Of images that are sent in place of their URLs: the rest of a body is for what came in the request."""

_log = logging.getLogger(__name__)


class Prefill:
    """What a request has to do with other replicas.

    Args:
        llm: Serves the model here.
        transfer: Reads and writes `kv_transfer_params`; None: no pages are lent or read.
    """

    def __init__(self, llm: AsyncLLM, transfer: KVTransfer | None) -> None:
        self._llm = llm
        self._transfer = transfer
        self._session: aiohttp.ClientSession | None = None

    def answered(self, body: bytes, generation: Generation) -> bytes:
        """An answer's JSON object with its `kv_transfer_params` at the end; null where nothing is lent."""
        [choice] = generation.choices
        params = None if self._transfer is None or choice.lent is None else self._transfer.params(choice.lent)
        return body[:-1] + b',"kv_transfer_params":' + orjson.dumps(params) + b"}"

    def with_params(self, spec: GenerationSpec, request: ChatRequest | CompletionRequest) -> GenerationSpec:
        """The request with what its `kv_transfer_params` say; `ApiError` 400 names what is wrong with them."""
        params = request.kv_transfer_params
        if not params:
            return spec
        if self._transfer is None:
            message = f"{FIELD} needs an engine started with --kv-transfer-config"
            raise ApiError(400, message, param=FIELD, code="unsupported_parameter")
        remote = self._transfer.read(params)
        if remote is None:
            if spec.stream:
                raise ApiError(400, f"{FIELD}.do_remote_decode needs stream: false", param=FIELD)
            return msgspec.structs.replace(spec, lends=spec.is_transferable)
        return msgspec.structs.replace(spec, remote=remote) if spec.is_transferable else spec

    async def computed(self, request: web.Request, spec: GenerationSpec) -> GenerationSpec:
        """The request with what the prefill replica lends that the header names, if it names one and that pays."""
        address = request.headers.get(PREFILLER)
        if address is None or self._transfer is None or not self._transfer.config.reads:
            return spec
        if spec.remote is not None or spec.lends or not spec.is_transferable:
            return spec
        if not _ADDRESS.fullmatch(address):
            raise ApiError(400, f"{PREFILLER} must be one host:port", param=PREFILLER)
        begin = time.monotonic()
        try:
            params = await self._ask(address, request, spec)
            remote = None if params is None else self._transfer.read(params, optional=True)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, ApiError) as error:
            self._llm.metrics.prefills.add(1, "failed")
            _log.warning(
                "request_id=%s prefill replica %s failed after %.1f s, so the prompt is computed here: %s",
                *(spec.request_id, address, time.monotonic() - begin, words_of(error)),
            )
            return spec
        self._llm.metrics.prefills.add(1, "nothing" if remote is None else "lent")
        return msgspec.structs.replace(spec, remote=remote)

    async def _ask(self, address: str, request: web.Request, spec: GenerationSpec) -> dict[str, Any] | None:
        """The prefill replica's `kv_transfer_params`. It gets the tokens, so both replicas mean the same prompt. Where that has
        images, which are no tokens, it gets the messages, with the files that were fetched: nobody fetches them twice, and both
        replicas read the same ones."""
        assert self._transfer is not None
        asked = request.pop(ASKED_KEY, None)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        if spec.deadline is not None:
            headers[TIMEOUT] = str(max(1, round(1000 * (spec.deadline - time.time()))))
        body = {
            "model": self._llm.model.served_names[0],
            **({"prompt": spec.prompts[0]} if asked is None else await asyncio.to_thread(_messages, request.path, asked)),
            "max_tokens": 1,
            "temperature": 0.0,
            **({} if spec.cache_salt is None else {"cache_salt": spec.cache_salt}),
            FIELD: {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if self._session is None:
            self._session = aiohttp.ClientSession()
        limits = aiohttp.ClientTimeout(total=self._transfer.config.prefill_timeout_s, connect=CONNECT_S)
        url = f"http://{address}{COMPLETIONS_PATH if asked is None else CHAT_PATH}"
        data = orjson.dumps(body)
        headers["content-type"] = "application/json"
        async with self._session.post(url, data=data, headers=headers, timeout=limits, allow_redirects=False) as answer:
            said = b""
            async for part in answer.content.iter_any():
                said += part
                if len(said) > MAX_ANSWER_BYTES:
                    raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {said[:200].decode(errors='replace')}")
        params = orjson.loads(said).get(FIELD)
        if params is not None and not isinstance(params, dict):
            raise ValueError(f"{FIELD} is no object")
        return params

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()


def _messages(path: str, asked: Asked) -> dict[str, Any]:
    """The part of a chat's body that makes the same prompt as a request which was read and checked before.

    Args:
        path: Of the API whose body it is.
        asked: The request.
    """
    chat = asked.body if path == CHAT_PATH else as_chat(asked.body, reads_images=True)
    found = {name: chat[name] for name in _CHAT_FIELDS if name in chat}
    found["messages"] = with_files(found["messages"], asked.fetched, _FILES_BYTES)
    return found | ({"tool_choice": "none"} if found.get("tools") else {})
