"""A foreign gateway at the port of an InferencePool: names and replicas of that pool, and nothing outside it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import orjson
import pytest
from aiohttp import web
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from penstock.api import headers
from penstock.api.fleet import Fleet, InferencePool, Model, Pool, Replica, open_id
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest
from penstock.gateway.picker.candidates import key_of

OPEN = open_id("ns", "vllm")
MODEL = Model(id="ns/tiny", served_names=["tiny"], hold_timeout_s=0.2)
POOL = Pool(id="ns/tiny/p", model="ns/tiny")


def changed(replica: Replica, **fields: Any) -> Replica:
    return msgspec.structs.replace(replica, **fields)


async def foreign(world: Any, names: list[str]) -> Replica:
    """A server that is none of ours and serves what `names` says, at each moment."""
    stack: contextlib.AsyncExitStack = world.stack

    async def models(_: web.Request) -> web.Response:
        entries = [{"id": name, "object": "model", "parent": "base" if name.startswith("lora") else None} for name in names]
        return web.json_response({"object": "list", "data": entries})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    return Replica(uid=f"v{port}", name=f"v{port}", pool=OPEN, host="127.0.0.1", port=port, events_port=0, replay_port=0,
                   engine="vllm", ready=True)  # fmt: skip


@pytest.fixture
async def pools(world: Any) -> AsyncIterator[Any]:
    """A world with a stack for more servers, and channels to the ports of pools."""
    async with contextlib.AsyncExitStack() as stack:
        world.stack = stack
        yield world


async def serve(world: Any, fleet: Fleet) -> None:
    world.discovery.queue.put_nowait(fleet)
    await world.until(
        lambda: (
            world.state.directory.fleet == fleet
            and set(world.gateway._pool_ports.ports) == {it.id for it in fleet.inference_pools}
        )
    )


def at(world: Any, pool: str) -> Any:
    """One request at the port of a pool."""
    port = world.gateway._pool_ports.ports[pool]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    world.stack.push_async_callback(channel.close)
    own, world.channel = world.channel, channel
    try:
        return world.stream()
    finally:
        world.channel = own


def sets_of(answer: Any) -> dict[str, str]:
    return {o.header.key: o.header.raw_value.decode() for o in answer.request_headers.response.header_mutation.set_headers}


def open_fleet(*replicas: Replica, members: list[Replica] | None = None) -> Fleet:
    pool = InferencePool(id="ns/vllm", models=[OPEN], members=[it.id for it in (members or replicas)])
    model = Model(id=OPEN, served_names=[], hold_timeout_s=0.2)
    return Fleet(models=[model], pools=[Pool(id=OPEN, model=OPEN)], replicas=list(replicas), inference_pools=[pool])


@pytest.mark.req("LO-24")
async def test_an_open_pool_serves_what_its_pods_serve(pools: Any) -> None:
    first_names, second_names = ["base", "lora-a"], ["base"]
    first, second = await foreign(pools, first_names), await foreign(pools, second_names)
    await serve(pools, open_fleet(first, second))
    await pools.until(lambda: len(pools.gateway._served._names) == 2)

    listed = orjson.loads((await at(pools, "ns/vllm").ask(path="/v1/models")).immediate_response.body)["data"]
    assert sorted((it["id"], it["parent"]) for it in listed) == [("base", None), ("lora-a", "base")]
    for _ in range(4):
        stream = at(pools, "ns/vllm")
        answer = await stream.ask(pools.completion(model="lora-a"))
        sets = sets_of(answer)
        assert sets[headers.DESTINATION] == first.endpoint  # the one that has it, and one alone
        assert headers.POOL not in sets and headers.POOL in answer.request_headers.response.header_mutation.remove_headers
        assert (await stream.respond(**{"content-type": "application/json"}))[headers.MODEL] == "lora-a"
        await stream.end()
    both = {sets_of(await at(pools, "ns/vllm").ask(pools.completion(model="base")))[headers.DESTINATION] for _ in range(12)}
    assert both == {first.endpoint, second.endpoint}

    status, reason, error, _ = pools.error(await at(pools, "ns/vllm").ask(pools.completion(model="lora-b")))
    assert (status, reason) == (404, "model_not_found") and "there are: lora-a, base" in error["message"]
    second_names.append("lora-b")  # loaded while the gateway runs: the next question finds it

    async def finds() -> bool:
        answer = await at(pools, "ns/vllm").ask(pools.completion(model="lora-b"))
        return answer.WhichOneof("response") == "request_headers" and sets_of(answer)[headers.DESTINATION] == second.endpoint

    for _ in range(30):
        if await finds():
            break
        pools.gateway._served._asked.clear()  # instead of waiting for a second
    assert await finds()

    # Our own Envoy's port knows nothing of it.
    assert pools.error(await pools.stream().ask(pools.completion(model="base")))[0] == 404


async def test_an_open_pool_whose_pods_say_nothing_passes_names_on(pools: Any) -> None:
    silent = changed(pools.replicas[0], pool=OPEN, engine="auto")  # answers 404 to /v1/models
    await serve(pools, open_fleet(silent))
    stream = at(pools, "ns/vllm")
    answer = await stream.ask(pools.completion(model="what\r\never: é" + "x" * 1000))
    assert sets_of(answer)[headers.DESTINATION] == silent.endpoint
    assert (await stream.respond())[headers.MODEL] == "what??ever: ?" + "x" * 243
    await stream.end()


async def test_a_port_never_answers_outside_its_pool(pools: Any) -> None:
    """Two pools over the replicas of one model, one of them over one replica only, and an open one."""
    first, second = pools.replicas
    stranger = await foreign(pools, ["other"])
    other = open_fleet(stranger)
    fleet = Fleet(
        models=[MODEL, *other.models],
        pools=[POOL, *other.pools],
        replicas=[first, second, stranger],
        inference_pools=[
            InferencePool(id="ns/all", models=["ns/tiny"], members=[first.id, second.id]),
            InferencePool(id="ns/one", models=["ns/tiny"], members=[second.id]),
            *other.inference_pools,
        ],
    )
    await serve(pools, fleet)
    await pools.until(lambda: all(it.ready for it in pools.state.directory.replicas.values()))
    await pools.until(lambda: pools.gateway._served.known([key_of(stranger)]))
    assert len(set(pools.gateway._pool_ports.ports.values())) == 3

    async def picked(pool: str, model: str = "tiny", **more: Any) -> str:
        return sets_of(await at(pools, pool).ask(pools.completion(model=model), **more))[headers.DESTINATION]

    assert {await picked("ns/one") for _ in range(8)} == {second.endpoint}
    assert {await picked("ns/all") for _ in range(16)} == {first.endpoint, second.endpoint}
    assert await picked("ns/one", subset=[first.endpoint, second.endpoint]) == second.endpoint
    for pool, model, hint, expected in (
        ("ns/vllm", "tiny", None, 404),  # another pool's name
        ("ns/one", "other", None, 404),
        ("ns/one", "tiny", [first.endpoint], 503),  # a hint that leaves nobody
        ("ns/one", "tiny", [stranger.endpoint], 503),
    ):
        assert pools.error(await at(pools, pool).ask(pools.completion(model=model), subset=hint))[0] == expected

    # The pool's only replica goes: nobody else of its model may stand in.
    await serve(pools, msgspec.structs.replace(fleet, replicas=[first, changed(second, ready=False), stranger]))
    assert pools.error(await at(pools, "ns/one").ask(pools.completion()))[0] == 503
    assert await picked("ns/all") == first.endpoint

    # A pool that goes takes its port with it.
    port = pools.gateway._pool_ports.ports["ns/one"]
    gone = msgspec.structs.replace(fleet, inference_pools=[it for it in fleet.inference_pools if it.id != "ns/one"])
    await serve(pools, gone)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    with pytest.raises(grpc.aio.AioRpcError):
        await HealthStub(channel).Check(HealthCheckRequest(service=""), timeout=5)
    await channel.close()


async def test_a_pool_port_tells_its_health(pools: Any) -> None:
    await serve(pools, open_fleet(await foreign(pools, ["base"])))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{pools.gateway._pool_ports.ports['ns/vllm']}")
    answer = await HealthStub(channel).Check(HealthCheckRequest(service="inference-extension"), timeout=5)
    assert answer.status == 1
    await channel.close()


@pytest.mark.parametrize("ending", ["end of stream", "close"])
async def test_where_bodies_are_sent_the_end_of_the_stream_ends_the_booking(pools: Any, ending: str) -> None:
    replica = await foreign(pools, ["base"])
    await serve(pools, open_fleet(replica))
    stream = at(pools, "ns/vllm")
    assert sets_of(await stream.ask(pools.completion(model="base")))[headers.DESTINATION] == replica.endpoint
    await stream.respond(**{"content-type": "text/event-stream"})
    await stream.call.write(ProcessingRequest(response_body=HttpBody(body=b"data: 1\n\n")))
    assert (await stream.call.read()).WhichOneof("response") == "response_body"
    released = pools.state.bookings.released
    assert released["stream"] == 0
    if ending == "close":  # the client has gone
        stream.call.cancel()
    else:
        await stream.call.write(ProcessingRequest(response_body=HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)))
        await stream.call.read()
        await stream.end()
    await pools.until(lambda: released["stream"] == 1)


async def test_everything_about_names_is_shown(pools: Any) -> None:
    replica = await foreign(pools, ["base"])
    await serve(pools, open_fleet(replica))
    shown = await pools.get("/debug/models")
    (pool,) = shown["inference_pools"]
    assert pool["port"] == pools.gateway._pool_ports.ports["ns/vllm"] and pool["pool"]["members"] == [replica.id]
    assert (shown["names"], shown["conflicts"], shown["unserved_adapters"], shown["canaries"]) == ({}, [], [], [])
