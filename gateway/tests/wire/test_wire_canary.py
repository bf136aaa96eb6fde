"""Canaries judged over real traffic: real Envoy and gateway, the operator's judges, and engines that do well or fail."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from test_wire_gateway import Stack, wait_until_it_answers
from wire_waiting import eventually

from penstock.api import headers
from penstock.api.fleet import Canary, Fleet, Model, Pool, PoolsView
from penstock.api.resources import Canary as CanarySpec
from penstock.api.resources import Judge
from penstock.operator.canary.course import Standing, course_of
from penstock.operator.canary.judges import Judges

PATH = "/v1/chat/completions"
MAIN = Model(id="default/tiny", served_names=["tiny"], hold_timeout_s=1.0)
CANARY = "default/next"
POOLS = [Pool(id="default/tiny/main", model=MAIN.id), Pool(id="default/next/main", model=CANARY)]
SPEC = CanarySpec(of="tiny", weight=60, judge=Judge(window="5s", min_requests=8, max_ttft_percent=10_000, steps=[30]))


class Trial:
    """A stack with a canary, judged as an operator would by a clock that the test moves."""

    def __init__(self, stack: Stack, client: aiohttp.ClientSession, replicas: list[Any]) -> None:
        self._stack, self._client, self._replicas = stack, client, replicas
        self._now, self._numbers = 0.0, itertools.count()
        self._judges = Judges(lambda _: None, lambda: self._now)
        self.statuses: list[tuple[str, int]] = []

    @property
    def standing(self) -> Standing:
        standing = self._judges.follow(CANARY, course_of(SPEC, "1"), None)
        assert standing is not None
        return standing

    async def look(self) -> tuple[int, str]:
        """More than a window passes; the operator looks, and its verdict reaches the gateway."""
        self._now += 6.0
        self._judges.told([await self._view()], 1)
        canary = Model(id=CANARY, served_names=["next"], canary=Canary(of="tiny", weight=self.standing.weight))
        await self._stack.serve(Fleet(models=[MAIN, canary], pools=POOLS, replicas=self._replicas))
        return self.standing.weight, self.standing.verdict

    async def _view(self) -> PoolsView:
        async with self._client.get(f"http://127.0.0.1:{self._stack.http_port}/pools") as response:
            return msgspec.json.decode(await response.read(), type=PoolsView)

    async def _counted(self) -> bool:
        """Whether the gateway has seen all answers: it is shown them while they pass, and nobody waits for it."""
        return sum(it.requests for it in (await self._view()).models) == len(self.statuses)

    async def ask(self, count: int) -> dict[str, int]:
        """So many conversations; how many each of the two answered."""
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "model": "tiny"}
        got = {"tiny": 0, "next": 0}

        async def one(number: int) -> None:
            asked = body | {"prompt_cache_key": f"conversation {number}"}
            async with self._client.post(self._stack.url + PATH, json=asked) as response:
                await response.read()
                got[response.headers[headers.MODEL]] += 1
                self.statuses.append((response.headers[headers.MODEL], response.status))

        await asyncio.gather(*(one(next(self._numbers)) for _ in range(count)))
        await eventually(self._counted)
        return got


@pytest.fixture
def stack(tmp_path: Path, processes: Any, ports: Any) -> Stack:
    made = Stack(tmp_path, processes, ports)
    wait_until_it_answers(made)
    return made


async def test_a_good_canary_climbs_and_one_that_fails_loses_its_traffic(
    stack: Stack, engine: Any, client: aiohttp.ClientSession
) -> None:
    main, canary = await engine("main"), await engine("canary")
    trial = Trial(stack, client, [main.replica(pool=POOLS[0].id), canary.replica(pool=POOLS[1].id)])
    assert await trial.look() == (30, "Judging")
    first = await trial.ask(80)
    assert 8 <= first["next"] < first["tiny"]
    assert await trial.look() == (60, "Judging")
    second = await trial.ask(80)
    assert second["next"] > first["next"]
    assert await trial.look() == (60, "Passed")
    assert {status for _, status in trial.statuses} == {200}

    canary.fail = 500
    await trial.ask(60)
    assert {(model, status) for model, status in trial.statuses if status != 200} == {("next", 500)}
    assert await trial.look() == (0, "Failed")
    assert "100.0% of its" in trial.standing.reason and "0.0% of" in trial.standing.reason
    assert (await trial.ask(40))["next"] == 0
