"""What an older operator has made goes on as it was; an older engine without a newer flag is told from a broken one."""

import argparse
import copy
import json
from typing import Any

import pytest
from operator_world import World

from penstock.operator.desired.arguments import engine_args
from penstock.operator.store import Key

Object = dict[str, Any]
NEWER = "--admin-port"
"""A flag that templates of version 2 did not have."""


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


def as_before(template: Object) -> Object:
    """A pod template as version 2 made it."""
    old = copy.deepcopy(template)
    (engine,) = old["spec"]["containers"]
    engine["args"] = [it for it in engine["args"] if not it.startswith(f"{NEWER}=")]
    engine["ports"] = [it for it in engine["ports"] if it["name"] != "admin"]
    old["metadata"]["labels"]["penstock.dev/revision"] = "0123456789"
    return old


def made_by_an_older_one(world: World) -> None:
    """The model's revision and Deployment, as an operator with templates of version 2 left them."""
    (revision,) = (it for it in world.api.objects.values() if it["kind"] == "ControllerRevision")
    (pool,) = revision["data"]["pools"].values()
    template = as_before(pool["template"])
    del world.api.objects["ControllerRevision", "default", revision["metadata"]["name"]]
    deployment = world.live("Deployment")
    world.children.observe("ControllerRevision", change(revision, None))
    data = {**revision["data"], "pools": {"main": {**pool, "templateVersion": 2, "template": template}}}
    meta = {**revision["metadata"], "name": "tiny-older", "uid": ""}
    world.api.put({**revision, "metadata": meta, "data": data})
    world.api.put({**deployment, "spec": {**deployment["spec"], "template": template}})
    world.api.put(world.make.ready_pod("tiny-main-0", revision="0123456789"))


def change(old: Object | None, new: Object | None) -> Any:
    from penstock.kube.cache import Change

    meta = (old or new or {})["metadata"]
    return Change((meta["namespace"], meta["name"]), old, new)


@pytest.mark.req("XC-04")
async def test_replicas_of_an_older_operator_keep_their_arguments_to_the_byte(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=1))
    await world.settle(key)
    assert any(it.startswith(NEWER) for it in args(world)), "what this test is about"
    made_by_an_older_one(world)
    before = json.dumps(world.live("Deployment")["spec"]["template"])
    await world.settle(key)
    assert json.dumps(world.live("Deployment")["spec"]["template"]) == before
    assert (world.live("InferenceModel")["status"]["templateVersion"], world.condition("Ready")[0]) == (2, "True")
    # Whatever does not concern what a replica runs leaves them alone as well.
    await world.apply(world.make.resource(replicas=2, routing={"policy": "RoundRobin"}, generation=2))
    await world.settle(key)
    assert json.dumps(world.live("Deployment")["spec"]["template"]) == before
    # The next change of what they run brings what a newer operator knows.
    await world.apply(world.make.resource(replicas=2, engine={"dtype": "float32"}, generation=3))
    await world.settle(key)
    assert any(it.startswith(NEWER) for it in args(world))


def args(world: World) -> list[str]:
    return world.live("Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]


async def test_an_older_image_that_does_not_know_a_flag_says_so_in_the_conditions(
    world: World, key: Key, capsys: pytest.CaptureFixture[str]
) -> None:
    resource = world.make.resource(replicas=1, engine={"image": "penstock/engine:0.0.1"})
    await world.apply(resource)
    await world.settle(key)
    older = argparse.ArgumentParser(prog="penstock serve")
    older.add_argument("model")
    given = engine_args(world.make.model(engine={"image": "penstock/engine:0.0.1"}))
    for flag in {it.partition("=")[0] for it in given if it.startswith("--")} - {NEWER}:
        older.add_argument(flag, nargs="+")
    with pytest.raises(SystemExit) as ended:
        older.parse_args([*given[1:], given[0]] if given[0].startswith("--") else given)
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    said = capsys.readouterr().err
    world.api.put(world.make.crashed_pod("tiny-main-0", message=said, exit_code=ended.value.code, revision=revision))
    await world.settle(key)
    for kind in ("Ready", "ModelAvailable", "PodsReady", "Degraded"):
        status, reason, message = world.condition(kind)
        assert (status, reason) == ("True" if kind == "Degraded" else "False", "EngineExited")
        assert "penstock serve: error: unrecognized arguments: --admin-port=8003" in message
        assert "image is older" in message
