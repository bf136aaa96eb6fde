"""Pages in a real LMCache server with a real model: replicas share them, and a server that fails costs computation alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import msgspec
import numpy as np
import pytest
from counted_pages import count_pages
from test_core_with_runner import requests
from test_disk_tier_in_core import check_ranks_share, run, start  # noqa: F401  a fixture

from penstock.engine.config import ConfigError
from penstock.engine.connectors import lmcache_protocol, lmcache_store, lookups, lower_tier
from penstock.engine.connectors.lmcache_store import LmcacheStore
from penstock.engine.connectors.moves import Move
from penstock.engine.connectors.store_address import store_address
from testing.ports import free_ports
from testing.sources import ROOT

FAMILY = "gemma2"
"""It has windows: two groups of pages."""
PROGRAM = ROOT / ".tools/lmcache/bin/lmcache"
SEGMENTS = Path("/dev/shm")


class Server:
    """A server whose memory is a segment of that name."""

    def __init__(self, name: str, port: int) -> None:
        self.uri = f"lmcache://127.0.0.1:{port}"
        self.segment = SEGMENTS / f"lmcache_l1_pool_{name}"
        self._port = port
        command = [PROGRAM, "server", "--transport=grpc", f"--port={port}", f"--http-port={free_ports(1)[0]}"]
        command += ["--l1-size-gb=0.06", "--eviction-policy=LRU", "--supported-transfer-mode=engine_driven", f"--shm-name={name}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*command, "--disable-observability"], start_new_session=True, **quiet)

    def wait(self) -> "Server":
        deadline = time.monotonic() + 180
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.1)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.segment.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def servers():
    """A list of one server, in whose place a test may put another."""
    if not PROGRAM.exists():
        pytest.skip("LMCache is not installed: make kv-parts")
    running = [Server(f"penstock-test-{os.getpid()}", *free_ports(1)).wait()]
    yield running
    for server in running:
        server.close()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(lmcache_store, "FIND_S", 20.0)  # on a busy machine, too
    monkeypatch.setattr(lookups, "PATIENCE_S", 30.0)
    monkeypatch.setattr(lmcache_store, "CALL_S", 10.0)
    monkeypatch.setattr(lmcache_store, "TIMEOUT_S", 60.0)
    return count_pages(monkeypatch, LmcacheStore)


def opened(core) -> LmcacheStore:
    """The core's half of the store, once it has mapped the server's memory."""
    store = core._executor._runner._movers["store"]
    deadline = time.monotonic() + 60
    while store._segment is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return store


def told(core):
    return core.stats().offload.lower["store"]


@pytest.mark.slow
@pytest.mark.req("KO-26", "KO-30")
def test_another_replica_loads_from_a_real_server_what_one_has_stored(start, servers, counted, monkeypatch):  # noqa: F811
    batch = requests(adjusted=False)[:6]
    first = start(None, FAMILY, store=servers[0].uri)
    expected = run(first, batch)
    stored = told(first)
    assert stored.stored_bytes > 0 == stored.loaded_bytes == stored.failed_pages == stored.failed_stores
    second = start(None, FAMILY, store=servers[0].uri)
    assert run(second, batch) == expected
    found = second.stats().offload
    assert found.lower["store"].loaded_bytes > 0 and found.loaded_tokens > 0 and found.lower["store"].failed_pages == 0
    assert counted["read"] and counted["read"].items() <= counted["write"].items(), "bytes equal, page by page"
    assert second.scheduler.kv.reset()
    while second.is_reading:
        second.step()
    before = told(second).loaded_bytes
    run(second, batch[:2])
    assert told(second).loaded_bytes == before, "what this replica has been told to forget it does not find again"
    monkeypatch.setattr(lower_tier, "PAUSE_S", 0.0)
    store = opened(first)
    store._call("UnregisterKvCacheEngineDrivenContext", instance_id=store._instance)  # as the server does after an hour's silence
    run(first, requests(adjusted=False)[6:])
    assert told(first).failed_stores > 0 and told(first).stored_bytes > stored.stored_bytes


@pytest.mark.slow
@pytest.mark.req("KO-30")
def test_each_rank_keeps_its_part_of_a_page_there(start, servers):  # noqa: F811
    check_ranks_share(start, "store", store=servers[0].uri)


@pytest.mark.slow
@pytest.mark.req("KO-31")
def test_other_bytes_in_the_server_s_memory_are_computed_again(start, servers, caplog):  # noqa: F811
    batch = requests(adjusted=False)[:4]
    expected = run(start(None, store=servers[0].uri), batch)
    memory = np.memmap(servers[0].segment, np.uint8, "r+")
    memory ^= 1
    second = start(None, store=servers[0].uri)
    assert run(second, batch) == expected
    assert told(second).failed_pages > 0 == told(second).loaded_bytes
    assert "could not be read from the shared store, and is computed again" in caplog.text
    memory ^= 1
    third = start(None, store=servers[0].uri)
    assert run(third, batch) == expected and told(third).loaded_bytes > 0 == told(third).failed_pages


@pytest.mark.slow
@pytest.mark.req("KO-31")
def test_a_server_that_hangs_or_is_started_anew_costs_computation_and_is_told(start, servers, monkeypatch, caplog):  # noqa: F811
    for module, name in ((lookups, "PATIENCE_S"), (lookups, "SLOW_S"), (lmcache_store, "CALL_S"), (lower_tier, "PAUSE_S")):
        monkeypatch.setattr(module, name, 0.3)
    batch = requests(adjusted=False)[:4]
    server = servers[0]
    core = start(None, store=server.uri)
    idle = start(None, store=server.uri)
    for it in (core, idle):
        opened(it)
    os.killpg(server.process.pid, signal.SIGSTOP)
    expected = run(core, batch)
    assert told(core).failed_lookups > 0 < told(core).failed_stores and told(core).stored_bytes == 0
    assert "the shared store for KV pages is left alone for 30 seconds" in caplog.text
    server.close()
    monkeypatch.setattr(lmcache_store, "CALL_S", 10.0)
    servers[0] = again = Server(server.segment.name.removeprefix("lmcache_l1_pool_"), int(server.uri.rpartition(":")[2])).wait()
    time.sleep(lower_tier.PAUSE_S)
    assert core.scheduler.kv.reset()
    assert run(core, batch) == expected
    fresh = start(None, store=again.uri)
    monkeypatch.setattr(lookups, "PATIENCE_S", 30.0)
    assert run(fresh, batch) == expected and told(fresh).failed_pages == 0
    assert told(core).stored_bytes > 0, "a failed call has it register anew"
    assert run(idle, requests(adjusted=False)[:8]) and told(idle).stored_bytes > 0 == told(idle).failed_stores, (
        "so has other memory"
    )
    assert all(it.scheduler.kv.pool.num_used == 0 for it in (core, idle, fresh))


class Fake:
    """A server in this process that answers each method with a message's fields."""

    def __init__(self, **answers: dict[str, object]) -> None:
        import grpc

        messages = lmcache_protocol.message_classes()

        def handler(details):
            name = details.method.rpartition("/")[2]
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: messages[f"{name}Response"](**answers.get(name, {})),
                messages[f"{name}Request"].FromString,
                messages[f"{name}Response"].SerializeToString,
            )

        class Generic(grpc.GenericRpcHandler):
            service = staticmethod(handler)

        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((Generic(),))
        self.address = store_address(f"lmcache://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}")
        self.server.start()


