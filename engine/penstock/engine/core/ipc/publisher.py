"""The event stream of `penstock.api.events`: numbered batches on a PUB socket, and their replay on a ROUTER socket."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockStored, Event, EventBatch
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.sockets import Context, Socket
from penstock.engine.messages import EventPorts

BUFFERED_BATCHES = 1024

_log = logging.getLogger(__name__)


class ReplayBuffer:
    """The newest batches with their sequence numbers."""

    def __init__(self, size: int) -> None:
        self._payloads: deque[bytes] = deque(maxlen=size)
        self.next_seq = 0

    def append(self, payload: bytes) -> int:
        """Keeps a batch and returns its number."""
        self._payloads.append(payload)
        self.next_seq += 1
        return self.next_seq - 1

    def since(self, start: int) -> list[tuple[int, bytes]] | None:
        """All batches from number `start` on; None where some of them are gone or `start` lies in the future."""
        first = self.next_seq - len(self._payloads)
        if not first <= start <= self.next_seq:
            return None
        return [(seq, self._payloads[seq - first]) for seq in range(start, self.next_seq)]

    def newest(self, start: int) -> list[tuple[int, bytes]]:
        """Those batches from number `start` on that are still there."""
        return self.since(max(start, self.next_seq - len(self._payloads))) or []


class EventPublisher:
    """The PUB and ROUTER sockets of events. Single-threaded: the step loop publishes, polls `replay_socket` and calls
    `serve_replay`.

    Args:
        context: Context of the sockets.
        epoch: Milliseconds since the Unix epoch.
        events_addresses: Addresses for the PUB socket: the first free one is used.
        replay_addresses: Addresses for the ROUTER socket: the first free one is used.

    Raises:
        ConfigError: None of the addresses can be bound.
    """

    def __init__(
        self,
        context: Context,
        epoch: int,
        events_addresses: Sequence[str],
        replay_addresses: Sequence[str],
    ) -> None:
        self._epoch = epoch
        self._buffer = ReplayBuffer(BUFFERED_BATCHES)
        self._time = epoch / 1000
        self._pub = context.socket(zmq.PUB)
        self.replay_socket = context.socket(zmq.ROUTER)
        # A whole replay must fit; a subscriber that does not read it loses it, and asks again.
        self.replay_socket.set_hwm(2 * BUFFERED_BATCHES)
        events_port = _bind(self._pub, events_addresses, "--events-port")
        replay_port = _bind(self.replay_socket, replay_addresses, "--replay-port")
        self.ports = None if events_port is None or replay_port is None else EventPorts(events_port, replay_port)
        """None where the addresses are not TCP."""

    def publish(self, batch: list[Event], now: float) -> None:
        """Sends one batch; `now` is Unix time in seconds."""
        self._time = now
        payload = events.encode(EventBatch(self._epoch, now, batch))
        seq = self._buffer.append(payload)
        self._pub.send_multipart([events.TOPIC, events.encode_seq(seq), payload])

    def serve_replay(self, cached: Callable[[], Sequence[BlockStored]]) -> None:
        """Answers the requests that have arrived; malformed ones get no answer.

        Args:
            cached: Every block cached now, for snapshots: nothing may have changed since the last `publish`.
        """
        while self.replay_socket.poll(0):
            peer, *frames = self.replay_socket.recv_multipart()
            # A REQ socket puts an empty frame before its request.
            if not frames or len(frames[-1]) != 8:
                continue
            for seq, payload in self._replay(events.decode_seq(frames[-1]), cached):
                self.replay_socket.send_multipart([peer, *frames[:-1], events.encode_seq(seq), payload])
            self.replay_socket.send_multipart([peer, *frames[:-1], events.END_OF_REPLAY, b""])

    def close(self) -> None:
        """Closes both sockets, whatever is still to be sent."""
        self._pub.close(linger=0)
        self.replay_socket.close(linger=0)

    def _replay(self, start: int, cached: Callable[[], Sequence[BlockStored]]) -> list[tuple[int, bytes]]:
        batches = self._buffer.since(start)
        if batches is not None:
            return batches
        if not self._buffer.next_seq:  # a snapshot has the number of the batch that it follows
            self.publish([], self._time)
        snapshot: list[Event] = [AllBlocksCleared(), *cached()]
        return [(self._buffer.next_seq - 1, events.encode(EventBatch(self._epoch, self._time, snapshot)))]


def _bind(socket: Socket, addresses: Sequence[str], flag: str) -> int | None:
    """Binds to the first address that is free and returns its TCP port, if it has one; `ConfigError` names the flag."""
    problem = ""
    for address in addresses:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            problem = f"{address} cannot be bound: {zmq.strerror(error.errno or 0)}"
            continue
        bound = socket.get_string(zmq.LAST_ENDPOINT)
        if problem:
            _log.warning("%s: %s; %s is used instead", flag, problem, bound)
        return int(bound.rpartition(":")[2]) if bound.startswith("tcp://") else None
    raise ConfigError(f"{flag}: {problem}")
