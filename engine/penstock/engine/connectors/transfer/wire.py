"""The connection between two ranks: frames, deadlines, and the proof that both know the secret.

Every wait has a deadline. A peer that was stopped keeps its connections open and never answers.
"""

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock.engine.cache.pages import PageGeometry

PROTOCOL = "penstock-transfer-3"
MAX_FRAME = 64 << 20
_LENGTH_BYTES = 4
_IOV = 512
"""Buffers in one call of the operating system."""
_NONCE_BYTES = 32

_T = TypeVar("_T", bound=msgspec.Struct)


class Refused(Exception):
    """The other end does not do what it was asked, or is not who it should be."""


class Challenge(msgspec.Struct, frozen=True):
    """The lender's first words."""

    protocol: str
    nonce: bytes


class Hello(msgspec.Struct, frozen=True):
    """The reader's answer."""

    nonce: bytes
    proof: bytes
    engine_id: str
    """The replica that the reader wants to speak to."""
    fingerprint: str
    """What decides about the bytes of the reader's pages."""


class Welcome(msgspec.Struct, frozen=True):
    """The lender's answer."""

    proof: bytes
    error: str | None = None
    """Why it does not serve this reader."""
    offers: dict[str, bytes] = {}
    """By transport, what the reader must know to open its half."""
    geometry: PageGeometry | None = None
    """Of the lender's pages; None: it does not serve this reader."""


class Ask(msgspec.Struct, frozen=True):
    """What the reader wants of a lease."""

    action: str
    """`pull`, which also releases the lease; `release` or `renew`."""
    lease: str
    pages: list[tuple[int, bytes]] = []
    """Groups and names."""
    transport: str = "tcp"
    """What the pages go by."""
    readers: int = 1
    """How often the reader releases the lease, over all of its ranks and the lender's."""


class Found(msgspec.Struct, frozen=True):
    """Which pages there are, by their places in the reader's list. Their bytes come next, or the reader reads them by itself and
    says so with a `Read`. A `Sealed` ends it."""

    places: list[int]
    slots: list[int] = []
    """Of the lender, in which they are."""
    sums: list[int] = []
    """By which the reader knows that they have come whole; see `page_sum`."""
    error: str | None = None


class Read(msgspec.Struct, frozen=True):
    """The reader has read the pages."""


class Sealed(msgspec.Struct, frozen=True):
    """The lease was still held after the last byte had been sent, so no page was overwritten meanwhile."""

    held: bool


class Stream:
    """A connection on which every wait has a deadline.

    Args:
        sock: Connected.
        deadline: Time on the monotonic clock.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct) -> None:
        """Sends one message."""
        body = msgspec.msgpack.encode(message)
        self.send_buffers([len(body).to_bytes(_LENGTH_BYTES, "big"), body])

    def receive(self, kind: type[_T]) -> _T:
        """Waits for one message; `Refused` for anything else, `EOFError` where the other end has gone."""
        head = bytearray(_LENGTH_BYTES)
        self.receive_into(memoryview(head))
        if (size := int.from_bytes(head, "big")) > MAX_FRAME:
            raise Refused(f"a message of {size:,} bytes")
        body = bytearray(size)
        self.receive_into(memoryview(body))
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise Refused(f"no {kind.__name__}: {error}") from None

    def send_buffers(self, buffers: Sequence[Any]) -> None:
        """Sends buffers one after the other, without copying them together."""
        left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while left:
            self._limit()
            sent, done = self._sock.sendmsg(left[:_IOV]), 0
            while done < len(left) and sent >= len(left[done]):
                sent -= len(left[done])
                done += 1
            del left[:done]
            if sent:
                left[0] = left[0][sent:]

    def receive_into(self, view: memoryview) -> None:
        """Fills a buffer."""
        while len(view):
            self._limit()
            if not (got := self._sock.recv_into(view)):
                raise EOFError("the other end has closed the connection")
            view = view[got:]

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed the connection, on which nobody reads or writes now."""
        self._sock.settimeout(0)
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the connection."""
        self._sock.close()

    def _limit(self) -> None:
        if (left := self.deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other end has not answered in time")
        self._sock.settimeout(left)


def admit(
    stream: Stream, secret: bytes, engine_id: str, fingerprint: str, offers: dict[str, bytes], geometry: PageGeometry
) -> None:
    """Lets a reader in that knows the secret and means this replica; `Refused` for another. `offers` and `geometry` as in
    `Welcome`."""
    challenge = Challenge(PROTOCOL, secrets.token_bytes(_NONCE_BYTES))
    stream.send(challenge)
    hello = stream.receive(Hello)
    if not hmac.compare_digest(hello.proof, _proof(secret, "reader", challenge.nonce, hello.nonce)):
        raise Refused("the reader does not know the secret")
    error = None
    if hello.engine_id != engine_id:
        error = f"the engine here is {engine_id}, not {hello.engine_id}"
    elif hello.fingerprint != fingerprint:
        error = f"pages here have the fingerprint {fingerprint}, not {hello.fingerprint}"
    proof = _proof(secret, "lender", challenge.nonce, hello.nonce)
    if error is not None:
        stream.send(Welcome(proof, error))
        raise Refused(error)
    stream.send(Welcome(proof, None, offers, geometry))


def introduce(stream: Stream, secret: bytes, engine_id: str, fingerprint: str) -> tuple[dict[str, bytes], PageGeometry]:
    """Makes oneself known to a lender, and returns its offers and the geometry of its pages; `Refused` where it is another one,
    or does not know the secret."""
    challenge = stream.receive(Challenge)
    if challenge.protocol != PROTOCOL:
        raise Refused(f"the protocol there is {challenge.protocol!r}, not {PROTOCOL!r}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send(Hello(nonce, _proof(secret, "reader", challenge.nonce, nonce), engine_id, fingerprint))
    welcome = stream.receive(Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(secret, "lender", challenge.nonce, nonce)):
        raise Refused("the lender does not know the secret")
    if welcome.geometry is None:
        raise Refused(welcome.error or "the lender does not say how its pages are laid out")
    return welcome.offers, welcome.geometry


def _proof(secret: bytes, side: str, *nonces: bytes) -> bytes:
    return hmac.new(secret, side.encode() + b"".join(nonces), hashlib.sha256).digest()
