"""Pages on the disk as the scheduler sees them, with moves that end when the test says so."""

from typing import get_args

import pytest
from fake_runner import reference
from harness import make_request
from test_kv_offload import PROMPT, flood, make

from penstock.engine.connectors import lookups
from penstock.engine.connectors.lower_tier import MAX_WRITES, PATIENCE_S, PAUSE_S, LowerTier
from penstock.engine.connectors.moves import Lower, Moved, PageFile
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.core.scheduling.request import RequestStatus


def key(number: int) -> Key:
    return Key(0, bytes([number]))


def stored(host: TierIndex, tier: LowerTier, *numbers: int) -> None:
    for number in numbers:
        slot = host.reserve(key(number))
        assert slot is not None
        host.written(key(number), slot, ok=True)
        tier.offer(key(number))


def test_no_more_writes_are_in_flight_than_a_read_may_wait_for():
    host = TierIndex(40)
    tier = LowerTier("disk", host, 40, 10)
    stored(host, tier, *range(20))
    first = tier.take(0.0)
    assert len(first) == MAX_WRITES and not tier.take(0.0)
    tier.moved(first[0].number, Moved(0.5), 0.0)
    assert len(tier.take(0.0)) == 1 and tier.stats().stored_bytes == 10 and tier.stats().store_s == 0.5


def test_a_failed_write_stops_others_for_a_while():
    host = TierIndex(9)
    tier = LowerTier("disk", host, 9, 10)
    stored(host, tier, 1)
    [move] = tier.take(0.0)
    tier.moved(move.number, Moved(0.0, "No space left on device"), 0.0)
    stored(host, tier, 2)
    assert not tier.take(PAUSE_S - 1) and key(1) not in tier.index
    assert [move.block_hash for move in tier.take(PAUSE_S)] == [key(2).block_hash]


def test_a_page_being_written_is_not_evicted_from_memory_and_one_that_left_is_not_written():
    host = TierIndex(1)
    tier = LowerTier("disk", host, 9, 10)
    stored(host, tier, 1)
    [move] = tier.take(0.0)
    assert host.reserve(key(2)) is None, "its slot is being read"
    tier.moved(move.number, Moved(0.0), 0.0)
    stored(host, tier, 2, 3)
    assert [move.block_hash for move in tier.take(0.0)] == [key(3).block_hash]


def test_what_is_forgotten_while_it_is_written_is_deleted_after_it():
    host = TierIndex(4)
    tier = LowerTier("disk", host, 4, 10)
    stored(host, tier, 1)
    [write] = tier.take(0.0)
    tier.forget(key(1))
    [delete] = tier.take(0.0)
    assert delete.action == "delete" and delete.number > write.number
    tier.moved(write.number, Moved(0.0), 0.0)
    assert key(1) not in tier.index and tier.index.num_room == 4


@pytest.mark.req("KO-06")
def test_two_requests_wait_for_one_read():
    host = TierIndex(4)
    tier = LowerTier("disk", host, 4, 10)
    tier.open([PageFile(*key(1))])
    assert tier.begin(7, [key(1)], 0.0) and tier.begin(8, [key(1)], 0.0)
    [move] = tier.take(0.0)
    assert move.action == "read" and key(1) not in host and not tier.take_waits(0.0)
    tier.moved(move.number, Moved(0.0), 0.0)
    assert tier.take_waits(0.0) == [7, 8] and key(1) in host


def with_tiers(machine, *names: Lower):
    """Puts tiers behind the machine's host memory: its offload, and these tiers."""
    offload = machine.scheduler._offload
    assert offload is not None
    tiers = [LowerTier(name, offload.tier, 100, 1) for name in names]
    offload.lower.extend(tiers)
    return offload, tiers


