"""Names through the whole gateway process: adapters, canaries, listings, and the ports of InferencePools' restriction."""

from typing import Any

import msgspec
import orjson
import pytest

from penstock.api import headers, metrics
from penstock.api.events import BlockStored
from penstock.api.fleet import Adapter, Canary, Fleet, Model, Pool
from penstock.gateway.picker.candidates import key_of
from penstock.prompt.hashing import BlockHasher, ExtraKeys

MAIN = Model(id="ns/tiny", served_names=["tiny", "alias"], created=7.0)
POOL = Pool(id="ns/tiny/p", model="ns/tiny")
SQL = Adapter(id="ns/sql", model="ns/tiny", served_names=["sql", "text-to-sql"], created=8.0)


async def serve(world: Any, fleet: Fleet) -> None:
    world.discovery.queue.put_nowait(fleet)
    await world.until(
        lambda: world.state.directory.fleet.models == fleet.models and world.state.directory.fleet.adapters == fleet.adapters
    )
    await world.until(lambda: all(replica.ready for replica in world.state.directory.replicas.values()))
    await world.until(lambda: len(world.gateway._prompts._digests) == len(fleet.replicas))


async def ask(world: Any, **fields: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Who was picked for a completion, the body that goes on, and what is added to the response."""
    stream = world.stream()
    body = world.completion(**fields)
    answer = await stream.ask(body)
    destination = {o.header.key: o.header.raw_value.decode() for o in answer.request_headers.response.header_mutation.set_headers}
    message = await stream.call.read()
    sent = orjson.loads(message.request_body.response.body_mutation.streamed_response.body)
    added = await stream.headers()
    await stream.end()
    return destination[headers.DESTINATION].split(",")[0], sent, added


@pytest.mark.req("LO-24", "RT-39")
async def test_an_adapter_is_a_model_with_a_prefix_cache_of_its_own(world: Any) -> None:
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    hasher = BlockHasher(16, "penstock")
    plain, adapted = (hasher.hash(world.prompt_tokens, ExtraKeys(lora=name)) for name in (None, "sql"))
    first, second = world.replicas
    world.state.event(key_of(first), BlockStored(plain), 0.0)
    world.state.event(key_of(second), BlockStored(adapted), 0.0)
    for _ in range(3):
        assert (await ask(world))[0] == first.endpoint
        picked, sent, added = await ask(world, model="sql")
        assert picked == second.endpoint
        assert (sent["model"], added[headers.MODEL], added[headers.REPLICA]) == ("sql", "sql", "u1")
    newest = (await world.get("/debug/decisions?n=1"))[0]
    assert [(it["name"], it["resident_tokens"]) for it in newest["candidates"]] == [("r1", 48), ("r0", 0)]


async def test_a_body_too_deep_to_be_written_again_is_the_clients_fault_and_books_nothing(world: Any) -> None:
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    deep = b'{"model":"text-to-sql","prompt":"w1","metadata":' + b"[" * 500 + b"]" * 500 + b"}"
    status, reason, *_ = world.error(await world.stream().ask(deep))
    assert (status, reason) == (400, "invalid_body")
    assert all(world.state.bookings.count(key_of(replica)) == 0 for replica in world.replicas)
    assert world.destinations(await world.stream().ask(deep.replace(b"text-to-sql", b"sql")))  # nothing to be written


async def test_a_name_means_at_once_what_the_fleet_says_now(world: Any) -> None:
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    for _ in range(2):
        assert (await ask(world, model="text-to-sql"))[1]["model"] == "sql"
    other = msgspec.structs.replace(SQL, served_names=["other", "text-to-sql"])
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[other], replicas=world.replicas))
    for _ in range(2):
        assert (await ask(world, model="text-to-sql"))[1]["model"] == "other"
    status, reason, *_ = world.error(await world.stream().ask(world.completion(model="sql")))
    assert (status, reason) == (404, "model_not_found")


async def test_engines_get_an_adapter_by_its_first_name_and_a_model_by_any(world: Any) -> None:
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    _, sent, added = await ask(world, model="text-to-sql", temperature=0.25)
    assert sent == {**world.completion(), "model": "sql", "temperature": 0.25}
    assert added[headers.MODEL] == "sql"
    _, sent, added = await ask(world, model="alias")
    assert (sent["model"], added[headers.MODEL]) == ("alias", "tiny")


@pytest.mark.req("LO-23")
async def test_an_adapter_comes_and_goes_while_the_gateway_runs(world: Any) -> None:
    await world.ready()
    status, reason, error, _ = world.error(await world.stream().ask(world.completion(model="sql")))
    assert (status, reason, error["param"]) == (404, "model_not_found", "model")
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    assert (await ask(world, model="sql"))[1]["model"] == "sql"
    await serve(world, Fleet(models=[MAIN], pools=[POOL], replicas=world.replicas))
    assert world.error(await world.stream().ask(world.completion(model="sql")))[0] == 404


def canary_fleet(world: Any, weight: float, *, ready: bool = True) -> Fleet:
    """One replica of the model and one of its canary."""
    new = Model(id="ns/new", served_names=["tiny-new"], created=9.0, canary=Canary(of="tiny", weight=weight))
    main, other = world.replicas
    other = type(other)(**{f: getattr(other, f) for f in other.__struct_fields__} | {"pool": "ns/new/p", "ready": ready})
    return Fleet(models=[MAIN, new], pools=[POOL, Pool(id="ns/new/p", model="ns/new")], replicas=[main, other])


async def test_a_canary_takes_its_share_of_conversations_under_its_own_name(world: Any) -> None:
    await serve(world, canary_fleet(world, 30))
    served: dict[str, set[str]] = {}
    for turn in range(2):
        for n in range(40):
            _, sent, added = await ask(world, prompt_cache_key=f"conversation {n}", user=f"turn {turn}")
            assert sent["model"] == ("tiny-new" if added[headers.MODEL] == "tiny-new" else "tiny")
            assert added[headers.REPLICA] == ("u1" if added[headers.MODEL] == "tiny-new" else "u0")
            served.setdefault(f"conversation {n}", set()).add(added[headers.MODEL])
    assert all(len(sides) == 1 for sides in served.values())
    taken = sum(sides == {"tiny-new"} for sides in served.values())
    assert 4 <= taken <= 20  # 30 % of 40, within three standard deviations
    assert (await ask(world, model="tiny-new"))[2][headers.MODEL] == "tiny-new"
    scraped = await scrape(world)
    new, main = (scraped[f'{metrics.MODEL_REQUESTS}_total{{code="200",model="ns/{name}"}}'] for name in ("new", "tiny"))
    assert (new, main) == (2 * taken + 1, 80 - 2 * taken)
    assert scraped[f'{metrics.RESPONSE_SECONDS}_count{{model="ns/new"}}'] == new


async def test_a_canary_that_is_not_ready_leaves_all_to_the_model(world: Any) -> None:
    world.discovery.queue.put_nowait(canary_fleet(world, 100, ready=False))
    await world.until(lambda: any(it.ready for it in world.state.directory.replicas.values()))
    for n in range(5):
        assert (await ask(world, prompt_cache_key=str(n)))[2][headers.MODEL] == "tiny"


async def scrape(world: Any) -> dict[str, float]:
    async with world.http.get("/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_refusals_count_against_the_model(world: Any) -> None:
    world.fleet(hold_timeout_s=0.0)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    assert world.error(await world.stream().ask(world.completion()))[0] == 503
    assert (await scrape(world))[f'{metrics.MODEL_REQUESTS}_total{{code="503",model="ns/tiny"}}'] == 1


async def test_models_are_listed_with_what_they_are(world: Any) -> None:
    orphan = Adapter(id="ns/orphan", model="ns/gone", served_names=["orphan"])
    await serve(world, Fleet(models=[MAIN], pools=[POOL], adapters=[SQL, orphan], replicas=world.replicas))
    answer = await world.stream().ask(path="/v1/models")
    listed = {it["id"]: it for it in orjson.loads(answer.immediate_response.body)["data"]}
    about = {"object": "model", "owned_by": "penstock", "max_model_len": 512}
    assert listed == {
        "tiny": {"id": "tiny", "created": 7, "root": "tiny", "parent": None, **about},
        "alias": {"id": "alias", "created": 7, "root": "tiny", "parent": None, **about},
        "sql": {"id": "sql", "created": 8, "root": "sql", "parent": "tiny", **about},
        "text-to-sql": {"id": "text-to-sql", "created": 8, "root": "sql", "parent": "tiny", **about},
    }
    one = await world.stream().ask(path="/v1/models/text-to-sql")
    assert orjson.loads(one.immediate_response.body) == listed["text-to-sql"]
    status, _, error, _ = world.error(await world.stream().ask(path="/v1/models/orphan"))
    assert (status, error["message"]) == (404, "model 'orphan' does not exist; there are: alias, sql, text-to-sql, tiny")


async def test_lost_claims_are_shown_to_the_operator(world: Any) -> None:
    late = Model(id="ns/late", served_names=["alias"], created=20.0)
    await serve(world, Fleet(models=[MAIN, late], pools=[POOL], adapters=[SQL], replicas=world.replicas))
    lost = {"name": "alias", "claimant": "InferenceModel ns/late", "holder": "InferenceModel ns/tiny"}
    assert (await world.get("/pools"))["conflicts"] == [lost]
