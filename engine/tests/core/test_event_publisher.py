"""Replays over real sockets."""

import contextlib
import logging

import pytest
import zmq

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockStored
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.publisher import EventPublisher

FUTURE = 2**63


def test_a_snapshot_can_be_asked_for_before_anything_was_published() -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    publisher = EventPublisher(context, 1000, ["inproc://events"], ["inproc://replay"])
    asking = context.socket(zmq.DEALER)
    with contextlib.closing(publisher), contextlib.closing(asking):
        asking.setsockopt(zmq.RCVTIMEO, 5000)
        asking.connect("inproc://replay")
        asking.send(events.encode_seq(FUTURE))
        assert publisher.replay_socket.poll(5000)
        stored = [BlockStored([b"a"], "memory"), BlockStored([])]
        publisher.serve_replay(lambda: stored)
        number, payload = asking.recv_multipart()
        assert events.decode(payload).events == [AllBlocksCleared(), *stored]
        assert asking.recv_multipart()[0] == events.END_OF_REPLAY
        # What is published next is the first that the snapshot does not hold.
        publisher.publish([AllBlocksCleared()], 2.0)
        asking.send(events.encode_seq(events.decode_seq(number) + 1))
        assert publisher.replay_socket.poll(5000)
        publisher.serve_replay(list)
        assert events.decode(asking.recv_multipart()[1]).events == [AllBlocksCleared()]
    context.destroy(linger=0)


def test_a_default_port_that_is_taken_gives_way_to_a_free_one_which_is_told(caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    wanted, any_port = f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:*"
    with contextlib.closing(taken), caplog.at_level(logging.WARNING):
        with contextlib.closing(EventPublisher(context, 1000, [wanted, any_port], [any_port])) as publisher:
            assert publisher.ports is not None and publisher.ports.events not in (port, publisher.ports.replay)
            assert f"--events-port: {wanted} cannot be bound" in caplog.text and str(publisher.ports.events) in caplog.text
        with pytest.raises(ConfigError, match=f"--replay-port: {wanted} cannot be bound: Address already in use"):
            EventPublisher(context, 1000, [any_port], [wanted])
    context.destroy(linger=0)
