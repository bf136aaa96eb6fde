"""Pages in a real Mooncake store with a real model: replicas share them, and a store that fails costs computation alone."""

import os
import signal
import sys
import time

import pytest
from counted_pages import count_pages
from test_core_with_runner import requests
from test_disk_tier_in_core import check_ranks_share, run, start  # noqa: F401  a fixture

from penstock.engine.config import ConfigError
from penstock.engine.connectors import lookups, lower_tier, mooncake_store
from penstock.engine.connectors.mooncake_store import MooncakeStore
from penstock.engine.connectors.moves import PageFile, page_name
from penstock.engine.connectors.store_address import store_address
from testing.mooncake_processes import Mooncake

FAMILY = "gemma2"
"""It has windows: two groups of pages."""


@pytest.fixture(scope="module")
def shared():
    """A store for all tests that leave it whole."""
    if not Mooncake.is_installed():
        pytest.skip("Mooncake is not installed: make kv-parts")
    store = Mooncake()
    yield store
    store.close()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    return count_pages(monkeypatch, MooncakeStore)


@pytest.fixture
def open_store(start):  # noqa: F811
    """Starts engines, and waits until their client is connected to the store."""

    def opened(*arguments, **options):
        core = start(*arguments, **options)
        core.step()
        mover, deadline = core._executor._runner._movers["store"], time.monotonic() + 60
        while mover._client is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return core

    return opened


def told(core):
    return core.stats().offload.lower["store"]


@pytest.mark.req("KO-26", "KO-30")
def test_another_replica_loads_from_a_real_store_what_one_has_stored(open_store, shared, counted, tmp_path):
    batch = requests(adjusted=False)[:6]
    first = open_store(None, FAMILY, store=shared.uri)
    expected = run(first, batch)
    stored = told(first)
    assert stored.stored_bytes > 0 == stored.loaded_bytes == stored.failed_pages == stored.failed_stores
    second = open_store(tmp_path, FAMILY, store=shared.uri)  # with a disk in front, which is empty
    assert run(second, batch) == expected
    found = second.stats().offload
    assert found.lower["store"].loaded_bytes > 0 and found.loaded_tokens > 0 and found.lower["store"].failed_pages == 0
    assert counted["read"].items() <= counted["write"].items() and counted["read"], "bytes equal, page by page"
    assert found.lower["disk"].pages_used > 0, "what came from afar is on the disk now"
    assert second.scheduler.kv.reset()
    while second.is_reading:
        second.step()
    last = open_store(None, FAMILY, store=shared.uri)
    run(last, batch[:2])
    assert told(last).loaded_bytes == 0, "what is forgotten is forgotten for others, too"


@pytest.mark.slow
@pytest.mark.req("KO-30")
def test_each_rank_keeps_its_part_of_a_page_there(start, shared, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lookups, "PATIENCE_S", 30.0)  # their clients connect while the first request waits
    check_ranks_share(start, "store", store=shared.uri)


@pytest.mark.req("KO-31")
def test_other_bytes_in_the_store_are_computed_again_and_replaced(open_store, shared, caplog):
    batch = requests(adjusted=False)[:4]
    first = open_store(None, store=shared.uri)
    expected = run(first, batch)
    client = first._executor._runner._movers["store"]._opened()
    [key, *_] = names = [
        f"{first._executor._runner._movers['store']._folder}/{page_name(PageFile(0, it))}" for it in first._offload.names()
    ]
    half = client.get(key)[:-7]
    assert half and client.remove(key, True) == 0 == client.put(key, half)
    for name in names[1:]:
        if body := client.get(name):
            assert client.remove(name, True) == 0 == client.put(name, body[:-1] + bytes([body[-1] ^ 1]))
    second = open_store(None, store=shared.uri)
    assert run(second, batch) == expected
    assert told(second).failed_pages > 0 == told(second).loaded_bytes
    assert "could not be read from the shared store, and is computed again" in caplog.text
    # A replica replaces what it reads, and may not have read pages behind a wrong one.
    for _ in names:
        other = open_store(None, store=shared.uri)
        assert run(other, batch) == expected
        if not told(other).failed_pages:
            break
    assert told(other).loaded_bytes > 0 == told(other).failed_pages
    assert other.scheduler.kv.reset()


@pytest.mark.req("KO-31")
def test_a_store_that_hangs_or_dies_costs_computation_and_is_told(start, open_store, monkeypatch, caplog):  # noqa: F811
    if not Mooncake.is_installed():
        pytest.skip("Mooncake is not installed: make kv-parts")
    for name in ("PATIENCE_S", "SLOW_S"):
        monkeypatch.setattr(lookups, name, 0.2)
    monkeypatch.setattr(mooncake_store, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(lower_tier, "PAUSE_S", 0.2)
    batch = requests(adjusted=False)[:4]
    store = Mooncake()
    try:
        core = open_store(None, store=store.uri)
        expected = run(core, batch)
        assert told(core).stored_bytes > 0
        late = open_store(None, store=store.uri)
        os.kill(store.master.pid, signal.SIGSTOP)
        assert run(late, batch) == expected and told(late).failed_lookups > 0 == told(late).loaded_bytes
        os.kill(store.master.pid, signal.SIGCONT)
        store.close()
        down = start(None, store=store.uri)
        assert run(down, batch) == expected and told(down).failed_lookups > 0 < told(down).failed_stores
        assert "the shared store for KV pages is left alone for 30 seconds" in caplog.text
        assert "not written to the shared store for 0.2 seconds" in caplog.text
        assert all(it.scheduler.kv.pool.num_used == 0 for it in (late, down))
    finally:
        store.close()


@pytest.mark.parametrize(
    "uri", ["127.0.0.1:5", "mooncake://", "mooncake://h", "mooncake://h:0", "mooncake://h:70000", "s3://h:5", "lmcache://h"]
)
def test_an_address_that_is_none_is_refused(uri):
    with pytest.raises(ConfigError, match=r"--kv-offload-store .*: expected mooncake://HOST:PORT or lmcache://HOST:PORT"):
        store_address(uri)


def test_a_client_that_is_missing_is_named_at_the_start(start, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"--kv-offload-store: the client of Mooncake is missing .*pip install"):
        start(None, store="mooncake://127.0.0.1:5")
