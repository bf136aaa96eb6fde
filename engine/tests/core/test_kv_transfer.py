"""Pages between two ranks over each transport, and the leases that hold them."""

import mmap
import os
import re
import socket
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.engine.cache.layout import KVGroup, KVLayout
from penstock.engine.cache.pages import PageGeometry
from penstock.engine.config import ConfigError, ParallelConfig, TransferConfig
from penstock.engine.connectors.shared_slots import SharedSlots
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.connectors.transfer import lender as lender_module
from penstock.engine.connectors.transfer import nixl
from penstock.engine.connectors.transfer import reader as reader_module
from penstock.engine.connectors.transfer.agent import inlets, outlets
from penstock.engine.connectors.transfer.config import transfer_config
from penstock.engine.connectors.transfer.leases import Leases
from penstock.engine.connectors.transfer.lender import Lender
from penstock.engine.connectors.transfer.pulls import PATIENCE_S, Pulls, lenders
from penstock.engine.connectors.transfer.reader import Reader
from penstock.engine.connectors.transfer.transport import page_sum
from penstock.engine.connectors.transfer.words import Errand, Page, Part, Peer, Pulled
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.kv_transfer import KVTransfer
from penstock.engine.messages import Lent, RemotePrefix
from testing.ports import free_ports

SECRET = b"a secret of many bytes"
PAGE = 100_000
GEOMETRY = PageGeometry(layers=(), layout=KVLayout((KVGroup((0,), 16, None),), PAGE))
WHOLE = Part(0, 1, 0, 1, "same", "127.0.0.1", True)
CONTENT = np.random.default_rng(0).integers(0, 256, (600, PAGE), np.uint8)
needs_nixl = pytest.mark.skipif(nixl.installed() is None, reason="NIXL is not installed: make kv-parts")


TRANSPORTS = ["tcp", "shm", pytest.param("nixl", marks=needs_nixl)]


