"""What Events alone say, of LeaderWorkerSets and of pods."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from operator_world import World

from penstock.operator import acceptance, told
from penstock.operator.failures import stuck, with_failure, with_reason
from penstock.operator.pods import trouble
from penstock.operator.store import Key

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
WORDS = 'create Pod tiny-main-0 in StatefulSet tiny-main failed error: pods "tiny-main-0" is forbidden: exceeded quota: gpus'


def event(name: str, at: str, reason: str = "FailedCreate", message: str = WORDS) -> Object:
    about, time = {"kind": "StatefulSet", "name": name}, f"2026-01-01T{at}Z"
    head = {"metadata": {"creationTimestamp": time}, "involvedObject": about}
    return {**head, "reason": reason, "message": message, "lastTimestamp": time}


def quoted(*events: Object) -> str:
    """What is said of the set, empty where nothing is."""
    found = with_failure({"metadata": {"name": "tiny-main", "generation": 3}}, events, NOW)
    conditions = found.get("status", {"conditions": []})["conditions"]
    assert not conditions or found["status"]["observedGeneration"] == 3
    return "; ".join(it["message"] for it in conditions)


def test_the_newest_failure_of_its_own_sets_is_quoted_while_it_lasts() -> None:
    assert quoted() == ""
    assert quoted(event("tiny-main", "11:59:00")) == WORDS
    assert quoted(event("tiny-main-1", "11:59:00", message="a worker")) == "a worker"
    assert quoted(event("tiny-main", "11:58:00"), event("tiny-main-0", "11:59:00", message="later")) == "later"
    assert quoted(event("tiny-mainly", "11:59:00"), event("tiny", "11:59:00")) == "", "others'"
    assert quoted(event("tiny-main", "11:00:00")) == "", "long ago"
    assert quoted(event("tiny-main", "11:58:00"), event("tiny-main", "11:59:00", "SuccessfulCreate")) == "", "over"
    assert quoted(event("tiny-main", "11:59:00"), event("tiny-main", "11:58:00", "SuccessfulCreate")) == WORDS, "again"


def test_events_that_lack_what_others_have_are_passed_over() -> None:
    whole = event("tiny-main", "11:58:00")
    nameless = {**whole, "involvedObject": {"kind": "StatefulSet"}}
    causeless = {name: value for name, value in event("tiny-main", "11:59:00").items() if name != "reason"}
    assert quoted(whole, nameless, causeless) == WORDS
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T11:00:00Z"}
    waiting = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}
    pod = {"metadata": {"name": "p"}, "status": {"conditions": [scheduled], "containerStatuses": [waiting]}}
    assert with_reason(pod, [{**causeless, "type": "Warning"}], NOW) == pod


@pytest.fixture
def world(api: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(acceptance, "unsupported", lambda spec: [])  # replicas that span nodes
    return World(api, make)


@pytest.mark.parametrize("forbidden", [False, True])
async def test_the_status_says_why_a_set_has_no_pods(world: World, key: Key, forbidden: bool) -> None:
    pool = {"name": "main", "parallelism": {"tensor": 2}, "accelerator": {"resource": "example.com/chip", "perNode": 1}}
    await world.apply(world.make.resource(pools=[pool], replicas=1))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    world.api.told = [{**event("tiny-main", "11:59:00"), "lastTimestamp": now}]
    if forbidden:

        async def refuse(*_: Any) -> Any:
            raise ApiException(status=403)

        world.api.events = refuse
    await world.settle(key)
    assert (key, 5.0) in world.looks, "no watch tells of Events"
    status, _, message = world.condition("Ready")
    assert status == "False"
    assert (WORDS in message) is not forbidden
    assert (world.condition("Degraded")[0] == "True") is not forbidden


MOUNT = 'MountVolume.SetUp failed for volume "weights" : secret "weights" not found'
MAKING = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}


def making(make: Any, at: str, *containers: Object) -> Object:
    """A pod that was scheduled then, and whose containers are being made."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    return make.pod(phase="Pending", conditions=[scheduled], containerStatuses=[MAKING, *containers])


