"""Replays over real sockets."""

import contextlib

import zmq

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockStored
from penstock.engine.core.ipc.publisher import EventPublisher

FUTURE = 2**63


def test_a_snapshot_can_be_asked_for_before_anything_was_published() -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    publisher = EventPublisher(context, 1000, "inproc://events", "inproc://replay")
    asking = context.socket(zmq.DEALER)
    with contextlib.closing(publisher), contextlib.closing(asking):
        asking.setsockopt(zmq.RCVTIMEO, 5000)
        asking.connect("inproc://replay")
        asking.send(events.encode_seq(FUTURE))
        assert publisher.replay_socket.poll(5000)
        publisher.serve_replay(list)
        number, payload = asking.recv_multipart()
        assert events.decode(payload).events == [AllBlocksCleared(), BlockStored([])]
        assert asking.recv_multipart()[0] == events.END_OF_REPLAY
        # What is published next is the first that the snapshot does not hold.
        publisher.publish([AllBlocksCleared()], 2.0)
        asking.send(events.encode_seq(events.decode_seq(number) + 1))
        assert publisher.replay_socket.poll(5000)
        publisher.serve_replay(list)
        assert events.decode(asking.recv_multipart()[1]).events == [AllBlocksCleared()]
    context.destroy(linger=0)