class Pair:
    """A lender with content, and a reader without."""

    def __init__(self, secret=SECRET, fingerprint="same", engine_id="lender-1", transports=("tcp",), offered=None):
        [self.port] = free_ports(1)
        shared = SharedSlots(600, PAGE)
        self.lent = shared.array
        self.lent[:] = CONTENT
        self.read = np.zeros_like(self.lent)
        config = TransferConfig(role="kv_both", engine_id=f"pair-{self.port}", secret=None, transports=offered or transports)
        self.outlets = outlets(config, shared, SECRET, 0)
        self.lender = Lender(("127.0.0.1", self.port), SECRET, "lender-1", "same", self.lent, self.outlets, GEOMETRY)
        self.inlets = inlets(replace(config, transports=transports), secret, 0)
        self.reader = Reader(secret, replace(WHOLE, name=fingerprint), GEOMETRY, self.read, self.inlets)
        self.peer = Peer(engine_id, ("127.0.0.1",), self.port)
        self.number = 0

    def pull(self, lease, names, slots):
        self.number += 1
        pages = [Page(0, name, slot) for name, slot in zip(names, slots, strict=True)]
        self.reader.pull(Errand("pull", lease, self.number, pages, self.peer))
        deadline = time.monotonic() + 20
        while self.number not in (told := self.reader.take()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return told[self.number]


def name(number):
    return number.to_bytes(32, "big")


@pytest.fixture
def pair():
    made = []

    def make(**how):
        made.append(Pair(**how))
        return made[-1]

    yield make
    for it in made:
        it.reader.close()
        it.lender.close()


@pytest.mark.req("PD-13")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pages_come_byte_for_byte_wherever_they_lie_on_both_sides(pair, transport):
    it = pair(transports=(transport,))
    there, here = [599, 3, 77, *range(100, 400)], [5, 0, 598, *range(200, 500)]
    it.lender.grant("a", [Page(0, name(at), slot) for at, slot in enumerate(there)])
    told = it.pull("a", [name(at) for at in range(len(there))], here)
    assert told.error is None and told.got == list(range(len(there)))
    assert np.array_equal(it.read[here], it.lent[there])
    assert not it.read[np.setdiff1d(np.arange(600), here)].any(), "nothing else is written"
    assert it.lender.take() == ([("a", 1)], [])


def test_what_is_not_in_the_lease_does_not_come_and_an_ended_lease_gives_nothing_at_once(pair):
    it = pair()
    it.lender.grant("a", [Page(0, name(1), 7)])
    told = it.pull("a", [name(1), name(2)], [0, 1])
    assert told.got == [0] and told.error == "1 of 2 pages are not in the lease"
    it.lender.revoke("a")
    began = time.monotonic()
    told = it.pull("a", [name(1)], [2])
    assert told.got == [] and "it has run out" in told.error and time.monotonic() - began < 2
    assert not it.read[[1, 2]].any()


def test_a_reader_that_is_early_waits_for_the_grant(pair):
    it = pair()
    timer = threading.Timer(0.3, it.lender.grant, ["late", [Page(0, name(1), 7)]])
    timer.start()
    assert it.pull("late", [name(1)], [0]).got == [0] and np.array_equal(it.read[0], it.lent[7])


@pytest.mark.req("PD-21")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["before the bytes", "after the bytes"])
def test_pages_whose_lease_ends_while_they_are_sent_are_not_used(pair, monkeypatch, transport, when):
    """The lender's slot has a new owner then. That it was registered, shared or sent does not stop a reader: the lease does."""
    it = pair(transports=(transport,))
    [outlet] = it.outlets.values()
    send = outlet.send

    def send_and_revoke(stream, slots):
        if when == "after the bytes":
            send(stream, slots)
        it.lender.revoke("a")
        it.lent[7] = 1
        if when == "before the bytes":
            send(stream, slots)

    monkeypatch.setattr(outlet, "send", send_and_revoke)
    it.lender.grant("a", [Page(0, name(1), 7)])
    told = it.pull("a", [name(1)], [0])
    assert told.got == [] and told.error == "the lease ran out while its pages were sent"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_page_that_is_changed_on_its_way_is_not_used_and_the_others_are(pair, monkeypatch, transport):
    it = pair(transports=(transport,))

    def sum_and_flip(page):  # before the reader hears of the page: what is shared it reads at once
        found = page_sum(page)
        if np.shares_memory(page, it.lent[7]):
            it.lent[7, 123] ^= 1
        return found

    monkeypatch.setattr(lender_module, "page_sum", sum_and_flip)
    it.lender.grant("a", [Page(0, name(at), slot) for at, slot in enumerate([3, 7, 9])])
    told = it.pull("a", [name(at) for at in range(3)], [0, 1, 2])
    assert told.got == [0, 2] and told.error == "1 of 3 pages have not come whole"


def test_the_sum_of_a_page_sees_each_bit_and_pages_of_any_length():
    page = np.random.default_rng(1).integers(0, 256, 67, np.uint8)
    assert all(page_sum(_flipped(page, bit)) != page_sum(page) for bit in range(8 * len(page)))


