"""Adapters and canaries through our own Envoy, in front of engines that know one name each."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from test_wire_gateway import Stack, wait_until_it_answers
from wire_waiting import eventually

from penstock.api import headers
from penstock.api.fleet import Adapter, Canary, Fleet, Model, Pool

MAIN = Model(id="default/tiny", served_names=["tiny", "alias"], hold_timeout_s=1.0)
NEXT = Model(id="default/next", served_names=["tiny-next"], canary=Canary(of="tiny", weight=40), hold_timeout_s=1.0)
POOLS = [Pool(id="default/tiny/main", model=MAIN.id), Pool(id="default/next/main", model=NEXT.id)]
SQL = Adapter(id="default/sql", model=MAIN.id, served_names=["sql", "text-to-sql"])
PATH = "/v1/chat/completions"


@pytest.fixture
def stack(tmp_path: Path, processes: Any, ports: Any) -> Stack:
    made = Stack(tmp_path, processes, ports)
    wait_until_it_answers(made)
    return made


def asked(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.req("LO-23", "LO-24")
async def test_names_reach_engines_as_they_know_them(stack: Stack, engine: Any, client: aiohttp.ClientSession) -> None:
    main, canary = await engine("main"), await engine("canary")
    replicas = [main.replica(pool=POOLS[0].id), canary.replica(pool=POOLS[1].id)]
    fleet = Fleet(models=[MAIN, NEXT], pools=POOLS, replicas=replicas, adapters=[SQL])
    await stack.serve(fleet)

    async def ask(model: str, **fields: Any) -> str:
        async with client.post(stack.url + PATH, json=asked(model, **fields)) as response:
            assert response.status == 200, await response.text()
            return response.headers[headers.MODEL]

    # A large body is streamed to the picker in chunks and goes on in chunks, whichever of the two it is.
    for padding in (0, 300_000):
        assert await ask("text-to-sql", user="x" * padding) == "sql"
        assert json.loads(main.requests[-1][1]) == asked("sql", user="x" * padding)
    assert await ask("alias", prompt_cache_key="stays") in ("tiny", "tiny-next")
    assert await ask("tiny-next") == "tiny-next"
    main.requests.clear()
    canary.requests.clear()
    sides = [{await ask("tiny", prompt_cache_key=f"conversation {n}") for _ in range(2)} for n in range(25)]
    assert all(len(side) == 1 for side in sides)
    assert {json.loads(body)["model"] for _, body in main.requests} == {"tiny"}
    assert {json.loads(body)["model"] for _, body in canary.requests} == {"tiny-next"}
    assert len(canary.requests) == 2 * sides.count({"tiny-next"})
    assert 3 <= sides.count({"tiny-next"}) <= 17  # 40 % of 25, within three standard deviations

    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as api:
        listed = {it.id: it.to_dict() async for it in api.models.list()}
        assert set(listed) == {"tiny", "alias", "tiny-next", "sql", "text-to-sql"}
        assert (listed["sql"]["parent"], listed["alias"]["root"]) == ("tiny", "tiny")
        assert (await api.models.retrieve("text-to-sql")).id == "text-to-sql"
        with pytest.raises(openai.NotFoundError, match="'text-to-sq' does not exist; there are: text-to-sql, "):
            await api.chat.completions.create(**asked("text-to-sq"))

        # The adapter and the canary go; the model stays.
        await stack.serve(Fleet(models=[MAIN], pools=POOLS[:1], replicas=replicas[:1]))
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(**asked("sql"))
    assert {await ask("tiny", prompt_cache_key=f"conversation {n}") for n in range(10)} == {"tiny"}


@pytest.mark.req("LO-23")
async def test_requests_for_an_adapter_wait_for_a_replica_that_has_it(
    stack: Stack, engine: Any, client: aiohttp.ClientSession
) -> None:
    """Replicas get their adapters once they are ready: until then they answer 404, which no client may see."""
    first, second = await engine("first"), await engine("second")
    first.adapters, second.adapters = ("sql",), ()

    async def serve(hold_timeout_s: float) -> None:
        model = msgspec.structs.replace(MAIN, hold_timeout_s=hold_timeout_s)
        replicas = [its.replica(pool=POOLS[0].id) for its in (first, second)]
        await stack.serve(Fleet(models=[model], pools=POOLS[:1], replicas=replicas, adapters=[SQL]))

    async def pool() -> dict[str, Any]:
        async with client.get(f"http://127.0.0.1:{stack.http_port}/pools") as response:
            return next(it for it in (await response.json())["pools"] if it["id"] == POOLS[0].id)

    async def nobody_has_it() -> bool:
        return all(replica["report"] and replica["report"]["adapters"] == [] for replica in (await pool())["replicas"])

    async def ask(name: str) -> tuple[int, Any, dict[str, Any]]:
        async with client.post(stack.url + PATH, json=asked(name)) as response:
            return response.status, response.headers, await response.json()

    await serve(hold_timeout_s=600.0)
    answers = await asyncio.gather(*(ask(name) for name in ("sql", "text-to-sql") * 10))
    assert [status for status, *_ in answers] == [200] * 20
    assert len(first.requests) == 20 and not second.requests

    first.adapters = ()
    await eventually(nobody_has_it)
    waiting = asyncio.create_task(ask("sql"))
    await eventually(lambda: _held(pool))
    assert (await ask("tiny"))[0] == 200, "whoever asks for the model itself waits for nobody"
    assert not waiting.done()
    second.adapters = ("sql",)
    status, said, _ = await waiting
    assert (status, said[headers.REPLICA]) == (200, "uid-second")

    second.adapters = ()
    await eventually(nobody_has_it)
    await serve(hold_timeout_s=0.1)
    status, said, body = await ask("sql")
    assert (status, said[headers.REASON]) == (503, "adapter_not_loaded") and int(said["retry-after"]) >= 1
    assert body["error"]["message"].startswith("no ready replica of model 'tiny' has adapter 'sql' yet")


async def _held(pool: Any) -> bool:
    return (await pool())["held"] == 1
