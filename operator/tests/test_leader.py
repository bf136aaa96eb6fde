"""Who of several operators acts."""

import asyncio
from typing import Any

import aiohttp
import pytest
from kubernetes.aio.client import ApiException

from penstock.operator import leader
from penstock.operator.leader import LeadershipLost, Lease, lead


class Clock:
    """A clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_one_holds_and_another_waits_until_it_runs_out_or_is_given_back(api: Any) -> None:
    clock = Clock()
    first, second = Lease(api, "sys", "a", clock), Lease(api, "sys", "b", clock)
    assert await first.hold()
    assert not await second.hold()
    clock.now = 14
    assert await first.hold(), "renewing works"
    assert not await second.hold()
    clock.now = 30
    assert await second.hold(), "15 s without a change: it has run out"
    assert not await first.hold()
    await second.release()
    assert await first.hold(), "given back: no waiting"
    spec = api.objects["Lease", "sys", "penstock-operator"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 2)


async def test_the_lease_goes_with_its_owner_whoever_made_it(api: Any) -> None:
    owner = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "penstock-operator", "uid": "1"}

    async def account() -> Any:
        return owner

    old = Lease(api, "sys", "old")
    assert await old.hold()
    assert "ownerReferences" not in api.objects["Lease", "sys", "penstock-operator"]["metadata"]
    await old.release()
    for _ in ("an old one", "one of its own"):
        assert await Lease(api, "sys", "a", owner=account).hold()
        assert api.objects.pop(("Lease", "sys", "penstock-operator"))["metadata"]["ownerReferences"] == [owner]


@pytest.mark.parametrize("error", [aiohttp.ClientConnectionError("gone"), ApiException(status=500, reason="x")])
async def test_trouble_is_a_failed_try(api: Any, error: Exception) -> None:
    async def fail(*_: Any) -> None:
        raise error

    api.get = fail
    assert not await Lease(api, "sys", "a").hold()


async def test_the_leader_acts_until_told_to_stop_and_gives_the_lease_back(api: Any) -> None:
    stop = asyncio.Event()
    acted: list[str] = []

    async def act() -> None:
        acted.append("yes")
        await stop.wait()

    task = asyncio.create_task(lead(Lease(api, "sys", "a"), act, stop, retry_s=0.01))
    async with asyncio.timeout(60):
        while not acted:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert acted == ["yes"]
    stop.set()
    await task
    assert api.objects["Lease", "sys", "penstock-operator"]["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_leader_that_cannot_renew_stops_acting(api: Any, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    monkeypatch.setattr(leader, "RENEW_DEADLINE_S", 0.05)
    monkeypatch.setattr(leader, "GIVE_BACK_S", 0.05)
    cancelled: list[bool] = []
    began = asyncio.Event()

    async def act() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    lease = Lease(api, "sys", "a")
    task = asyncio.create_task(lead(lease, act, asyncio.Event(), retry_s=0.01))
    await asyncio.wait_for(began.wait(), 60)

    async def fail(*_: Any) -> None:
        if hangs:
            await asyncio.sleep(5)
        raise aiohttp.ClientConnectionError("gone")

    api.get = fail  # nor can it be given back
    async with asyncio.timeout(60):
        with pytest.raises(LeadershipLost):
            await task
    assert cancelled == [True]


async def test_what_ends_the_acting_ends_the_leading(api: Any) -> None:
    async def act() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await lead(Lease(api, "sys", "a"), act, asyncio.Event(), retry_s=0.01)
