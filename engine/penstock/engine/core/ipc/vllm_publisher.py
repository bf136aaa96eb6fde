"""The event stream in vLLM's form: numbered batches on a PUB socket, and their replay as vLLM 0.32 answers it."""

import logging
from collections.abc import Iterable

import zmq

from penstock.api import vllm_events
from penstock.api.events import END_OF_REPLAY, Event, decode_seq, encode_seq
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.publisher import ReplayBuffer
from penstock.engine.core.ipc.sockets import Context, Socket
from penstock.engine.core.vllm_events import BlockContents
from penstock.engine.kv_events_config import KVEventsConfig, listens

_log = logging.getLogger(__name__)


class VllmEventPublisher:
    """Publishes what the cache says, once `contents` is set. Single-threaded, as `EventPublisher`.

    Args:
        context: Context of the sockets.
        config: Where; its events are on.
        rank: The data-parallel rank, for which the endpoints are meant.

    Raises:
        ConfigError: An endpoint can be neither bound nor connected to.
    """

    def __init__(self, context: Context, config: KVEventsConfig, rank: int) -> None:
        self.contents: BlockContents | None = None
        """Where the tokens of blocks come from."""
        self._rank = rank
        self._topic = config.topic.encode()
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self.replay_socket: Socket | None = None
        _open(self._pub, config.endpoint, bind=listens(config.endpoint))
        if config.replay_endpoint is not None:
            self.replay_socket = context.socket(zmq.ROUTER)
            self.replay_socket.set_hwm(2 * config.buffer_steps)
            _open(self.replay_socket, config.replay_endpoint, bind=True)

    def publish(self, told: Iterable[Event], now: float) -> None:
        """Sends what these events say of blocks; `now` is Unix time in seconds."""
        assert self.contents is not None
        found = self.contents.translate(told)
        if found:
            payload = vllm_events.encode(vllm_events.EventBatch(now, found, self._rank))
            seq = self._buffer.append(payload)
            self._pub.send_multipart([self._topic, encode_seq(seq), payload])

    def serve_replay(self) -> None:
        """Answers the requests that have arrived; malformed ones get no answer."""
        while self.replay_socket is not None and self.replay_socket.poll(0):
            peer, *frames = self.replay_socket.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != 8:
                _log.warning("a request for a replay of KV events has %d frames in place of 2", len(frames))
                continue
            for seq, payload in self._buffer.newest(decode_seq(frames[1])):
                self.replay_socket.send_multipart([peer, b"", self._topic, encode_seq(seq), payload])
            self.replay_socket.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Closes the sockets, whatever is still to be sent."""
        for socket in (self._pub, self.replay_socket):
            if socket is not None:
                socket.close(linger=0)


def _open(socket: Socket, endpoint: str, *, bind: bool) -> None:
    try:
        socket.bind(endpoint) if bind else socket.connect(endpoint)
    except zmq.ZMQError as error:
        act = "bound" if bind else "connected to"
        why = zmq.strerror(error.errno or 0)
        raise ConfigError(f"--kv-events-config: {endpoint} cannot be {act}: {why}") from None
