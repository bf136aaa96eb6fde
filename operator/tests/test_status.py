"""From what is observed to conditions."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operator.conditions import JUDGES, verdicts
from penstock.operator.events import turns
from penstock.operator.observed import Observed, PoolObserved, Refusal, ScalingStatus
from penstock.operator.pods import is_ready
from penstock.operator.routes import Routing
from penstock.operator.status import status_of

NOW = "2026-01-01T00:00:00Z"
TYPES = tuple(kind for kind in JUDGES if kind != "CanaryPassed")
"""Of a model that is no judged canary."""


def observed(pods: Sequence[Any], wanted: int = 2, **fields: Any) -> Observed:
    """A model with one pool, whose wanted revision is r1."""
    pool = PoolObserved(name="main", revision="r1", wanted=wanted, workload={"metadata": {}, "status": {}}, pods=pods)
    routing = fields.pop("routing", Routing(asked=2, answered=2))
    return Observed(name="tiny", generation=3, pools=[pool], served_name="tiny", routing=routing, **fields)


def judged(pods: Sequence[Any], wanted: int = 2, **fields: Any) -> dict[str, tuple[bool | None, str, str]]:
    """Conditions as (status, reason, message)."""
    made = verdicts(observed(pods, wanted, **fields))
    return {kind: (it.status, it.reason, it.message) for kind, it in made.items()}


def test_all_types_are_there_from_the_first_sight() -> None:
    status = status_of(Observed(name="tiny", generation=1, pools=[], served_name="tiny"), [], NOW)
    assert tuple(condition["type"] for condition in status["conditions"]) == TYPES
    assert all(condition["observedGeneration"] == 1 for condition in status["conditions"])
    assert status["conditions"][0]["status"] == "False"


def test_all_well(make: Any) -> None:
    pods = [make.ready_pod("a"), make.ready_pod("b")]
    made = judged(pods)
    assert {kind: status for kind, (status, *_) in made.items()} == {
        "Ready": True,
        "Accepted": True,
        "ModelAvailable": True,
        "PodsReady": True,
        "Serving": True,
        "Routed": True,
        "ScalingActive": False,
        "Progressing": False,
        "Degraded": False,
    }
    status = status_of(observed(pods), [], NOW)
    assert (status["ready"], status["replicas"], status["desired"]) == ("2/2", 2, 2)
    assert status["selector"] == "penstock.dev/model=tiny"


def test_replicas_that_come_and_that_go_are_counted(make: Any) -> None:
    going, ended = make.ready_pod("going"), make.pod("ended", phase="Failed")
    going["metadata"]["deletionTimestamp"] = NOW
    pods = [make.ready_pod("serves"), make.pod("starts"), make.pod("starts-too"), going, ended]
    (pool,) = status_of(observed(pods, wanted=3), [], NOW)["pools"]
    assert pool == {"name": "main", "ready": "1/3", "updated": 1, "warming": 2, "draining": 1, "cost": 0}


def test_a_dead_engines_last_words_are_quoted(make: Any) -> None:
    words = "CheckpointError: model path /nope does not exist"
    for waiting in (True, False):
        made = judged([make.crashed_pod("tiny-main-x", words, waiting=waiting)])
        for kind in ("Ready", "ModelAvailable", "PodsReady"):
            assert made[kind] == (False, "EngineExited", f"pod tiny-main-x: {words}")
        assert made["Degraded"][:2] == (True, "EngineExited")
        assert made["Serving"][0] is False


def test_a_killed_engine_had_no_last_words(make: Any) -> None:
    made = judged([make.crashed_pod("tiny-main-x", "request 7 is done", exit_code=137)])
    assert made["Ready"] == (False, "EngineExited", "pod tiny-main-x: container engine was killed by signal 9 (Error)")


def test_an_unschedulable_pod_says_what_is_missing(make: Any) -> None:
    why = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    made = judged([make.pod("p", phase="Pending", conditions=[condition])])
    assert made["Ready"] == (False, "Unschedulable", f"pod p cannot be scheduled: {why}")
    container = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    made = judged([make.pod("p", containerStatuses=[container])])
    assert made["Ready"] == (False, "ImagePullBackOff", "pod p: no such image")
    container = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert judged([make.pod("p", containerStatuses=[container])])["Ready"][1] == "Starting"


def test_while_a_bad_revision_fails_the_old_replicas_serve_and_the_reason_is_told(make: Any) -> None:
    old = [make.ready_pod("a", revision="r0"), make.ready_pod("b", revision="r0")]
    made = judged([*old, make.crashed_pod("c", "not safetensors")])
    assert made["Ready"][:2] == (False, "NewRevisionFails")
    assert "not safetensors" in made["Ready"][2]
    assert "2 replicas still serve" in made["Ready"][2]
    assert made["Serving"][0] is True
    assert made["ModelAvailable"][0] is False


def test_a_rollout_under_way_is_no_verdict_yet(make: Any) -> None:
    made = judged([make.ready_pod("a", revision="r0"), make.ready_pod("b")])
    assert made["Ready"][:2] == (None, "RollingOut")
    assert made["Progressing"][:2] == (True, "RollingOut")
    paused = judged([make.ready_pod("a", revision="r0")], paused=True)
    assert (paused["Ready"][1], paused["Progressing"][:2]) == ("Paused", (False, "Paused"))


def test_a_failing_old_revision_is_not_held_against_the_new_one(make: Any) -> None:
    made = judged([make.crashed_pod("a", revision="r0"), make.pod("b")])
    assert made["Ready"][1] == "Starting"


def test_a_refused_spec_leaves_the_old_replicas_serving(make: Any) -> None:
    refusal = Refusal("UnsupportedField", "this version does not implement spec.lora")
    made = judged([make.ready_pod("a"), make.ready_pod("b")], refusal=refusal)
    assert made["Ready"][:2] == made["Accepted"][:2] == (False, "UnsupportedField")
    assert "2 replicas of the last good revision still serve" in made["Ready"][2]
    assert made["Serving"][0] is True


def test_zero_on_purpose_is_ready_and_says_that_it_serves_nothing() -> None:
    made = judged([], wanted=0)
    assert (made["Ready"][:2], made["Serving"][:2]) == ((True, "ScaledToZero"), (False, "ScaledToZero"))


def test_a_lost_name_is_told(make: Any) -> None:
    made = judged([make.ready_pod("a")], wanted=1, conflict="'tiny' is served by a/b, which is older: choose another name")
    assert made["Ready"][:2] == made["Routed"][:2] == (False, "NameConflict")


def test_who_reaches_a_model_is_the_gateways_word(make: Any) -> None:
    def told(**routing: Any) -> tuple[tuple[bool | None, str], tuple[bool | None, str]]:
        made = judged([make.ready_pod("a")], wanted=1, routing=Routing(**routing))
        return made["Routed"][:2], made["Ready"][:2]

    assert told(asked=2, answered=2) == ((True, "Routed"), (True, "Serving"))
    assert told(asked=2, answered=2, refused="bad cluster") == ((False, "ConfigurationRefused"),) * 2
    assert told(asked=2, answered=2, ignorant=2) == ((False, "NotRoutedYet"),) * 2
    assert told(asked=2, answered=2, ignorant=1) == ((None, "NotRoutedYet"), (True, "Serving"))
    assert told(asked=2, answered=2, conflict="taken") == ((False, "NameConflict"),) * 2
    # Where nobody can say, it is unknown, and what serves is ready.
    assert told() == ((None, "NoGateway"), (True, "Serving"))
    assert told(asked=2) == ((None, "GatewaysSilent"), (True, "Serving"))


def test_a_rollout_without_room_is_blocked_and_one_that_makes_room_is_not(make: Any) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    pods = [make.ready_pod("old", revision="r0"), make.pod("new", conditions=[condition])]

    def made(**step: Any) -> dict[str, tuple[bool | None, str]]:
        pool = PoolObserved(name="main", revision="r1", wanted=1, workload=None, pods=pods, **step)
        found = verdicts(Observed(name="tiny", generation=1, pools=[pool], served_name="tiny"))
        return {kind: (it.status, it.reason) for kind, it in found.items()}

    blocked = made(blocked="no room")
    assert blocked["Ready"] == blocked["Progressing"] == (False, "RolloutBlocked")
    assert blocked["Degraded"] == (True, "RolloutBlocked")
    assert blocked["Serving"][0] is True
    settling = made(settling=True)
    assert settling["Ready"] == (None, "RollingOut")
    assert settling["Degraded"][0] is False
    assert made()["Ready"] == (False, "NewRevisionFails")


def test_the_deployments_verdict_counts_only_for_its_present_spec(make: Any) -> None:
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    for seen, reason in ((2, "ProgressDeadlineExceeded"), (1, "Starting")):
        workload = {"metadata": {"generation": 2}, "status": {"observedGeneration": seen, "conditions": [late]}}
        pool = PoolObserved(name="main", revision="r1", wanted=1, workload=workload, pods=[make.pod("p")])
        made = verdicts(Observed(name="tiny", generation=1, pools=[pool], served_name="tiny"))
        assert made["Progressing"].reason == reason


def test_scaling_is_told_honestly(make: Any) -> None:
    def of(report: ScalingStatus | None) -> tuple[bool | None, str]:
        pool = PoolObserved("main", "r1", 1, None, [make.ready_pod("a")], scaled=True, scaling=report)
        made = verdicts(Observed(name="tiny", generation=1, pools=[pool], served_name="tiny"))["ScalingActive"]
        return made.status, made.reason

    assert of(None) == (None, "NoReport")
    assert of(ScalingStatus(1, 2, "Demand", "two are needed")) == (True, "Scaling")
    ignored = ScalingStatus(1, 2, "Demand", "two are needed", out_of_reach="the ITL goal of 10 ms is ignored")
    assert of(ignored) == (True, "GoalOutOfReach")
    assert of(ScalingStatus(1, 1, "NoData", "no gateway answered", idle="NoData")) == (False, "NoData")
    assert of(ScalingStatus(1, 3, "Demand", "3 are needed", idle="DryRun")) == (False, "DryRun")


def test_times_move_only_when_a_status_flips(make: Any) -> None:
    before = status_of(observed([make.ready_pod("a")], wanted=1), [], NOW)["conditions"]
    later = "2026-01-01T01:00:00Z"
    after = status_of(observed([], wanted=1), before, later)["conditions"]
    times = {condition["type"]: condition["lastTransitionTime"] for condition in after}
    assert (times["Ready"], times["Serving"]) == (later, later)
    assert (times["Accepted"], times["Routed"]) == (NOW, NOW)


def test_one_event_for_each_turn_and_none_for_each_loop(make: Any) -> None:
    good = status_of(observed([make.ready_pod("a")], wanted=1), [], NOW)["conditions"]
    bad = status_of(observed([make.crashed_pod("a")], wanted=1), good, NOW)["conditions"]
    assert turns([], good) == [("Normal", "Serving", "1 of 1 replicas ready")]
    assert turns(good, bad) == [("Warning", "EngineExited", "pod a: it broke")]
    assert turns(good, good) == turns(bad, bad) == []


conditions = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["Ready", "PodScheduled"]), "status": st.sampled_from(["True", "False"])}),
    max_size=2,
)
containers = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.just("engine"),
            "ready": st.booleans(),
            "state": st.sampled_from([{}, {"running": {}}, {"waiting": {"reason": "X"}}, {"terminated": {"exitCode": 1}}]),
        }
    ),
    max_size=1,
)


@st.composite
def pod(draw: st.DrawFn) -> dict[str, Any]:
    """Any pod."""
    labels = {"penstock.dev/pool": "main", "penstock.dev/revision": draw(st.sampled_from(["r0", "r1"]))}
    meta: dict[str, Any] = {"name": "p", "labels": labels}
    if draw(st.booleans()):
        meta["deletionTimestamp"] = NOW
    phase = draw(st.sampled_from(["Pending", "Running", "Failed"]))
    return {"metadata": meta, "status": {"phase": phase, "conditions": draw(conditions), "containerStatuses": draw(containers)}}


pools = st.builds(
    PoolObserved,
    name=st.sampled_from(["main", "other"]),
    revision=st.sampled_from(["r0", "r1"]),
    wanted=st.integers(0, 3),
    workload=st.none() | st.just({"metadata": {}, "status": {"conditions": []}}),
    pods=st.lists(pod(), max_size=4),
    scaled=st.booleans(),
    blocked=st.sampled_from(["", "no room"]),
    settling=st.booleans(),
)


@pytest.mark.req("XC-03")
@given(
    st.builds(
        Observed,
        name=st.just("tiny"),
        generation=st.integers(0, 5),
        pools=st.lists(pools, max_size=3),
        refusal=st.none() | st.just(Refusal("InvalidSpec", "no")),
        conflict=st.sampled_from(["", "taken"]),
        served_name=st.just("tiny"),
        paused=st.booleans(),
        routing=st.builds(
            Routing,
            asked=st.integers(0, 2),
            answered=st.integers(0, 2),
            ignorant=st.integers(0, 2),
            refused=st.sampled_from(["", "bad cluster"]),
            conflict=st.sampled_from(["", "taken"]),
        ),
    )
)
def test_ready_is_never_true_with_nothing_serving(seen: Observed) -> None:
    status = status_of(seen, [], NOW)
    by_type = {condition["type"]: condition for condition in status["conditions"]}
    assert tuple(by_type) == TYPES
    serving = any(is_ready(it) for pool in seen.pools for it in pool.pods)
    assert (by_type["Serving"]["status"] == "True") is serving
    if by_type["Ready"]["status"] == "True":
        assert by_type["Accepted"]["status"] == "True"
        assert by_type["Routed"]["status"] != "False" or status["desired"] == 0
        on_purpose = by_type["Ready"]["reason"] == "ScaledToZero" and status["desired"] == 0
        assert on_purpose or (serving and all(pool.ready_current for pool in seen.pools if pool.wanted))
    for condition in status["conditions"]:
        assert condition["observedGeneration"] == seen.generation
        assert condition["status"] in ("True", "False", "Unknown")
        assert condition["reason"].isalnum()
        assert condition["message"]


@pytest.mark.req("XC-03")
def test_a_pool_says_what_its_replicas_cost_also_those_that_come_and_go(make: Any) -> None:
    going, ended = make.ready_pod("going"), make.pod("ended", phase="Failed")
    going["metadata"]["deletionTimestamp"] = NOW
    pods = [make.ready_pod("a"), make.pod("b"), going, ended]
    pool = PoolObserved(name="main", revision="r1", wanted=2, workload=None, pods=pods, cost=30)
    (told,) = status_of(Observed(name="tiny", generation=1, pools=[pool]), [], NOW)["pools"]
    assert told["cost"] == 90


@pytest.mark.req("XC-03")
def test_the_ratio_of_prefill_to_decode_is_of_replicas_that_serve(make: Any) -> None:
    def told(**ready: int) -> Any:
        pools = [
            PoolObserved(name=role, revision="r", wanted=9, workload=None, pods=[make.ready_pod("a")] * count, role=role)
            for role, count in ready.items()
        ]
        return status_of(Observed(name="tiny", generation=1, pools=pools), [], NOW).get("prefillPerDecodePercent")

    assert told(Prefill=1, Decode=3) == 33
    assert told(Prefill=3, Decode=2) == 150
    assert told(Prefill=0, Decode=2) is None
    assert told(Prefill=2, Both=2) is None
