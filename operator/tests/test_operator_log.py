"""The operator's log says of each thing that it does what, to which object, why, and of which revision."""

import logging
import re
from collections import Counter
from typing import Any

import pytest
from operator_world import World

from penstock.operator.store import Key


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


async def test_every_change_of_a_child_has_its_line(world: World, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pools = [{"name": "main"}, {"name": "extra", "scaling": {"min": 2, "max": 4}}]
    await world.apply(world.make.resource(pools=pools))
    await world.settle(key)
    await world.apply(world.make.resource(engine={"extraArgs": ["--seed=7"]}))  # another revision, and a pool less
    await world.settle(key)
    service = world.live("Service")
    world.api.put({**service, "spec": {**service["spec"], "clusterIP": "10.0.0.1"}})  # somebody else
    await world.settle(key)
    # The reference: what the API server was asked to change; it is not asked for `status` here.
    asked = Counter((verb, kind, name) for verb, kind, name in world.api.calls if verb in ("apply", "delete") and kind != "Lease")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("penstock.operator")]
    words = {"apply": r"(?:applying|setting the replicas of)", "delete": "deleting"}
    for (verb, kind, name), times in asked.items():
        told = [line for line in lines if re.match(rf"{words[verb]} {kind} default/{name}[ :]", line)]
        assert len(told) == times, (verb, kind, name, told)
    assert sum(asked.values()) == sum(bool(re.match("applying|setting|deleting", line)) for line in lines)
    revisions = {found[1] for line in lines if (found := re.search(r"Deployment default/tiny-main of revision (\S+):", line))}
    assert len(revisions) == 2
    assert "setting the replicas of Deployment default/tiny-extra to 2" in lines
    for why in ("there is none", "what is wanted has changed", "it is no longer wanted"):
        assert any(line.endswith(f": {why}") for line in lines), why
    assert "applying Service default/tiny-main: another client has changed it" in lines