def _flipped(page, bit):
    other = page.copy()
    other[bit // 8] ^= 1 << bit % 8
    return other


def test_a_transport_that_does_not_open_gives_way_to_the_next_and_without_one_nothing_comes(pair, monkeypatch, caplog):
    caplog.set_level("INFO")
    it = pair(transports=("shm", "tcp"))
    monkeypatch.setattr(it.inlets["shm"], "open", _not_here)
    it.lender.grant("a", [Page(0, name(1), 7)])
    assert it.pull("a", [name(1)], [0]).got == [0] and np.array_equal(it.read[0], it.lent[7])
    assert "come by tcp (shm: on another node)" in caplog.text
    for other in (pair(transports=("shm",), offered=("tcp",)), pair(transports=("shm",))):
        monkeypatch.setattr(other.inlets["shm"], "open", _not_here)
        other.lender.grant("a", [Page(0, name(1), 7)])
        told = other.pull("a", [name(1)], [0])
        assert told.got == [] and "there is no transport to lender-1: shm" in told.error


def _not_here(offer, deadline):
    raise OSError("on another node")


def test_shared_memory_is_for_those_who_know_the_secret_and_cannot_be_written_or_outlive_its_lender(pair, monkeypatch):
    monkeypatch.setattr(reader_module, "SWEEP_S", 0.05)
    it = pair(transports=("shm",))
    offer = it.outlets["shm"].offer()
    way = it.inlets["shm"].open(offer, time.monotonic() + 5)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(way._fd, b"!", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(way._fd, PAGE)
    with pytest.raises(OSError, match="has no slot 600"):
        way.read(None, [600], [it.read[0]])
    way.close()
    stranger = pair(transports=("shm",), secret=b"another secret of many bytes")
    with pytest.raises(OSError, match="without the secret"):
        stranger.inlets["shm"].open(offer, time.monotonic() + 5)
    it.lender.grant("a", [Page(0, name(1), 7)])
    assert it.pull("a", [name(1)], [0]).got == [0]
    [[(connection, _)]] = it.reader._idle.values()
    it.lender.close()
    deadline = time.monotonic() + 5
    while it.reader._idle:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(connection.way._fd)


@needs_nixl
def test_a_nixl_read_that_does_not_end_is_given_up_and_its_memory_is_not_used_again_until_it_has(pair, monkeypatch):
    it = pair(transports=("nixl",))
    inlet = it.inlets["nixl"]
    way = inlet.open(it.outlets["nixl"].offer(), time.monotonic() + 5)
    agent, address = way._peer, way._address
    inlet.read(agent, address, [7], [it.read[0]], time.monotonic() + 20)
    assert np.array_equal(it.read[0], it.lent[7])
    state = inlet._agent.check_xfer_state
    monkeypatch.setattr(inlet._agent, "check_xfer_state", lambda handle: "PROC")
    with pytest.raises(TimeoutError):
        inlet.read(agent, address, [8], [it.read[1]], time.monotonic() + 0.05)
    assert inlet.num_given_up == 1 and not it.read[1].any()
    [(_, stage)] = inlet._given_up
    assert inlet._take_stage(PAGE) is not stage
    monkeypatch.setattr(inlet._agent, "check_xfer_state", state)
    inlet.read(agent, address, [9], [it.read[2]], time.monotonic() + 20)
    assert np.array_equal(it.read[2], it.lent[9]) and inlet.num_given_up == 0
    way.close()


@needs_nixl
def test_nixl_reads_more_pages_than_a_stage_holds(pair):
    it = pair(transports=("nixl",))
    it.inlets["nixl"]._stage_bytes = 7 * PAGE
    it.lender.grant("a", [Page(0, name(at), at) for at in range(20)])
    assert len(it.pull("a", [name(at) for at in range(20)], range(40, 60)).got) == 20
    assert np.array_equal(it.read[40:60], it.lent[:20])


@pytest.mark.req("Q-19")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"secret": b"another secret of many bytes"}, "closed the connection|reset"),
        ({"fingerprint": "other"}, "pages here have the fingerprint same, not other"),
        ({"engine_id": "lender-0"}, "the engine here is lender-1, not lender-0"),
    ],
)
def test_a_reader_that_is_not_meant_gets_nothing(pair, how, words):
    it = pair(**how)
    it.lender.grant("a", [Page(0, name(1), 7)])
    told = it.pull("a", [name(1)], [0])
    assert told.got == [] and re.search(words, told.error) and not it.read.any()


