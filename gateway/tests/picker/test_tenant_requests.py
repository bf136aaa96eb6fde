"""Tenants in the whole gateway: keys, what they allow, what they cost, and what replicas get to know of them."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.api import headers
from penstock.api.events import BlockStored, RequestFinished
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.prompt.hashing import BlockHasher, ExtraKeys

TENANTS = """
tenants:
  - name: search
    keys: [sk-search-1]
    weight: 3
    priority: 5
  - name: batch
    keys: [sk-batch-001]
    priority: 5
  - name: narrow
    keys: [sk-narrow-01]
    models: [alias]
    maxConcurrent: 1
  - name: poor
    keys: [sk-poor-0001]
    requestsPerMinute: 2
    tokensPerMinute: 1000
"""


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def mutation(answer: Any) -> tuple[dict[str, str], set[str]]:
    """Headers that are set, and those that are removed."""
    common = answer.request_headers.response.header_mutation
    return {o.header.key: o.header.raw_value.decode() for o in common.set_headers}, set(common.remove_headers)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "missing_api_key"),
        (bearer(""), "missing_api_key"),
        (bearer("sk-search-2"), "invalid_api_key"),
        ({"x-api-key": "nobody's"}, "invalid_api_key"),
        ({"authorization": "Basic c2stc2VhcmNoLTE="}, "missing_api_key"),
        ({"authorization": "Basic sk-search-1"}, "missing_api_key"),
        ({"authorization": "sk-search-1"}, "missing_api_key"),
        ({headers.TENANT: "search"}, "missing_api_key"),
    ],
)
async def test_without_a_known_key_the_answer_is_401_before_the_body_is_read(
    world: Any, given: dict[str, str], reason: str
) -> None:
    await world.ready()
    status, got, content, _ = world.error(await world.stream().ask(world.completion(), **given))
    assert (status, got, content["type"], content["code"]) == (401, reason, "authentication_error", "invalid_api_key")
    status, got, *_ = world.error(await world.stream().ask(path="/v1/models", **given))
    assert (status, got) == (401, reason)


@pytest.mark.parametrize("given", [bearer("sk-search-1"), {"x-api-key": "sk-search-1"}, {"api-key": "sk-search-1"}])
async def test_replicas_know_the_tenant_and_never_the_key(world: Any, given: dict[str, str]) -> None:
    await world.ready()
    stream = world.stream()
    answer = await stream.ask(world.completion(), **given, **{headers.TENANT: "forged", headers.PRIORITY: "-9"})
    sets, removed = mutation(answer)
    assert (sets[headers.TENANT], sets[headers.PRIORITY]) == ("search", "5")
    assert {"authorization", "x-api-key", "api-key", headers.SUBSET} <= removed
    assert not removed & sets.keys()
    stream.call.cancel()


async def test_the_body_may_ask_for_less_priority_and_not_for_more(world: Any) -> None:
    await world.ready()
    stream = world.stream()
    sets, _ = mutation(await stream.ask(world.completion(priority=8), **bearer("sk-search-1")))
    assert sets[headers.PRIORITY] == "8"
    stream.call.cancel()
    status, reason, content, _ = world.error(await world.stream().ask(world.completion(priority=4), **bearer("sk-search-1")))
    assert (status, reason, content["param"]) == (400, "priority_not_allowed", "priority")


async def test_other_models_do_not_exist_for_a_tenant(world: Any) -> None:
    await world.ready()
    listed = await world.stream().ask(path="/v1/models", **bearer("sk-narrow-01"))
    assert [entry["id"] for entry in orjson.loads(listed.immediate_response.body)["data"]] == ["alias"]
    for path, body in (("/v1/models/tiny", None), ("/v1/completions", world.completion())):
        status, reason, content, _ = world.error(await world.stream().ask(body, path=path, **bearer("sk-narrow-01")))
        assert (status, reason) == (404, "model_not_found")
        assert "alias" in content["message"]
    stream = world.stream()
    assert world.destinations(await stream.ask(world.completion(model="alias"), **bearer("sk-narrow-01")))
    stream.call.cancel()


async def test_requests_at_one_time_are_counted_until_they_end(world: Any) -> None:
    await world.ready()
    key, body = bearer("sk-narrow-01"), world.completion(model="alias", stream=True)
    stream = world.stream()
    picked = world.destinations(await stream.ask(body, **key, **{headers.REQUEST_ID: "first"}))[0]
    await stream.respond(**{"content-type": "text/event-stream"})
    await stream.end()
    status, reason, content, sets = world.error(await world.stream().ask(body, **key))
    assert (status, reason, content["code"], content["type"]) == (
        429, "max_concurrent", "rate_limit_exceeded", "rate_limit_error",
    )  # fmt: skip
    assert int(sets["retry-after"]) >= 1
    [replica] = [r for r in world.replicas if r.endpoint == picked]
    finished = RequestFinished("first", "stop", prompt_tokens=64, cached_tokens=0, output_tokens=5)
    world.gateway._follower.event(key_of(replica), finished)
    again = world.stream()
    assert world.destinations(await again.ask(body, **key))
    again.call.cancel()
    account = world.gateway._tenants.registry.account(world.gateway._tenants.registry.find("sk-narrow-01"))
    await world.until(lambda: account.running == 0)


async def test_budgets_are_charged_for_answers_too_and_refused_requests_cost_nothing(world: Any) -> None:
    await world.ready()
    key = bearer("sk-poor-0001")
    assert world.error(await world.stream().ask(world.completion(model="huge"), **key))[0] == 404
    stream = world.stream()
    picked = world.destinations(await stream.ask(world.completion(), **key, **{headers.REQUEST_ID: "one"}))[0]
    await stream.respond()
    await stream.end()
    [replica] = [r for r in world.replicas if r.endpoint == picked]
    finished = RequestFinished("one", "length", prompt_tokens=64, cached_tokens=48, output_tokens=1200)
    world.gateway._follower.event(key_of(replica), finished)
    status, reason, content, sets = world.error(await world.stream().ask(world.completion(), **key))
    assert (status, reason, content["code"]) == (429, "tokens_per_minute", "rate_limit_exceeded")
    assert int(sets["retry-after"]) == pytest.approx((64 + 1200 - 1000) * 60 / 1000, abs=2)
    async with world.http.get("/metrics") as response:
        text = await response.text()
    for line in (
        'penstock_tenant_tokens_total{kind="prompt",tenant="poor"} 64.0',
        'penstock_tenant_tokens_total{kind="output",tenant="poor"} 1200.0',
        'penstock_tenant_tokens_total{kind="cached",tenant="poor"} 48.0',
        'penstock_tenant_requests_total{outcome="routed",tenant="poor"} 1.0',
        'penstock_tenant_requests_total{outcome="over_budget",tenant="poor"} 1.0',
        'penstock_tenant_running_requests{tenant="poor"} 0.0',
    ):
        assert line in text


async def test_an_image_is_charged_as_the_tokens_that_it_is(world: Any) -> None:
    """Not as its file, for whose bytes ten times the budget would be gone until the prompt is read."""
    await world.ready()
    key, file = bearer("sk-poor-0001"), "data:image/png;base64," + "A" * 40_000
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": file}}]
    body = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]})
    stream = world.stream()
    answer = await stream.ask(body, path="/v1/chat/completions", **key, **{headers.REQUEST_ID: "seen"})
    picked = world.destinations(answer)[0]
    account = world.gateway._tenants.registry.account(world.gateway._tenants.registry.find("sk-poor-0001"))
    assert 900 < account._tokens._level < 1000
    await stream.respond()
    await stream.end()
    [replica] = [r for r in world.replicas if r.endpoint == picked]
    finished = RequestFinished("seen", "stop", prompt_tokens=700, cached_tokens=0, output_tokens=5)
    world.gateway._follower.event(key_of(replica), finished)
    assert 250 < account._tokens._level < 400, "what the engine says is what counts"


async def test_requests_under_one_id_are_all_paid_for(world: Any) -> None:
    """The id is the client's: to give one to several requests must not make their answers free."""
    await world.ready()
    key, body = bearer("sk-search-1"), world.completion(stream=True)
    streams = [world.stream() for _ in range(4)]
    for stream in streams:
        picked = world.destinations(await stream.ask(body, **key, **{headers.REQUEST_ID: "same"}))[0]
        [replica] = [r for r in world.replicas if r.endpoint == picked]
        stream.replica = key_of(replica)
        await stream.respond(**{"content-type": "text/event-stream"})
        await stream.end()
    for stream in streams:
        world.gateway._follower.event(stream.replica, RequestFinished("same", "stop", 64, 0, 100))
    async with world.http.get("/metrics") as response:
        assert 'penstock_tenant_tokens_total{kind="output",tenant="search"} 400.0' in await response.text()


