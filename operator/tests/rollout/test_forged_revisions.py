"""ControllerRevisions that somebody else wrote."""

import copy
from typing import Any

import pytest
from operator_world import World

from penstock.operator.store import Key

Object = dict[str, Any]


def _host_network(revision: Object) -> None:
    revision["data"]["pools"]["main"]["template"]["spec"]["hostNetwork"] = True


def _no_pools(revision: Object) -> None:
    del revision["data"]["pools"]


def _no_data(revision: Object) -> None:
    revision["data"] = None


def _no_labels(revision: Object) -> None:
    del revision["data"]["pools"]["main"]["template"]["metadata"]


@pytest.mark.parametrize("forge", [_host_network, _no_pools, _no_data, _no_labels])
async def test_a_forged_revision_is_neither_run_nor_kept_nor_stumbled_over(api: Any, make: Any, key: Key, forge: Any) -> None:
    world = World(api, make)
    await world.apply(make.resource())
    await world.settle(key)
    template = world.live("Deployment")["spec"]["template"]
    (ours,) = [it for (kind, *_), it in api.objects.items() if kind == "ControllerRevision"]
    forged = copy.deepcopy({**ours, "revision": 99})
    forged["metadata"] = {**forged["metadata"], "name": "tiny-forged", "uid": "forged"}
    forge(forged)
    api.put(forged)
    await world.settle(key)
    assert world.live("Deployment")["spec"]["template"] == template
    assert ("ControllerRevision", "default", "tiny-forged") not in api.objects
    assert world.condition("Accepted")[0] == "True"
