"""The two gRPC servers that a gateway can stand on: grpc.aio, the reference, and our own on asyncio alone.

Both take services from the same generated `add_…_to_server`, so that nothing behind them knows which it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc

from penstock.gateway.extproc.body import MAX_BODY_BYTES
from penstock.gateway.h2.limits import MAX_STREAMS
from penstock.gateway.h2.server import Server
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.tls import Certificate, grpc_credentials, ssl_context

MAX_MESSAGE_BYTES = MAX_BODY_BYTES + 64 * 1024
"""A buffered body is one message."""


class FrontEnd(Protocol):
    """A gRPC server; the generated `add_…_to_server` take one."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of services."""
        ...

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Add the handlers of services, as `grpc.aio.Server` does."""
        ...

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> int:
        """Serves at one more address, with TLS where there is a certificate; returns the port. Services are added before."""
        ...

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and gives those in progress `grace` seconds."""
        ...


class AioFrontEnd:
    """`grpc.aio`. Listens at one address."""

    def __init__(self, compiled: Compiled | None) -> None:
        """Nothing of it is compiled."""
        options = [
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # Envoy pings all the time; by default gRPC takes the third ping of an idle peer for abuse and cuts the connection.
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(options=options)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of services."""
        self._server.add_generic_rpc_handlers(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Add handlers by method."""
        self._server.add_registered_method_handlers(service_name, method_handlers)  # type: ignore[attr-defined] - not in its stub

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and gives those in progress `grace` seconds."""
        await self._server.stop(grace)

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> int:
        """Serves at one more address, with TLS where there is a certificate; returns the port."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if certificate is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, grpc_credentials(certificate))
        await self._server.start()
        return port


class LeanFrontEnd(Server):
    """Our own HTTP/2."""

    def __init__(self, compiled: Compiled | None) -> None:
        super().__init__(MAX_MESSAGE_BYTES, compiled=compiled)

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> int:
        """Serves at one more address, with TLS where there is a certificate; returns the port."""
        return await self.bind(host, port, ssl_context(certificate) if certificate else None)


FRONT_ENDS: Mapping[str, Callable[[Compiled | None], FrontEnd]] = {"grpc": AioFrontEnd, "lean": LeanFrontEnd}