async def test_what_an_engine_refuses_costs_no_tokens_whoever_is_next(world: Any) -> None:
    await world.ready()
    key = bearer("sk-poor-0001")
    stream = world.stream()
    assert world.destinations(await stream.ask(world.completion(prompt=[1] * 5000, max_tokens=9), **key))
    await stream.respond(400)
    account = world.gateway._tenants.registry.account(world.gateway._tenants.registry.find("sk-poor-0001"))
    assert account.running == 0
    again = world.stream()
    assert world.destinations(await again.ask(world.completion(), **key))
    again.call.cancel()


@pytest.mark.req("RT-22")
async def test_prefixes_are_those_of_the_tenant_alone(world: Any) -> None:
    await world.ready()
    hashes = BlockHasher(16, "penstock").hash(world.prompt_tokens, ExtraKeys(tenant="search"))
    world.state.event(key_of(world.replicas[1]), BlockStored(hashes), 0.0)
    for key, resident in (("sk-search-1", 48), ("sk-batch-001", 0)):
        stream = world.stream()
        await stream.ask(world.completion(), **bearer(key))
        stream.call.cancel()
        decision = (await world.get("/debug/decisions?n=1"))[0]
        held = {c["name"]: c["resident_tokens"] for c in decision["candidates"]}
        assert held["r1"] == resident


