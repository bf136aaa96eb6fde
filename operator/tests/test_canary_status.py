"""What a model's status says of a canary that is judged."""

from typing import Any

import pytest
from operator_world import World

from penstock.api.fleet import ModelOutcomes, PoolsView
from penstock.operator.store import Key


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


async def test_the_status_says_where_a_canary_stands(world: World, make: Any) -> None:
    canary = {"of": "main", "weight": 50, "judge": {"window": "60s", "minRequests": 20, "steps": [5, 25]}}
    resource = make.resource(canary=canary)
    await world.apply(resource)
    key = Key("InferenceModel", "default", "tiny")
    await world.settle(key)
    status = world.live("InferenceModel")["status"]
    assert (status["canary"]["weight"], status["canary"]["verdict"]) == (5, "Judging")
    assert world.condition("CanaryPassed")[:2] == ("Unknown", "Judging")
    for requests in (0, 30):
        world.now += 5
        models = [
            ModelOutcomes(model="default/tiny", canary_of="default/main", requests=1 + requests, failures=requests),
            ModelOutcomes(model="default/main", requests=1 + requests, failures=0),
        ]
        world.judges.told([PoolsView(gateway="g", version=1, pools=[], epoch="e", models=models)], 1)
    assert key in world.queued
    await world.settle(key)
    status = world.live("InferenceModel")["status"]
    assert (status["canary"]["weight"], status["canary"]["verdict"]) == (0, "Failed")
    state, reason, message = world.condition("CanaryPassed")
    assert (state, reason) == ("False", "CanaryFailed") and "100.0% of its 30 requests failed" in message
    assert [it["type"] for it in world.api.posted if it["reason"] == "CanaryFailed"] == ["Warning"]
    # Another number of replicas is no other canary; another weight is.
    await world.apply(make.resource(canary=canary, replicas=2))
    await world.settle(key)
    assert world.live("InferenceModel")["status"]["canary"]["verdict"] == "Failed"
    await world.apply(make.resource(canary={**canary, "weight": 40}))
    await world.settle(key)
    assert world.live("InferenceModel")["status"]["canary"]["verdict"] == "Judging"
    await world.apply(make.resource())
    await world.settle(key)
    assert "canary" not in world.live("InferenceModel")["status"]