def test_a_lender_that_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(reader_module, "PULL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        it = Reader(SECRET, WHOLE, GEOMETRY, np.zeros((1, PAGE), np.uint8), {})
        peer = Peer("x", ("127.0.0.1",), silent.getsockname()[1])
        it.pull(Errand("pull", "a", 1, [Page(0, name(1), 0)], peer))
        deadline = time.monotonic() + 5
        while not (told := it.take()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert told[1].got == [] and "TimeoutError" in told[1].error


def test_a_lender_without_a_part_for_each_stage_gives_nothing(pair):
    it = pair()
    it.peer = replace(it.peer, hosts=())
    told = it.pull("a", [name(1)], [0])
    assert told.got == [] and "lends 0 parts of pages, fewer than there are pipeline stages" in told.error


def test_a_connection_serves_the_next_request_and_a_dead_one_is_replaced(pair):
    it = pair()
    it.lender.grant("a", [Page(0, name(1), 7)])
    assert it.pull("a", [name(1)], [0]).got == [0] and it.pull("a", [name(1)], [1]).got == [0]
    assert len(it.lender._readers) == 1
    it.lender.rename("same")  # as after new weights: connections end
    assert it.pull("a", [name(1)], [2]).got == [0] and np.array_equal(it.read[2], it.lent[7])


@pytest.mark.req("PD-33")
@pytest.mark.parametrize(
    ("ours", "drafts", "told"),
    [
        ({}, None, None),
        ({}, "ngram", None),
        ({}, "mtp", "tp_size is 2, and here it is 1: both must be equal"),
        ({"pipeline_parallel_size": 2}, None, "pp_size is 1, and here it is 2: both must be equal"),
    ],
)
def test_sizes_that_must_be_equal_at_both_ends_are_named(tmp_path, ours, drafts, told):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    config = TransferConfig(role="kv_both", engine_id="e", secret=secret)
    lent = Lent("lease", 16, [[3]], "same", "e", ["10.0.0.1", "10.0.0.2"], 1)
    params = KVTransfer(config, ParallelConfig(tensor_parallel_size=2), drafts).params(lent)
    reader = KVTransfer(config, ParallelConfig(**ours), drafts)
    if told is None:
        remote = reader.read(params)
        assert remote.hosts == lent.hosts and params["remote_host"] == lent.hosts[0]
    else:
        with pytest.raises(ApiError, match=told):
            reader.read(params)


def ready(tier, number):
    key = Key(0, name(number))
    tier.written(key, tier.reserve(key), ok=True)
    return key


@pytest.mark.req("PD-12", "PD-15")
def test_a_lease_is_granted_when_its_pages_are_written_and_keeps_them_until_it_ends():
    tier = TierIndex(2)
    leases = Leases(tier, 30.0)
    key, late = ready(tier, 1), Key(0, name(2))
    slot = tier.reserve(late)
    lease, slots = leases.hold([key, late])
    assert leases.take(0.0) == [] and leases.is_due
    tier.written(late, slot, ok=True)
    [grant] = leases.take(1.0)
    assert (grant.action, grant.lease, [page.slot for page in grant.pages]) == ("grant", lease, slots)
    assert tier.reserve(Key(0, name(3))) is None, "leased pages are not evicted"
    leases.renewed(lease, 25.0)
    assert leases.take(40.0) == []
    leases.released(lease, readers=2)
    assert leases.take(41.0) == [], "the other rank still reads"
    leases.released(lease, readers=2)
    assert [it.action for it in leases.take(42.0)] == ["revoke"] and leases.num_leases == 0
    assert tier.reserve(Key(0, name(3))) is None, "the ranks have not heard it yet"
    leases.take(43.0)
    assert tier.reserve(Key(0, name(3))) is not None


@pytest.mark.req("PD-11")
def test_a_lease_ends_by_its_time_and_with_a_page_that_is_forgotten():
    tier = TierIndex(4)
    leases = Leases(tier, 30.0)
    first, second = ready(tier, 1), ready(tier, 2)
    leases.hold([first])
    leases.hold([second])
    assert len(leases.take(0.0)) == 2
    tier.forget(first)
    assert [it.action for it in leases.take(1.0)] == ["revoke"] and leases.num_expired == 0
    assert [it.action for it in leases.take(31.0)] == ["revoke"] and leases.num_expired == 1
    leases.take(32.0)
    assert all(tier.reserve(Key(0, name(number))) is not None for number in range(10, 14))


@pytest.mark.parametrize(
    ("of", "others", "read"),
    [
        (1, 1, [[0], [1]]),
        (2, 1, [[0], [0], [1], [1]]),
        (2, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 3, [[0, 1], [1, 2], [3, 4], [4, 5]]),
    ],
)
def test_a_rank_reads_each_part_that_has_heads_of_its_own_and_releases_the_lease_at_each(of, others, read):
    """In a pipeline of two stages."""
    parts = [Part(stage, 2, number, of, "name", "host", keeps=True) for stage in range(2) for number in range(of)]
    assert [[*lenders(part, 2 * others)] for part in parts] == read
    pulls = Pulls(TierIndex(3), 10, ranks=len(parts))
    pulls.parts = parts
    for index in (7, 8):
        pulls.arrived(index, RemotePrefix("lease", "engine", ["host"] * 2 * others, 1, "same", 16, [1]))
    pulls.begin(7, [Key(0, name(1))], 0.0)
    pulls.left(8)
    assert [(it.action, it.readers) for it in pulls.take(0.0)] == [(what, sum(map(len, read))) for what in ("pull", "release")]


@pytest.mark.req("PD-07")
def test_pages_that_come_are_found_and_others_leave_their_slots_free():
    tier = TierIndex(3)
    pulls = Pulls(tier, 10, ranks=2)
    pulls.arrived(7, RemotePrefix("lease", "engine", ["host"], 1, "same", 32, [2]))
    [renew] = pulls.take(100.0)
    assert renew.action == "renew" and pulls.take(101.0) == []
    keys = [Key(0, name(number)) for number in (1, 2)]
    assert pulls.begin(7, keys, 101.0)
    [errand] = pulls.take(101.0)
    assert errand.action == "pull" and len(errand.pages) == 2 and errand.peer == Peer("engine", ("host",), 1)
    pulls.pulled(errand.number, Pulled(0.1, [0, 1]), 101.5)
    assert pulls.take_waits(102.0) == []
    pulls.pulled(errand.number, Pulled(0.2, [0], "gone"), 102.0)
    assert pulls.take_waits(102.0) == [7] and keys[0] in tier and not tier.knows(keys[1])
    assert (pulls.num_bytes, pulls.num_failed_pages) == (10, 1) and not pulls.is_moving
    assert pulls.times.line(102.0) is None, "a fetch that lacks a page says nothing of what one takes"


def test_a_fetch_is_timed_from_the_decision_until_the_last_rank_has_its_pages():
    pulls = Pulls(TierIndex(40), 10, ranks=2)
    for at, pages in enumerate((2, 10, 4, 20)):
        begun = 100.0 + at
        pulls.arrived(at, RemotePrefix("lease", "engine", ["host"], 1, "same", 16 * pages, [pages]))
        pulls.begin(at, [Key(0, name(100 * at + page)) for page in range(pages)], begun)
        [errand] = [it for it in pulls.take(begun) if it.action == "pull"]
        pulls.pulled(errand.number, Pulled(0.0, [*range(pages)]), begun + 0.001)
        pulls.pulled(errand.number, Pulled(0.0, [*range(pages)]), begun + 0.05 + 0.01 * pages)
    assert pulls.times.line(104.0) == pytest.approx((0.05, 0.01))


@pytest.mark.req("PD-07")
def test_a_request_waits_so_long_and_one_that_leaves_releases_its_lease():
    tier = TierIndex(3)
    pulls = Pulls(tier, 10, ranks=1)
    for index in (7, 8):
        pulls.arrived(index, RemotePrefix(f"lease {index}", "engine", ["host"], 1, "same", 16, [1]))
    pulls.take(0.0)
    pulls.begin(7, [Key(0, name(1))], 0.0)
    assert pulls.take_waits(PATIENCE_S - 1) == [] and pulls.take_waits(PATIENCE_S) == [7] == [*pulls.take_waits(99.0), 7]
    assert Key(0, name(1)) not in tier, "it goes on without the page, which has not come"
    pulls.left(8)
    assert [(it.action, it.lease) for it in pulls.take(1.0)] == [("pull", "lease 7"), ("release", "lease 8")]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kv_connector": "P2pNcclConnector"}, "kv_connector 'P2pNcclConnector' is not here; there is 'transfer'"),
        ({"kv_connector": "NixlConnector"}, '\'transfer\' with "kv_connector_extra_config": {"transports": ["nixl"]}'),
        ({"kv_connector": "MooncakeStoreConnector"}, "there is --kv-offload-store mooncake://HOST:PORT"),
        ({"kv_role": "both"}, "kv_role"),
        ({"kv_rol": "kv_both"}, "there is no key 'kv_rol'"),
        ({"kv_connector_extra_config": {"lease": 3}}, "kv_connector_extra_config: there is no key 'lease'"),
        ({"kv_connector_extra_config": {"kv_lease_duration": 0}}, "kv_lease_duration"),
        ({"kv_port": 0}, "kv_port"),
        ({"kv_connector_extra_config": {"transports": []}}, "transports"),
        ({"kv_connector_extra_config": {"transports": ["rdma"]}}, "transports"),
        ({"kv_connector_extra_config": {"transports": ["tcp", "tcp"]}}, "transports names one twice"),
    ],
)
def test_a_configuration_that_means_nothing_here_is_refused_by_name(tmp_path, keys, words):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    good = {"kv_connector": "transfer", "kv_role": "kv_both"}
    with pytest.raises(ConfigError) as error:
        transfer_config(good | keys, str(secret))
    assert words in str(error.value) and "--kv-transfer-config" in str(error.value)
    assert "`" not in str(error.value), "words of the library"
    first, again = transfer_config(good, str(secret)), transfer_config(good, str(secret))
    assert transfer_config(good | {"kv_port": 65533}, str(secret), 3).port == 65533
    with pytest.raises(ConfigError, match="kv_port 65533: 4 ranks lend on ports up to 65536, and the last port is 65535"):
        transfer_config(good | {"kv_port": 65533}, str(secret), 4)
    assert first.engine_id != again.engine_id and first.lends and first.reads
    with pytest.raises(ConfigError, match=r"with several nodes a replica that lends needs kv_ip on each of them"):
        transfer_config(good, str(secret), 4, several_nodes=True)
    assert transfer_config(good | {"kv_ip": "10.0.0.2"}, str(secret), 4, several_nodes=True).host == "10.0.0.2"
    assert not transfer_config(good | {"kv_role": "kv_consumer"}, str(secret), 4, several_nodes=True).lends


def test_a_secret_is_needed_and_must_be_long_enough(tmp_path):
    good, short = {"kv_connector": "transfer", "kv_role": "kv_both"}, tmp_path / "short"
    short.write_text("short\n")
    for path, words in ((None, "needs --kv-transfer-secret-file"), (short, "has 5 bytes"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            transfer_config(good, None if path is None else str(path))


def test_a_port_that_is_taken_or_an_address_of_no_interface_is_named(pair):
    it = pair()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{it.port} cannot be listened on: Address already in use"):
        Lender(("127.0.0.1", it.port), SECRET, "x", "same", it.lent, {}, GEOMETRY)
    with pytest.raises(ConfigError, match=r"203.0.113.7:\d+ cannot be listened on: Cannot assign requested address"):
        Lender(("203.0.113.7", it.port), SECRET, "x", "same", it.lent, {}, GEOMETRY)


def test_a_transport_whose_package_is_missing_stops_the_start_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    keys = {"kv_connector": "transfer", "kv_role": "kv_both", "kv_connector_extra_config": {"transports": ["nixl"]}}
    with pytest.raises(ConfigError, match="nixl needs NIXL, which is not installed: pip install --no-deps nixl-cu12"):
        transfer_config(keys, str(secret))
