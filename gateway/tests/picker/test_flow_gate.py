"""Flow control in the whole gateway: who waits, who goes on, who is sent away; and nothing of it is there without pressure."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool
from penstock.api.load_report import LoadReport
from penstock.gateway.flow.capacity import NEW_ROOM
from penstock.gateway.picker.candidates import key_of


def report(world: Any, seq: int, **load: Any) -> None:
    """Both replicas report."""
    for replica in world.replicas:
        world.state.reported(key_of(replica), LoadReport(epoch=1, seq=seq, **load), _now())


def _now() -> float:
    return asyncio.get_running_loop().time()


async def full(world: Any) -> None:
    """Both replicas say, again and again as a busy engine does, that their rows are taken."""
    busy = {"max_num_seqs": 8, "num_requests_running": 8, "num_requests_waiting": {"capacity": 1}}
    for engine in world.engines:
        engine.report = LoadReport(epoch=1, seq=1000, **busy)
    await world.ready()
    report(world, 1000, **busy)


async def held(world: Any, count: int, **fields: Any) -> list[tuple[Any, asyncio.Task[Any]]]:
    """So many requests that wait."""
    before = world.gateway._gate.control.requests
    streams = [world.stream() for _ in range(count)]
    asked = [(stream, asyncio.create_task(stream.ask(world.completion(), **fields))) for stream in streams]
    await world.until(lambda: world.gateway._gate.control.requests == before + count)
    return asked


async def test_no_queue_is_made_without_pressure(world: Any) -> None:
    await world.ready()
    for _ in range(20):
        stream = world.stream()
        assert world.destinations(await stream.ask(world.completion()))
        await stream.respond()
        await stream.end()
    gate = world.gateway._gate
    assert gate.control.made == 0
    assert gate._lanes["ns/tiny"].transit == 0


async def test_requests_for_busy_replicas_wait_here_until_a_report_says_that_there_is_room(world: Any) -> None:
    await full(world)
    asked = await held(world, 3)
    view = await world.get("/pools")
    assert view["pools"][0]["held"] == 3
    async with world.http.get("/metrics") as response:
        assert 'penstock_flow_queued_requests{model="ns/tiny",priority="0"} 3.0' in await response.text()
    assert not any(task.done() for _, task in asked)
    report(world, 1001, max_num_seqs=8, num_requests_running=8)  # one may queue there, at each
    world.gateway._gate.wake()
    await world.until(lambda: sum(task.done() for _, task in asked) == 2)
    assert world.gateway._gate.control.requests == 1
    for stream, task in asked:
        task.cancel()
        stream.call.cancel()
    await world.until(lambda: not world.state.held)
    async with world.http.get("/metrics") as response:
        text = await response.text()
    series = 'penstock_flow_wait_seconds_count{model="ns/tiny",outcome="%s"} %s'
    assert series % ("went_on", 2.0) in text and series % ("left", 1.0) in text
    assert world.gateway._gate.control.requests == world.gateway._gate._lanes["ns/tiny"].transit == 0


async def test_a_newcomer_does_not_pass_one_that_waits_though_there_is_room_now(world: Any) -> None:
    await full(world)
    [(stream, task)] = await held(world, 1)
    gate, [model] = world.gateway._gate, world.state.directory.fleet.models
    report(world, 1001, max_num_seqs=8, num_requests_running=1)  # nothing has been let on yet
    assert gate._room(gate._lanes[model.id], _now()) > 0
    gate._lanes[model.id].good_until = 0.0  # what was counted while there was no room is not believed
    assert not gate.enter(model, 10, _now())
    gate.wake()
    assert world.destinations(await asyncio.wait_for(task, 60))
    assert gate.enter(model, 10, _now()), "nobody waits any more"
    gate.leave(model)
    stream.call.cancel()


async def test_who_leaves_frees_a_place_at_once(world: Any) -> None:
    await full(world)
    gate = world.gateway._gate
    gate.control._limits = msgspec.structs.replace(gate.control._limits, tenant_requests=2)
    (first, task), _ = await held(world, 2)
    status, reason, content, sets = world.error(await world.stream().ask(world.completion()))
    assert (status, reason, content["type"]) == (429, "tenant_queue_full", "rate_limit_error")
    assert int(sets["retry-after"]) >= 1
    first.call.cancel()
    await world.until(lambda: gate.control.requests == 1)
    await held(world, 1)
    task.cancel()
    gate.close()


async def test_models_with_a_smaller_number_displace_others_where_room_for_waiting_runs_out(world: Any) -> None:
    """Their own queues are apart: the numbers count where all models share."""
    names = {"tiny": 0, "urgent": -5, "later": 5}
    models = [Model(id=f"ns/{name}", served_names=[name], priority=number, hold_timeout_s=60.0) for name, number in names.items()]
    pools = [Pool(id=f"{model.id}/p", model=model.id) for model in models]
    world.discovery.queue.put_nowait(Fleet(models=models, pools=pools))
    await world.until(lambda: world.state.directory.names.get("later"))
    gate = world.gateway._gate
    gate.control._limits = msgspec.structs.replace(gate.control._limits, requests=2)

    async def ask(name: str) -> Any:
        return await world.stream().ask(world.completion(model=name))

    waiting = [asyncio.create_task(ask(name)) for name in ("tiny", "later")]
    await world.until(lambda: gate.control.requests == 2)
    urgent = asyncio.create_task(ask("urgent"))
    assert world.error(await asyncio.wait_for(waiting[1], 60))[:2] == (503, "displaced")
    assert world.error(await asyncio.wait_for(ask("later"), 60))[:2] == (503, "queue_full")
    assert {model: list(queue.bands) for model, queue in gate.control.queues.items()} == {"ns/tiny": [0], "ns/urgent": [-5]}
    waiting[0].cancel()
    urgent.cancel()


async def test_an_old_report_never_stops_dispatch(world: Any) -> None:
    await full(world)
    [(stream, task)] = await held(world, 1)
    for engine, replica in zip(world.engines, world.replicas, strict=True):
        engine.report = LoadReport(epoch=0, seq=0)  # older: polls confirm nothing any more
        heard = world.state.reports.get(key_of(replica))
        heard.at -= 60.0
    assert world.destinations(await asyncio.wait_for(task, 60))
    stream.call.cancel()


@pytest.mark.parametrize(
    ("timeout_ms", "hold_s", "expected"),
    [("150", 60.0, "deadline_exceeded"), ("60000", 0.15, "saturated"), ("9", 0.0, "saturated")],
)
async def test_waiting_ends_in_time(world: Any, timeout_ms: str, hold_s: float, expected: str) -> None:
    await full(world)
    world.fleet(*world.replicas, hold_timeout_s=hold_s)
    await world.until(lambda: world.state.directory.names.get("tiny").model.hold_timeout_s == hold_s)
    answer = await world.stream().ask(world.completion(), **{headers.TIMEOUT: timeout_ms})
    status, reason, content, sets = world.error(answer)
    assert (status, reason, content["type"]) == (503, expected, "server_error")
    assert "busy" in content["message"]
    assert int(sets["retry-after"]) >= 1
    assert not world.state.held


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "99999999999"])
async def test_a_timeout_that_is_none_is_400(world: Any, value: str) -> None:
    await world.ready()
    answer = await world.stream().ask(world.completion(), **{headers.TIMEOUT: value})
    status, reason, content, _ = world.error(answer)
    assert (status, reason, content["param"]) == (400, "invalid_timeout", headers.TIMEOUT)


async def test_a_hundred_requests_held_from_zero_are_shared_out_and_none_is_lost(world: Any) -> None:
    """The first replica gets no more than it can be expected to take; all go on as places become free."""
    world.fleet(hold_timeout_s=60.0)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    before = await world.get("/pools")
    woken = asyncio.create_task(world.get(f"/pools?after={before['version']}&timeout=10"))
    asked = await held(world, 100)
    assert (await woken)["pools"][0]["held"] >= 1
    for engine in world.engines:
        engine.report = LoadReport(epoch=1, seq=1, max_num_seqs=16)

    went: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def served(stream: Any, task: asyncio.Task[Any]) -> None:
        destination = world.destinations(await task)[0]
        went[destination] += 1
        open_now = Counter({r.endpoint: world.state.bookings.count(key_of(r)) for r in world.replicas})
        most.update({key: max(open_now[key] - most[key], 0) for key in open_now})
        await asyncio.sleep(0.05)
        await stream.respond()
        await stream.end()

    jobs = [asyncio.create_task(served(*one)) for one in asked]
    world.fleet(world.replicas[0], hold_timeout_s=60.0)
    await world.until(lambda: went)
    first = key_of(world.replicas[0])
    assert world.state.bookings.count(first) <= NEW_ROOM or world.state.reports.get(first) is not None
    world.fleet(*world.replicas, hold_timeout_s=60.0)
    await asyncio.wait_for(asyncio.gather(*jobs), 60)
    assert sum(went.values()) == 100
    assert max(most.values()) <= 18  # rows and the engine's short queue
    assert min(went.values()) >= 20
    assert not world.state.held and world.gateway._gate._lanes["ns/tiny"].transit == 0


async def test_what_waits_is_asked_anew_what_its_name_means_when_models_change(world: Any) -> None:
    world.fleet(hold_timeout_s=60.0)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    [(stream, task)] = await held(world, 1)
    world.fleet(hold_timeout_s=50.0)  # another model by content: asked anew, and still waiting
    await world.until(lambda: world.state.directory.names.get("tiny").model.hold_timeout_s == 50.0)
    await world.until(lambda: world.gateway._gate.control.requests == 1)
    world.fleet(world.replicas[0], hold_timeout_s=50.0)
    assert world.destinations(await asyncio.wait_for(task, 60)) == [world.replicas[0].endpoint]
    stream.call.cancel()
