"""Going back, and the words of `penstock rollout`."""

import argparse
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiException

from penstock.api.resources import InferenceModel
from penstock.operator.command_line import CommandFailed
from penstock.operator.desired import Rendering, pod_template
from penstock.operator.rollout import commands
from penstock.operator.rollout.commands import Model, with_restart
from penstock.operator.rollout.revisions import Resolution, resolve
from penstock.operator.rollout.undo import NoSuchRevision, chosen, restored

Object = dict[str, Any]
HEAD = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}}
PLACES = [{}, {"rollout": {"paused": True}}, {"rollout": {"progressDeadline": "5m"}}, {"routing": {"policy": "Random"}}]
SPECS = st.builds(
    lambda uri, engine, outside, pools: {"served": {"name": "m"}, "source": {"uri": uri}, **engine, **outside, "pools": pools},
    uri=st.sampled_from(["/a", "/b"]),
    engine=st.sampled_from([{}, {"engine": {"dtype": "float32"}}, {"engine": {"image": "i"}, "drainTimeout": "9s"}]),
    outside=st.sampled_from([*PLACES, {"rollout": {"restartedAt": "2026-01-31T12:00:00Z"}}]),
    pools=st.lists(
        st.builds(
            lambda name, scaling, template: {"name": name, **scaling, "template": {"metadata": {"annotations": template}}},
            name=st.sampled_from(["a", "b"]),
            scaling=st.sampled_from([{}, {"scaling": {"max": 3}}]),
            template=st.sampled_from([{}, {"x": "y"}]),
        ),
        min_size=1,
        max_size=2,
        unique_by=lambda pool: pool["name"],
    ),
)


def resolved(spec: Object, revisions: list[Object], image: str) -> Resolution:
    model = InferenceModel.parse({**HEAD, "spec": spec})
    rendering = Rendering(image=image)
    return resolve(model, revisions, frozenset(), lambda model, pool: pod_template(model, pool, rendering), version=1)


def test_a_restart_is_one_also_after_one_by_a_clock_that_was_ahead() -> None:
    spec = {"served": {"name": "m"}, "source": {"uri": "/a"}, "pools": [{"name": "a"}], "rollout": {"paused": True}}
    now, revisions, seen = "2026-01-31T12:00:00Z", list[Object](), set[str]()
    for last in (None, "2026-01-31T12:00:00Z", "2026-01-31T12:59:59Z"):
        asked = spec if last is None else {**spec, "rollout": {"paused": True, "restartedAt": last}}
        for one in (asked, with_restart(asked, now)):
            found = resolved(one, revisions, "i")
            revisions = [json.loads(json.dumps(found.current)), *revisions]
        assert with_restart(asked, now)["rollout"]["paused"]
        label = found.templates["a"]["metadata"]["labels"]["penstock.dev/revision"]
        assert label not in seen
        seen.add(label)
    with pytest.raises(CommandFailed, match="nothing is later"):
        with_restart({"rollout": {"restartedAt": "9999-99-99T00:00:00Z"}}, now)


def test_a_restart_after_an_undo_is_one_also_where_the_undone_one_was_by_a_clock_that_was_ahead() -> None:
    spec = {"served": {"name": "m"}, "source": {"uri": "/a"}, "pools": [{"name": "a"}]}
    revisions: list[Object] = []
    for one, image in ((spec, "first"), ({**spec, "rollout": {"restartedAt": "2030-01-31T12:00:00Z"}}, "undone")):
        revisions = [json.loads(json.dumps(resolved(one, revisions, image).current)), *revisions]
    undone = restored(spec, revisions[1], revisions)
    again = with_restart(undone, "2026-01-31T12:00:00Z", revisions)
    (container,) = resolved(again, revisions, "present").templates["a"]["spec"]["containers"]
    assert container["image"] == "present"