async def test_busy_replicas_are_shared_by_weight_whoever_asks_for_more(world: Any) -> None:
    """`batch` floods, `search` has three times its weight: of what goes on while both wait, it gets three quarters."""
    busy = LoadReport(epoch=1, seq=1, max_num_seqs=8, num_requests_running=8, num_requests_waiting={"capacity": 9})
    for engine in world.engines:
        engine.report = busy
    await world.ready()
    for replica in world.replicas:
        world.state.reported(key_of(replica), busy, asyncio.get_running_loop().time())
    order: list[str] = []
    streams: list[Any] = []

    async def ask(tenant: str, key: str) -> None:
        stream = world.stream()
        streams.append(stream)
        world.destinations(await stream.ask(world.completion(), **bearer(key)))
        order.append(tenant)
        await stream.respond()

    tasks = [asyncio.create_task(ask("batch", "sk-batch-001")) for _ in range(60)]
    await world.until(lambda: world.gateway._gate.control.requests == 60)
    tasks += [asyncio.create_task(ask("search", "sk-search-1")) for _ in range(30)]
    await world.until(lambda: world.gateway._gate.control.requests == 90)
    free = LoadReport(epoch=1, seq=2, max_num_seqs=8, num_requests_running=8)  # one may queue there
    for engine, replica in zip(world.engines, world.replicas, strict=True):
        engine.report = free
        world.gateway._follower.event(key_of(replica), free)
    await world.until(lambda: len(order) >= 40)
    shares = Counter(order[:40])
    assert shares["search"] == pytest.approx(30, abs=3)
    for stream in streams:
        stream.call.cancel()
    for task in tasks:
        task.cancel()
