"""What the sockets at both ends of the core's process boundary have in common."""

from typing import cast

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def opened(context: Context, kind: int) -> Socket:
    """A socket that neither blocks nor drops: the core's queue bounds the requests, and the requests bound the outputs."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


def has_message(socket: Socket) -> bool:
    """Whether there is one to receive. Unlike `Socket.poll` this makes no poller."""
    return bool(cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN)