@given(SPECS, SPECS)
def test_undo_leads_to_the_very_templates_of_then(old: Object, new: Object) -> None:
    then = resolved({**old, "rollout": {**old.get("rollout", {}), "restartedAt": None}}, [], "old")
    first = json.loads(json.dumps(then.current))
    second = json.loads(json.dumps(resolved(new, [first], "new").current))
    spec = restored(new, first, [first, second])
    again = resolved(spec, [first, second], "newer")
    assert again.templates == then.templates
    scalings = {pool["name"]: pool.get("scaling") for pool in new["pools"]}
    assert all(pool.get("scaling") == scalings.get(pool["name"]) for pool in spec["pools"])
    assert spec.get("routing") == new.get("routing")
    assert spec["rollout"].get("paused") == new.get("rollout", {}).get("paused")


def test_the_revision_before_is_one_that_runs_something_else(make: Any) -> None:
    first = resolved({"served": {"name": "m"}, "source": {"uri": "/a"}, "pools": [{"name": "a"}]}, [], "x").current
    second = resolved({"served": {"name": "m"}, "source": {"uri": "/b"}, "pools": [{"name": "a"}]}, [first], "x").current
    third = {**second, "revision": 3}
    assert chosen([first, second, third], None) == first
    assert chosen([first, second], 2) == second
    with pytest.raises(NoSuchRevision, match="no revision 7"):
        chosen([first], 7)
    with pytest.raises(NoSuchRevision, match="no revision before"):
        chosen([third, second], None)


class Server:
    """An API server with one model, somebody else writing to it at times."""

    def __init__(self, resource: Object | None, conflicts: int = 0) -> None:
        self.resource = resource
        self.conflicts = conflicts

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.resource

    async def replace(self, body: Object) -> Object:
        if self.conflicts:
            self.conflicts -= 1
            raise ApiException(status=409, reason="Conflict")
        self.resource = body
        return body


def model_of(server: Server) -> Model:
    return Model(server, "default", "tiny")  # type: ignore[arg-type]


async def test_a_change_is_written_though_others_write_too(make: Any) -> None:
    server = Server(make.resource(rollout={"progressDeadline": "5m"}), conflicts=2)
    await model_of(server).change_rollout(paused=True)
    assert server.resource is not None
    assert server.resource["spec"]["rollout"] == {"progressDeadline": "5m", "paused": True}
    with pytest.raises(ApiException):
        await model_of(Server(make.resource(), conflicts=99)).change_rollout(paused=True)
    with pytest.raises(CommandFailed, match="no InferenceModel default/tiny"):
        await model_of(Server(None)).get()


def standing(make: Any, ready: str, progressing: str, **fields: Any) -> Object:
    """A resource whose conditions are `STATUS/Reason`."""
    words = {"Ready": ready, "Progressing": progressing, "Accepted": "True/Accepted"}
    made = [{"type": kind, "status": it.split("/")[0], "reason": it.split("/")[1], "message": "m"} for kind, it in words.items()]
    return {**make.resource(), "status": {"observedGeneration": 1, "ready": "1/1", "conditions": made, **fields}}


@pytest.mark.parametrize(
    ("ready", "progressing", "refused"),
    [
        ("True/Serving", "False/Complete", None),
        ("False/RolloutBlocked", "False/RolloutBlocked", "does not get any further"),
        ("False/NewRevisionFails", "True/RollingOut", "not done after 0 s"),
        ("Unknown/RollingOut", "True/RollingOut", "not done after 0 s"),
    ],
)
async def test_status_waits_for_what_may_yet_come(make: Any, ready: str, progressing: str, refused: str | None) -> None:
    options, told = argparse.Namespace(timeout=0.0, wait=True), list[str]()
    looking = commands._status(model_of(Server(standing(make, ready, progressing))), options, told.append)
    if refused is None:
        await looking
    else:
        with pytest.raises(CommandFailed, match=refused):
            await looking
    assert told == [f"tiny: 1/1 ready, revision 0: {ready.split('/')[1]}: m\n"]


async def test_a_status_of_an_older_spec_says_nothing(make: Any) -> None:
    options, told = argparse.Namespace(timeout=0.0, wait=True), list[str]()
    stale = standing(make, "True/Serving", "False/Complete", observedGeneration=0)
    with pytest.raises(CommandFailed, match="not done"):
        await commands._status(model_of(Server(stale)), options, told.append)
    assert "has not seen this spec yet" in told[0]
