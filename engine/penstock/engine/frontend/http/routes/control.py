"""The endpoints by which an administrator pauses the engine, puts it to sleep and changes its weights.

Any client that reaches them controls the engine. They exist only with `--enable-control-endpoints`, and the gateway forwards none
of
them. Arguments are in the query, named as the fields of the commands in `messages`. Those of `/pin_prefix` can be many, and are a
JSON body.
"""

import msgspec
from aiohttp import web

from penstock.engine.commands import (
    Command,
    Pause,
    PinPrefix,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    UnpinPrefix,
    WakeUp,
)
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.http.exchange import json_response, read_json
from penstock.engine.frontend.openai.protocol import convert, parse_json
from penstock.plain_errors import explained
from penstock.suggest import suggestion

_COMMANDS: dict[str, type[Command]] = {
    "/reset_prefix_cache": ResetPrefixCache,
    "/unpin_prefix": UnpinPrefix,
    "/pause": Pause,
    "/resume": Resume,
    "/sleep": Sleep,
    "/wake_up": WakeUp,
    "/reload_weights": ReloadWeights,
    "/start_profile": StartProfile,
    "/stop_profile": StopProfile,
}


class ControlRoutes:
    """Every command of the core as a POST that is answered when it is done: 200, or 409 with the reason where it was refused."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers."""
        return [
            *(web.post(path, self.command) for path in _COMMANDS),
            web.post("/pin_prefix", self.pin_prefix),
            web.get("/is_paused", self.is_paused),
            web.get("/is_sleeping", self.is_sleeping),
        ]

    async def command(self, request: web.Request) -> web.Response:
        """`POST` of a command."""
        return await self._carry_out(_read_query(request, _COMMANDS[request.path]))

    async def pin_prefix(self, request: web.Request) -> web.Response:
        """`POST /pin_prefix`: tokens as `/tokenize` gives them."""
        body = parse_json(await read_json(request))
        return await self._carry_out(convert(body, PinPrefix, {}))

    async def _carry_out(self, command: Command) -> web.Response:
        self._llm.require_core()  # a drain may wait for what only a command lets go on
        try:
            result = await self._llm.call(command)
        except CommandRefused as error:
            raise ApiError(409, str(error), code="refused") from None
        return json_response({"status": "ok", **(result or {})})

    async def is_paused(self, _request: web.Request) -> web.Response:
        """`GET /is_paused`: also while asleep."""
        return json_response({"is_paused": self._llm.is_paused})

    async def is_sleeping(self, _request: web.Request) -> web.Response:
        """`GET /is_sleeping`: until all that sleeps has woken up and the weights are there."""
        return json_response({"is_sleeping": self._llm.is_asleep is not None})


def _read_query(request: web.Request, kind: type[Command]) -> Command:
    """The command that a query describes; `ApiError` 400 names what is wrong with it."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in request.query:
        if name not in fields:
            known = f"there are {', '.join(fields)}" if fields else "it takes none"
            raise ApiError(
                400,
                f"{request.path} has no parameter {name}{suggestion(name, fields)} ({known})",
                param=name,
                code="unknown_parameter",
            )
    for name, field in fields.items():
        if field.required and name not in request.query:
            raise ApiError(400, f"{request.path} needs {name}", param=name)
    values = {name: _values(request, name, fields[name].default) for name in request.query}
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{name}: {explained(error, kind).problem}", param=name) from None
    return msgspec.convert(values, kind, strict=False)


def _values(request: web.Request, name: str, default: object) -> str | list[str]:
    """All of a parameter that may be repeated; the last of any other."""
    given = request.query.getall(name)
    return given if isinstance(default, tuple) else given[-1]
