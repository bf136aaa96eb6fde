"""Replicas of several data-parallel ranks: each is picked, booked and heard by itself, and their process is scaled as a whole."""

from typing import Any

import msgspec
import pytest

from penstock.api import headers, load_report
from penstock.api.events import BlockStored
from penstock.api.fleet import PoolsView, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.prompt.hashing import BlockHasher

STREAMS = {"content-type": "text/event-stream"}


def report(**fields: Any) -> LoadReport:
    return LoadReport(epoch=1, seq=1, max_num_seqs=32, prefill_tokens_per_s=1000.0, decode_step_s=0.01, **fields)


@pytest.fixture
async def ranks(world: Any) -> list[Replica]:
    """Both ranks of the first process, and both of the second; all have told their load."""
    for number, engine in enumerate(world.engines):
        engine.ranks = [report(num_requests_running=10 * number + rank) for rank in range(2)]
    world.replicas = [msgspec.structs.replace(replica, rank=rank) for replica in world.replicas for rank in range(2)]
    await world.ready()
    return world.replicas


def running(world: Any, ranks: list[Replica]) -> list[int]:
    return [world.state.reports.get(key_of(it)).report.num_requests_running for it in ranks]


async def test_a_poll_hears_each_rank_and_the_autoscaler_their_sum(world: Any, ranks: list[Replica]) -> None:
    assert running(world, ranks) == [0, 1, 10, 11]
    (pool,) = msgspec.convert(await world.get("/pools"), PoolsView).pools
    assert [(it.uid, it.name) for it in pool.replicas] == [("u0", "r0"), ("u1", "r1")]
    assert [(it.report.num_requests_running, it.report.max_num_seqs) for it in pool.replicas if it.report] == [(1, 64), (21, 64)]


async def test_a_process_is_not_heard_until_all_its_ranks_are(world: Any) -> None:
    world.engines[0].ranks = [report()]
    of_two = [msgspec.structs.replace(world.replicas[0], rank=rank) for rank in range(2)]
    world.fleet(*of_two)
    await world.until(lambda: world.state.reports.get(key_of(of_two[0])))
    (pool,) = msgspec.convert(await world.get("/pools"), PoolsView).pools
    assert [(it.uid, it.report) for it in pool.replicas] == [("u0", None)]


async def test_a_request_goes_to_the_rank_that_holds_its_prefix(world: Any, ranks: list[Replica]) -> None:
    hashes = BlockHasher(16, "penstock").hash(world.prompt_tokens)
    world.state.event(key_of(ranks[3]), BlockStored(hashes), 0.0)
    stream = world.stream()
    answer = await stream.ask(world.completion(stream=True), **{headers.DATA_PARALLEL_RANK: "0"})
    assert world.destinations(answer) == [ranks[3].endpoint, ranks[1].endpoint], "the same rank of the other process"
    mutation = answer.request_headers.response.header_mutation
    sets = [it.header.raw_value for it in mutation.set_headers if it.header.key == headers.DATA_PARALLEL_RANK]
    assert sets == [b"1"] and headers.DATA_PARALLEL_RANK not in mutation.remove_headers
    told = load_report.encode(LoadReport(epoch=1, seq=9, num_requests_running=7), "TEXT")
    await stream.respond(served=ranks[3].endpoint, **STREAMS, **{headers.LOAD: told, headers.DATA_PARALLEL_RANK: "1"})
    assert running(world, ranks) == [0, 1, 10, 7]
    assert world.state.bookings.count(key_of(ranks[3])) == 1


async def test_a_booking_follows_to_the_same_rank_of_the_process_that_answered(world: Any, ranks: list[Replica]) -> None:
    stream = world.stream()
    answer = await stream.ask(world.completion(stream=True))
    first, other = world.destinations(answer)
    assert first != other
    picked = next(it for it in ranks if world.state.bookings.count(key_of(it)))
    told = load_report.encode(LoadReport(epoch=1, seq=9, num_requests_running=30), "TEXT")
    await stream.respond(served=other, **STREAMS, **{headers.LOAD: told})
    (answering,) = [it for it in ranks if it.endpoint == other and it.rank == picked.rank]
    assert [world.state.bookings.count(key_of(it)) for it in (picked, answering)] == [0, 1]
    assert 30 not in running(world, ranks), "a report that names no rank is of all of them"


async def test_a_report_is_of_all_ranks_where_the_request_named_none(world: Any, ranks: list[Replica]) -> None:
    """A process without ranks was picked, and another one answered in its place. The answer names the rank all the same."""
    undivided = msgspec.structs.replace(ranks[0], rank=None)
    world.fleet(undivided, *ranks[2:])
    await world.until(lambda: world.state.reports.get(key_of(undivided)))
    stream = world.stream()
    answer = await stream.ask(world.completion(stream=True))
    assert world.destinations(answer)[0] == undivided.endpoint, "it has less to do"
    told = load_report.encode(LoadReport(epoch=1, seq=9, num_requests_running=30), "TEXT")
    await stream.respond(served=ranks[3].endpoint, **STREAMS, **{headers.LOAD: told, headers.DATA_PARALLEL_RANK: "1"})
    assert world.state.bookings.count(key_of(ranks[3])) == 1
    assert running(world, ranks[2:]) == [10, 11]


async def test_a_client_names_no_rank_of_an_undivided_replica(world: Any) -> None:
    await world.ready()
    answer = await world.stream().ask(world.completion(), **{headers.DATA_PARALLEL_RANK: "5"})
    assert headers.DATA_PARALLEL_RANK in answer.request_headers.response.header_mutation.remove_headers
