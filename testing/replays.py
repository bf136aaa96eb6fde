"""What an engine's event stream tells to those who come late."""

from collections.abc import Iterator

import zmq

from penstock.api import events


def replayed(port: int, start: int = 0, host: str = "127.0.0.1") -> Iterator[bytes]:
    """Every batch from an event on, as it was sent; from one that is yet to come: a picture of the cache."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(events.encode_seq(start))
        while True:
            assert socket.poll(30_000), "the replay is silent"
            seq, payload = socket.recv_multipart()
            if seq == events.END_OF_REPLAY:
                return
            yield payload
    finally:
        context.destroy(linger=0)