@pytest.mark.parametrize(
    ("shm", "slot", "chunk", "said"),
    [
        ("", (0, 80), 256, "passes pages on as Python objects alone, which is not safe"),
        ("../passwd", (0, 80), 256, "passes pages on as Python objects alone, which is not safe"),
        ("gone", (0, 80), 256, "No such file"),
        (None, (4090, 80), 256, "which is no slot of a page"),
        (None, (-80, 80), 256, "which is no slot of a page"),
        (None, (0, 4096), 256, "which is no slot of a page"),
        (None, (0, 80), 4, "a page's name needs --chunk-size 9"),
    ],
)
def test_what_a_server_says_is_checked(shm, slot, chunk, said):
    name = f"penstock-fake-{os.getpid()}"
    segment = SEGMENTS / name
    segment.write_bytes(bytes(4096))
    registered = {"shm_name": name if shm is None else shm, "pool_size": 4096}
    context = {"encoded_context": msgspec.msgpack.encode({"slots": [dict(zip(("offset", "length"), slot, strict=True))]})}
    answers = {"GetChunkSize": {"chunk_size": chunk}, "RegisterKvCacheEngineDrivenContext": registered, "PrepareStore": context}
    fake = Fake(**answers)
    store = LmcacheStore(fake.address, type("Namespace", (), {"name": "n"})(), np.ones((1, 16), np.uint8))
    try:
        store.begin([Move(1, "write", 0, bytes(32), 0)])
        deadline = time.monotonic() + 30
        while not (moved := store.take()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert said in str(moved[1].error)
        assert segment.read_bytes() == bytes(4096), "nothing was written"
    finally:
        store.close()
        fake.server.stop(None)
        segment.unlink()


def test_grpc_that_is_missing_is_named_at_the_start(start, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"--kv-offload-store: gRPC for LMCache is missing .*pip install grpcio protobuf"):
        start(None, store="lmcache://127.0.0.1:5")
