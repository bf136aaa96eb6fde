"""How a core's process, or the one that stands in for it, begins and ends with the one that started it."""

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from penstock.engine import messages
from penstock.engine.core.ipc.framing import LENGTH_BYTES
from penstock.engine.core.ipc.ports import Port, SharedPort, SinglePort, StreamPort
from penstock.engine.core.ipc.sockets import Context
from penstock.engine.messages import CoreStart

_LAST_WORDS_S: Final = 1.0


@contextmanager
def begun() -> Generator[tuple[CoreStart, Port, Context]]:
    """What standard input describes, the way to the frontend, and the context of its sockets, which is destroyed at the end.

    Signals meant for the whole process group are the frontend's to handle, who lets running requests finish first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s core: %(message)s")
    start = read_start(sys.stdin.buffer)
    end_with_frontend(start)
    context = Context()
    port = port_of(start, context)
    try:
        yield start, port, context
    finally:
        context.destroy(linger=round(1000 * _LAST_WORDS_S))


def port_of(start: CoreStart, context: Context) -> Port:
    """The way to the frontend, or to several."""
    if start.address is None:
        return StreamPort(socket.socket(fileno=start.stream))
    shared = start.frontends_address
    return SinglePort(context, start.address) if shared is None else SharedPort(context, start.address, shared)


def read_start(stream: BinaryIO) -> CoreStart:
    """The start message: four bytes of length, little endian, then msgpack. Raises `EOFError` where the stream ends before."""
    size = stream.read(LENGTH_BYTES)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < LENGTH_BYTES or len(body) < int.from_bytes(size, "little"):
        raise EOFError("standard input holds no start message: this module is started by penstock.engine.core.ipc.client")
    return messages.decode_start(body)


def end_with_frontend(start: CoreStart) -> None:
    """Ends this process with the one that started it: the frontend, who may have been killed and left the sockets' folder behind,
    or its node's."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        if start.address is not None:
            shutil.rmtree(Path(start.address).parent, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="frontend-watch", daemon=True).start()