def parked(host_pages: int = 200):
    """A machine with a request that waits for the seven pages of its prompt, which are on the disk alone."""
    machine = make(host_pages=host_pages, depth=2)
    offload, [disk] = with_tiers(machine, "disk")
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    names = [name for name in offload.names() if Key(0, name) in offload.tier][:7]
    disk.open(PageFile(0, name) for name in names)
    flood(machine, 1)
    offload.tier.clear()
    disk._wanted.clear()
    machine.add(make_request(50, PROMPT, 6))
    machine.step()
    return machine, offload, disk


@pytest.mark.req("KO-12", "KO-26")
def test_a_request_waits_for_the_disk_and_then_loads_from_memory():
    machine, offload, disk = parked()
    assert machine.scheduler._book._live[50].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not machine.scheduler.kv.holds(machine.scheduler._book._live[50]), "it waits without blocks"
    moves = disk.take(machine.now)
    assert [move.action for move in moves] == ["read"] * 7
    machine.add(make_request(60, [7, 7], 12))
    while 60 not in machine.finished:
        machine.step()
    assert machine.streams[60] == reference([7, 7], 12), "others run"
    disk.moved(moves[-1].number, Moved(0.1, "damaged"), machine.now)
    for move in moves[:-1]:
        disk.moved(move.number, Moved(0.1), machine.now)
    offload.resume(machine.scheduler, machine.now)
    machine.step()
    plan = machine.plans[-1]
    assert plan.transfers is not None and len(plan.transfers.load_blocks) == 6, "all but the damaged one"
    assert Key(0, moves[-1].block_hash) not in disk.index and disk.stats().failed_pages == 1


@pytest.mark.req("KO-12")
def test_a_disk_that_hangs_holds_a_request_up_for_so_long_and_no_longer():
    machine, offload, disk = parked()
    assert disk.take(machine.now)
    offload.resume(machine.scheduler, machine.now + PATIENCE_S - 1)
    assert machine.scheduler.waiting() == {"remote_kv": 1}
    offload.resume(machine.scheduler, machine.now + PATIENCE_S + 1)
    machine.run()
    assert machine.streams[50] == reference(PROMPT, 6) and machine.cached_tokens[50] == 0


def test_an_abort_while_the_disk_reads_leaves_nothing_behind():
    machine, offload, disk = parked()
    machine.abort(50)
    for move in disk.take(machine.now):
        disk.moved(move.number, Moved(0.1), machine.now)
    offload.resume(machine.scheduler, machine.now)
    machine.run().check_no_leak()
    assert offload.tier.num_room == offload.tier.num_slots


def test_as_many_of_the_first_pages_are_read_as_memory_can_take():
    _, _, disk = parked(host_pages=3)
    assert [move.action for move in disk.take(0.0)].count("read") <= 3


def test_pages_of_adapters_stay_in_memory():
    """Another process may have another adapter under the name."""
    machine = make(loras=(1, 1))
    offload, [disk] = with_tiers(machine, "disk")
    assert machine.load("a", "/first") is None
    machine.ask(0, PROMPT, 6, "a")
    machine.run()
    from_adapter = list(disk._wanted)
    machine.add(make_request(1, PROMPT, 6))
    machine.run()
    machine.add(make_request(2, [9], 2))
    machine.run()
    assert offload.tier.num_ready > len(disk._wanted) > 0 and not from_adapter


def asking():
    """A machine with a request that waits for what a shared store says of the seven pages of its prompt."""
    machine = make(depth=2)
    offload, [store] = with_tiers(machine, "store")
    machine.add(make_request(0, PROMPT, 6))
    machine.step()
    [find] = store.take(machine.now)
    return machine, offload, store, find


