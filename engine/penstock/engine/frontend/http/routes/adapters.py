"""The endpoints that load and unload LoRA adapters, as in vLLM.

Any client that reaches them can have the engine read any folder that it can read. They exist only with
`--allow-runtime-lora-updating`, and the gateway forwards neither. The operator compares `/v1/models` with the wanted adapters and
loads what is missing here.
"""

import msgspec
from aiohttp import web

from penstock.engine.commands import Command, LoadAdapter, UnloadAdapter
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.http.exchange import json_response, read_json
from penstock.engine.frontend.openai.protocol import convert, parse_json


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to be there."""

    lora_name: str
    lora_path: str
    """A folder in PEFT's format, `file://…` or `hf://org/name`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    load_inplace: bool = False
    """Replace another adapter of this name."""


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to be gone."""

    lora_name: str


class AdapterRoutes:
    """Answered when it is done: 200, or 400 with the reason; nothing has changed then."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [web.post("/v1/load_lora_adapter", self.load), web.post("/v1/unload_lora_adapter", self.unload)]

    async def load(self, request: web.Request) -> web.Response:
        """`POST /v1/load_lora_adapter`; 200 too where it is there already."""
        params = convert(parse_json(await read_json(request)), LoadRequest, {})
        command = LoadAdapter(params.lora_name, params.lora_path, params.revision, params.load_inplace)
        return await self._carry_out(command, f"the adapter {params.lora_name!r} is loaded")

    async def unload(self, request: web.Request) -> web.Response:
        """`POST /v1/unload_lora_adapter`; 404 where there is none."""
        params = convert(parse_json(await read_json(request)), UnloadRequest, {})
        if params.lora_name not in self._llm.adapters:
            message = f"there is no adapter {params.lora_name!r} here"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        return await self._carry_out(UnloadAdapter(params.lora_name), f"the adapter {params.lora_name!r} is unloaded")

    async def _carry_out(self, command: Command, done: str) -> web.Response:
        self._llm.require_running()
        try:
            await self._llm.call(command)
        except CommandRefused as error:
            raise ApiError(400, str(error), code="refused") from None
        return json_response({"status": "ok", "message": done})