def about_pod(at: str, reason: str = "FailedMount", kind: str = "Warning") -> Object:
    return {**event("p", at, reason, MOUNT), "type": kind, "involvedObject": {"kind": "Pod", "name": "p"}}


def test_a_pod_is_stuck_when_none_of_its_containers_is_made_for_long(make: Any) -> None:
    assert stuck(making(make, "2026-01-01T11:59:00Z"), NOW)
    assert not stuck(making(make, "2026-01-01T11:59:45Z"), NOW), "young"
    assert not stuck(making(make, "2026-01-01T11:59:00Z", {"name": "b", "state": {"running": {}}}), NOW), (
        "pulling the second image"
    )
    assert not stuck(make.pod(phase="Pending"), NOW), "not scheduled"
    assert not stuck(make.ready_pod(), NOW)


def test_a_warning_is_the_pods_reason_until_something_else_happens(make: Any) -> None:
    def why(*events: Object) -> str:
        found = trouble(with_reason(making(make, "2026-01-01T11:50:00Z"), events, NOW))
        return "" if found is None else f"{found.reason}: {found.message}"

    assert why() == ""
    assert why(about_pod("11:59:00")) == f"FailedMount: pod p: {MOUNT}"
    assert why(about_pod("11:58:00"), about_pod("11:59:00", "FailedAttachVolume")).startswith("FailedAttachVolume: ")
    assert why(about_pod("11:49:00", "FailedScheduling")) == "", "it has been scheduled since"
    assert why(about_pod("11:59:00"), about_pod("11:59:30", "Pulling", "Normal")) == "", "it is over"


async def test_the_status_says_why_a_pods_containers_are_not_made(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]

    def time(ago: float) -> str:
        return (datetime.now(UTC) - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def put(ago: float) -> None:
        for name in ("p", "q"):
            pod = making(world.make, time(ago))
            pod["metadata"] |= {"name": name, "uid": name}
            pod["metadata"]["labels"]["penstock.dev/revision"] = revision
            world.api.put(pod)

    put(ago=10)
    world.api.told = [{**about_pod("11:59:00"), "lastTimestamp": time(ago=5)}]
    await world.settle(key)
    assert world.condition("Ready")[1] == "Starting"
    assert (key, 30.0) in world.looks, "no watch tells of Events"
    put(ago=60)
    await world.settle(key)
    assert world.condition("Ready")[1:] == ("FailedMount", f"pod p: {MOUNT}")


async def test_one_answer_serves_all_who_ask_within_seconds(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 100.0, list[tuple[str, str, str | None]]()
    monkeypatch.setattr(told.time, "monotonic", lambda: now)

    async def events(*place: Any) -> list[Object]:
        asked.append(place)
        return [{"number": len(asked)}]

    api.events, its = events, told.Told(api)
    assert await its.events("a", "StatefulSet") == await its.events("a", "StatefulSet") == [{"number": 1}]
    assert await its.events("b", "StatefulSet") == [{"number": 2}]
    assert await its.events("a", "Pod", "p") == [{"number": 3}]
    now += 6
    assert await its.events("a", "StatefulSet") == [{"number": 4}]
    assert await its.events("a", "Pod", "p") == [{"number": 3}]


@pytest.mark.parametrize(
    "error", [ApiException(status=500), ApiException(status=403), TimeoutError()], ids=["500", "403", "time"]
)
async def test_nothing_waits_for_events_that_cannot_be_read(api: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    now = 100.0
    monkeypatch.setattr(told.time, "monotonic", lambda: now)
    api.told = [event("tiny-main", "11:59:00")]
    its = told.Told(api)
    before = await its.events("default", "StatefulSet")
    now += 6

    async def refuse(*_: Any) -> Any:
        raise error

    api.events = refuse
    assert await its.events("default", "StatefulSet") == before == api.told