def test_a_shared_store_is_asked_for_each_request_and_what_it_has_is_read():
    machine, offload, store, find = asking()
    assert find.action == "find" and len(find.pages) == 7
    assert machine.scheduler.waiting() == {"remote_kv": 1} and machine.scheduler.kv.pool.num_used == 0
    lost = Key(0, find.pages[6].block_hash)
    store._take_in(find.pages)  # known from before, and evicted by the store meanwhile
    store.moved(find.number, Moved(0.0, None, find.pages[:6]), machine.now)
    assert lost not in store.index and store.index.num_ready == 6
    offload.resume(machine.scheduler, machine.now)
    machine.step()
    reads = [move for move in store.take(machine.now) if move.action == "read"]
    assert [move.block_hash for move in reads] == [page.block_hash for page in find.pages[:6]]
    for move in reads:
        store.moved(move.number, Moved(0.0), machine.now)
    offload.resume(machine.scheduler, machine.now)
    machine.step()
    plan = machine.plans[-1]
    assert plan.transfers is not None and len(plan.transfers.load_blocks) == 6
    assert not any(move.action == "find" for move in store.take(machine.now)), "once for each time that it waits"


@pytest.mark.parametrize("late", [False, True])
def test_a_store_without_an_answer_holds_up_one_request_and_is_left_alone(late: bool):
    machine, offload, store, find = asking()
    now = machine.now
    if late:
        offload.resume(machine.scheduler, now + lookups.PATIENCE_S - 0.1)
        assert machine.scheduler.waiting() == {"remote_kv": 1}
        offload.resume(machine.scheduler, now + lookups.PATIENCE_S)
    else:
        store.moved(find.number, Moved(0.1, "refused"), now)
        offload.resume(machine.scheduler, now)
    assert store.stats().failed_lookups == 1
    machine.run()
    assert machine.streams[0] == reference(PROMPT, 6) and machine.cached_tokens[0] == 0
    if late:
        store.moved(find.number, Moved(9.0, None, find.pages), now)
        assert store.index.num_ready == 7, "what came too late is known now"
    key = Key(0, b"other")
    assert not store.look(1, [key], now + lookups.SHUT_S - 1) and store.is_shut(now + lookups.SHUT_S - 1)
    assert store.look(1, [key], now + lookups.PATIENCE_S + lookups.SHUT_S)


def test_what_a_replica_loses_sight_of_stays_in_a_shared_store():
    host = TierIndex(9)
    for name, deleted in (("store", []), ("disk", [key(1).block_hash])):
        tier = LowerTier(name, host, 1, 10)
        tier.open([PageFile(*key(1))])
        assert tier.index.reserve(key(2)) is not None
        assert [move.block_hash for move in tier.take(0.0)] == deleted


@pytest.mark.req("KO-28")
def test_of_several_tiers_all_save_and_the_first_that_has_the_pages_loads():
    machine = make(depth=2)
    offload, tiers = with_tiers(machine, *get_args(Lower))
    disk, store, bucket = tiers

    def answered(*pages):
        [find] = [move for move in store.take(machine.now) if move.action == "find"]
        store.moved(find.number, Moved(0.0, None, list(pages)), machine.now)
        offload.resume(machine.scheduler, machine.now)

    machine.add(make_request(0, [9] * 30, 2))
    machine.step()
    answered()
    machine.run()
    writes = [[move for move in tier.take(machine.now) if move.action == "write"] for tier in tiers]
    saved = [{move.block_hash for move in moves} for moves in writes]
    assert len(saved[0]) == 7 and saved[0] == saved[1] == saved[2]
    for tier, moves in zip(tiers, writes, strict=True):
        for move in moves:
            tier.moved(move.number, Moved(0.0), machine.now)
    names = [PageFile(0, name) for name in offload.names()][:7]
    offload.lower.clear()
    flood(machine, 1)
    offload.lower.extend(tiers)
    offload.tier.clear()
    disk.index.clear()
    machine.add(make_request(50, [9] * 30, 2))
    machine.step()
    answered(*names)
    machine.step()
    reads = [[move.action for move in tier.take(machine.now)].count("read") for tier in (disk, store, bucket)]
    assert reads == [0, 7, 0]
