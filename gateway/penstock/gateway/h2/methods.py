"""What can be called: the handlers that generated code registers, as it does with a `grpc.aio` server."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.gateway.h2.call import Call
from penstock.gateway.h2.messages import CallFault


class Details(NamedTuple):
    """A call as service handlers see it, with the fields of `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Sequence[tuple[str, str]] = ()


class Method:
    """A method of a service, of any of gRPC's four kinds."""

    def __init__(self, handler: Any) -> None:
        self._one_request = not handler.request_streaming
        self._one_response = not handler.response_streaming
        kind = f"{'unary' if self._one_request else 'stream'}_{'unary' if self._one_response else 'stream'}"
        self._behaviour = getattr(handler, kind)
        self._generates = inspect.isasyncgenfunction(self._behaviour)
        self._deserialize = handler.request_deserializer
        self.serialize = handler.response_serializer

    def deserialize(self, message: bytes) -> Any:
        """The message; raises `CallFault` where it is none."""
        try:
            return self._deserialize(message)
        except Exception as error:
            raise CallFault(grpc.StatusCode.INTERNAL, f"the message is unreadable: {error}") from error

    async def run(self, call: Call) -> None:
        """Lets the service answer `call`."""
        request = await self._only(call) if self._one_request else call
        answer = self._behaviour(request, call)
        if self._generates:
            async with contextlib.aclosing(answer) as messages:
                async for message in messages:
                    await call.write(message)
            return
        message = await answer
        if self._one_response:
            await call.write(message)

    @staticmethod
    async def _only(call: Call) -> Any:
        message = await call.read()
        if message is EOF:
            raise CallFault(grpc.StatusCode.INTERNAL, "the call has no message")
        return message


class Methods:
    """All that a server serves, by path."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._known: dict[str, Method] = {}

    def add(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serves what they serve."""
        self._handlers.extend(handlers)

    def get(self, path: str) -> Method | None:
        """The method at `path`."""
        known = self._known.get(path)
        if known is None:
            for handler in self._handlers:
                found = handler.service(Details(path))  # type: ignore[arg-type] - a protocol in all but name
                if found is not None:
                    self._known[path] = known = Method(found)
                    break
        return known
