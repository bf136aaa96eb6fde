"""A gRPC server on asyncio alone, for services written for `grpc.aio`, at a fraction of its CPU a call.

Services are registered by the generated `add_…_to_server`. See `Call` for what they find in their context.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import grpc

from penstock.gateway.h2 import limits
from penstock.gateway.h2.call import Call
from penstock.gateway.h2.forms import Connection, connect_by
from penstock.gateway.h2.frames import Code
from penstock.gateway.h2.messages import CallFault, refusal, timeout_s, trailers
from penstock.gateway.h2.methods import Methods
from penstock.gateway.h2.stream import Receiver, Stream
from penstock.gateway.h2.worker import Worker
from penstock.gateway.picker.compiled import Compiled

TICK_S = 5.0
PATIENCE_S = 0.02
"""How long at most what nobody waits for may wait for something else to go out with: a write costs more than what it says."""
LINGER_S = 5.0
"""How long the last words to a peer may take."""

log = logging.getLogger(__name__)


class Shortcut(Protocol):
    """Exchanges that compiled connections take in by themselves; see `Compiled.Connection`."""

    @property
    def exchanges(self) -> object:
        """Which."""
        ...

    def taker(self, peer: "ServerProtocol") -> object:
        """Who hears of those of a connection."""
        ...


class Server:
    """Serves gRPC on any number of addresses.

    Args:
        max_message_bytes: The largest message taken.
        max_calls: Calls in progress, of all peers; more are refused, as Envoy and gRPC try again elsewhere.
        compiled: Whose HTTP/2 it is; None: Python's.
    """

    def __init__(self, max_message_bytes: int, max_calls: int = limits.MAX_STREAMS, *, compiled: Compiled | None = None) -> None:
        self.methods = Methods()
        self.compiled = compiled
        self.connect = connect_by(compiled)
        self.shortcut: Shortcut | None = None
        """What the compiled connections take in without calls."""
        self.max_message_bytes = max_message_bytes
        self.max_calls = max_calls
        self.calls = 0
        """Calls in progress."""
        self.unread = 0
        """Bytes of messages that no service has read yet."""
        self.peers: set[ServerProtocol] = set()
        self._left = asyncio.Event()
        self._servers: list[asyncio.Server] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of services."""
        self.methods.add(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """See `grpc.aio.Server`. Generated code says so what it has said to `add_generic_rpc_handlers` already."""

    async def bind(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Serves at one more address, with TLS where there is a context; returns the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ServerProtocol(self), host, port, ssl=context, backlog=1024)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def stop(self, grace: float) -> None:
        """Takes no more connections, gives calls `grace` seconds to end, and ends the others."""
        for server in self._servers:
            server.close()
        for peer in self.peers:
            peer.connection.leave()
            peer.flush_soon()
        await self._until(lambda: not self.calls, grace)
        for peer in list(self.peers):
            peer.connection.fail(Code.NO_ERROR, "the server stops")
            peer.flush()
        await self._until(lambda: not self.peers and not self.calls, LINGER_S)

    def left(self, peer: "ServerProtocol | None" = None) -> None:
        """A call has ended, or a peer has gone."""
        if peer is None:
            self.calls -= 1
        else:
            self.peers.discard(peer)
        if not self.calls or peer is not None:
            self._left.set()

    async def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Waits for what calls and peers do by leaving, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not done():
                    self._left.clear()
                    await self._left.wait()


class ServerProtocol(asyncio.Protocol):
    """A connection and its transport."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self.connection = self._connect()
        self.address = ""
        self._turning = False  # a turn goes on, or is on its way
        self._workers: list[Worker | _Answered] = []  # to be stepped
        self._backlog = 0
        self._gives_way = False  # nothing is read in this turn of the loop any more
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        self._transport = cast(asyncio.Transport, transport)
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.address = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self.server.peers.add(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.connection.fail(Code.CONNECT_ERROR, "this is a port for HTTP/2: offer it by ALPN")
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        if len(data) >= limits.READ_BYTES:
            self._give_way()
        self._turning = True
        self.connection.receive(data, self._loop.time())
        if self._workers:
            return self._turn()
        self._turning = False
        return self.flush()

    def _give_way(self) -> None:
        """Have others take their turn before more of this peer is read. Of a peer that sends faster than it is answered, uvloop
        would read 32 times in a row, which takes long: reports, probes and other peers would wait for it."""
        if not self._gives_way and not self._transport.is_closing():
            self._gives_way = True
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._gives_way = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Stop writing: the transport has enough to send."""
        self._backlog = 0
        self.connection.pause()

    def resume_writing(self) -> None:
        """Continue to write."""
        self.connection.resume()
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection."""
        for timer in filter(None, (self._timer, self._late)):
            timer.cancel()
        self.connection.fail(Code.NO_ERROR, "the connection is lost")
        self.server.left(self)

    # --- Peer, see `Call` ---

    def flush_soon(self) -> None:
        """See `Peer`. What is said in one turn goes out in one write."""
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def step_soon(self, worker: "Worker | _Answered") -> None:
        """Lets a service go on: when all is taken in that was read with what it waits for."""
        self._workers.append(worker)
        if not self._turning:
            self.flush_soon()

    def left(self) -> None:
        """A call has ended."""
        self.server.left()

    # --- inside ---

    def _turn(self) -> None:
        """Lets those go on that have something to do, then writes what they and the connection have to say."""
        self._turning = True
        while self._workers:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.step()
        self._turning = False
        self.flush()

    def flush(self) -> None:
        """Writes what is to be written, as soon as anybody waits for it."""
        if self.connection.urgent:
            return self._write()
        if self._late is None and self.connection.patient:
            self._late = self._loop.call_later(PATIENCE_S, self._overdue)
        return None

    def _overdue(self) -> None:
        """Writes what has waited; some of it came after the timer was set, which costs less than a timer for each."""
        self._late = None
        self._write()

    def _write(self) -> None:
        connection, transport = self.connection, self._transport
        data = connection.take()
        if not data:
            return None
        if not transport.is_closing():
            if connection.paused:
                self._backlog += len(data)
                if self._backlog > limits.MAX_BACKLOG_BYTES:
                    log.warning("%s makes us answer and does not read: its connection is cut", self.address)
                    return transport.abort()
            transport.write(data)
        if connection.closed:
            if not transport.is_closing():
                log.info("connection of %s: %s", self.address, connection.fault)
                self._loop.call_later(LINGER_S, transport.abort)
            return transport.close()
        if connection.flushed():
            self.flush_soon()
        return None

    def _connect(self) -> Connection:
        server, now = self.server, self._loop.time()
        if server.shortcut is None:
            return server.connect(self._accept, now)
        return server.connect(self._accept, now, server.shortcut.exchanges, server.shortcut.taker(self))

    def _accept(self, stream: Stream) -> Receiver | None:
        """A new stream: a call, or what can be answered without one."""
        server, head = self.server, stream.head
        if server.calls >= server.max_calls:
            return None
        no_call = refusal(head)
        if no_call is not None:
            return self._answer(stream, no_call)
        method = server.methods.get(head.pseudo[":path"])
        try:
            if method is None:
                raise CallFault(grpc.StatusCode.UNIMPLEMENTED, f"{head.pseudo[':path']} does not exist")
            call = Call(self, stream, method, server.max_message_bytes, timeout_s(head))
        except CallFault as fault:
            return self._answer(stream, trailers(fault.code, fault.details, alone=True))
        server.calls += 1
        return call

    def _answer(self, stream: Stream, block: bytes) -> Receiver:
        """The stream's answer, which goes out with the next write: its caller may be waiting for it before it sends a message."""
        answered = _Answered(self.connection, stream, block)
        self.step_soon(answered)
        return answered

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.connection.tick(self._loop.time())
        self.flush_soon()


class _Answered:
    """A stream whose answer does not depend on what comes."""

    def __init__(self, connection: Connection, stream: Stream, block: bytes) -> None:
        self._connection, self._stream, self._block = connection, stream, block

    def step(self) -> None:
        """Answers."""
        self._connection.end(self._stream, self._block)

    def data(self, data: bytes) -> None:
        """Receive the next bytes, never empty."""

    def end(self) -> None:
        """The peer has sent all."""

    def reset(self, code: Code) -> None:
        """The stream is gone before its end, by the peer's will or by a fault: nothing more comes or goes."""

    def sent(self) -> None:
        """All that was to be sent is on its way."""
