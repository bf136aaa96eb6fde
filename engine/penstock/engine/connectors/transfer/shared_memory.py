"""Pages within one node: the reader copies them out of the lender's memory.

The lender hands out a file descriptor of its host memory on a Unix socket. The socket's name is abstract, so a reader in another
network namespace or on another node does not find it. The memory is sealed: a reader can read and not write.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from penstock.engine.connectors.shared_slots import SharedSlots
from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.transport import Bytes, await_read
from penstock.engine.connectors.transfer.wire import Stream

HAND_OUT_S = 3.0
"""Seconds in which a reader proves that it knows the secret."""
_PROOF_BYTES = 32

_log = logging.getLogger(__name__)


class _Offer(msgspec.Struct, frozen=True):
    name: bytes
    """Of the socket, after the zero byte."""


class SharedMemoryOutlet:
    """Hands out the descriptor, from its construction on.

    Args:
        slots: The lender's memory.
        secret: What readers must know.
    """

    def __init__(self, slots: SharedSlots, secret: bytes) -> None:
        self._slots, self._secret = slots, secret
        self._offer = _Offer(b"penstock-kv-" + secrets.token_hex(16).encode())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"\0" + self._offer.name)
        self._socket.listen()
        self._closed = False
        threading.Thread(target=self._hand_out, name="page-memory", daemon=True).start()

    def offer(self) -> bytes:
        """Where the descriptor can be fetched."""
        return msgspec.msgpack.encode(self._offer)

    def send(self, stream: Stream, slots: Sequence[int]) -> None:
        """Waits until the reader has copied them."""
        await_read(stream)

    def close(self) -> None:
        """Hands out nothing any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _hand_out(self) -> None:
        while not self._closed:
            try:
                reader, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                _log.exception("a reader of shared KV pages could not be let in")
                time.sleep(0.1)
                continue
            with reader:
                try:
                    reader.settimeout(HAND_OUT_S)
                    proof = reader.recv(_PROOF_BYTES, socket.MSG_WAITALL)
                    if hmac.compare_digest(proof, _proof(self._secret, self._offer.name)):
                        socket.send_fds(reader, [b"!"], [self._slots.fd])
                    else:
                        _log.warning("a reader of shared KV pages was refused: it does not know the secret")
                except OSError as error:
                    _log.debug("a reader of shared KV pages has gone: %s", error)


class SharedMemoryInlet:
    """Copies pages out of lenders' memory.

    Args:
        secret: What the lenders know, too.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def open(self, offer: bytes, deadline: float) -> "_Mapped":
        """Fetches the descriptor."""
        read = msgspec.msgpack.decode(offer, type=_Offer)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(max(0.001, min(HAND_OUT_S, deadline - time.monotonic())))
            asking.connect(b"\0" + read.name)
            asking.sendall(_proof(self._secret, read.name))
            said, fds, _, _ = socket.recv_fds(asking, 1, 1)
        if not fds:
            raise OSError(f"the lender hands its memory out to nobody without the secret ({said!r})")
        return _Mapped(fds[0])


class _Mapped:
    """One lender's memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, stream: Stream, theirs: Sequence[int], into: Sequence[Bytes]) -> None:
        """Copies pages, and says so.

        `pread` and no mapping: a mapping of a lender that has shrunk its memory would kill this process.
        """
        for there, buffer in zip(theirs, into, strict=True):
            view, offset = buffer.data, there * len(buffer)
            while len(view):
                if not (got := os.preadv(self._fd, [view], offset)):
                    raise OSError(f"the lender's memory has no slot {there}")
                view, offset = view[got:], offset + got
            if time.monotonic() > stream.deadline:
                raise TimeoutError("pages could not be copied in time")
        stream.send(wire.Read())

    def close(self) -> None:
        """Lets the memory go, which would else outlive its lender."""
        os.close(self._fd)


def _proof(secret: bytes, name: bytes) -> bytes:
    return hmac.new(secret, b"memory" + name, hashlib.sha256).digest()
