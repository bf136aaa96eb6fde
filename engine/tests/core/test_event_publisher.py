"""Replays over real sockets."""

import contextlib
import logging

import msgspec
import pytest
import zmq

from penstock.api import events, vllm_events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from penstock.api.vllm_events import name_of
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.publisher import EventPublisher
from penstock.engine.core.ipc.vllm_publisher import VllmEventPublisher
from penstock.engine.core.vllm_events import BlockContents
from penstock.engine.kv_events_config import kv_events_config
from penstock.prompt.hashing import BlockHasher, ExtraKeys, PromptItem

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


def test_vllms_form_tells_what_forks_a_chain_and_nothing_of_tenants() -> None:
    contents = BlockContents(2)
    image = PromptItem("picture", 1, 2)
    extra = ExtraKeys(lora="sql", cache_salt="salt", items=(image,))
    first, second, third = names = BlockHasher(2, "seed").hash(range(6), extra)
    contents.add(names, range(7), 0, extra)
    told: list[Event] = [BlockStored([first, second]), BlockStored([b"unheard of"]), BlockStored([third]), BlockRemoved([first])]
    mine = ExtraKeys(tenant="acme")
    secret = BlockHasher(2, "seed").hash([8, 9], mine)
    contents.add(secret, [8, 9], 0, mine)
    one, two, gone = contents.translate([*told, BlockStored(secret), BlockStored([first], "memory")])
    keys = [["sql", ["picture", 1], "salt"], ["sql", ["picture", -1]]]
    known = {"block_size": 2, "lora_name": "sql"}
    begins = {"block_hashes": [name_of(first), name_of(second)], "parent_block_hash": None, "token_ids": [0, 1, 2, 3]}
    follows = {"block_hashes": [name_of(third)], "parent_block_hash": name_of(second), "token_ids": [4, 5]}
    assert one == vllm_events.BlockStored(**begins, **known, extra_keys=keys)
    assert two == vllm_events.BlockStored(**follows, **known, extra_keys=[["sql"]])
    assert gone == vllm_events.BlockRemoved(block_hashes=[name_of(first)])
    assert contents.translate([BlockStored([first]), AllBlocksCleared()]) == [vllm_events.AllBlocksCleared()]


def test_where_vllms_form_is_published() -> None:
    on = {"enable_kv_cache_events": True}
    assert kv_events_config(None) is kv_events_config({}) is kv_events_config({**on, "publisher": "null"}) is None
    config = kv_events_config({**on, "endpoint": "tcp://*:5561", "replay_endpoint": "tcp://127.0.0.1:5571"})
    assert config is not None
    assert (config.of_rank(2).endpoint, config.of_rank(2).replay_endpoint) == ("tcp://*:5563", "tcp://127.0.0.1:5573")
    reader = msgspec.structs.replace(config, endpoint="tcp://reader:5557")  # connected to, by all ranks
    assert reader.of_rank(2).endpoint == "tcp://reader:5557"
    for keys, words in (({"topics": "x"}, "there is no key 'topics'"), ({"buffer_steps": 0}, "buffer_steps")):
        with pytest.raises(ConfigError, match=f"--kv-events-config.*{words}"):
            kv_events_config({**on, **keys})
    context = zmq.Context[zmq.Socket[bytes]]()
    with pytest.raises(ConfigError, match=r"--kv-events-config: tcp://192.0.2.1:\* cannot be bound"):
        VllmEventPublisher(context, msgspec.structs.replace(config, endpoint="tcp://192.0.2.1:*"), 0)
    context.destroy(linger=0)
