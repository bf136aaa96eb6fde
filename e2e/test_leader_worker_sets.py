"""Replicas that span nodes: what the operator, LWS's real manager and our engine make of them, while clients ask."""

import os
import signal
from typing import Any

import pytest

from e2e import models
from e2e.cluster import lws
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.traffic import Answer, answers_of, clients, expect_answers_of, expect_no_loss, expect_streams_of
from e2e.waiting import eventually

Object = dict[str, Any]

ALONE, NAME, SET = "narrow", "wide", "wide-cpu"
NODES = {"node-1", "node-2"}
LWS = "leaderworkerset.sigs.k8s.io"
MASTER_PORT = 29_501
"""Where a leader's engine waits for its workers."""
CLIENTS, TOKENS = 4, 60
EXACT = {"dtype": "float32"}
"""Sums over ranks have another order than those of one process: in bfloat16 a near-tie could go either way."""
FEWER_ROWS = {"limits": {"maxNumSeqs": CLIENTS - 1}}
"""Than clients: a quick group would answer all of them alone."""


def wide(replicas: int, **rollout: Any) -> Object:
    """Replicas of two ranks, each in a pod and on a node of its own."""
    members = {"matchExpressions": [{"key": f"{LWS}/name", "operator": "Exists"}]}
    apart = [{"labelSelector": members, "matchLabelKeys": [f"{LWS}/group-key"], "topologyKey": "kubernetes.io/hostname"}]
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    pool = {"name": "cpu", "parallelism": {"tensor": 2, "nodes": 2}, "template": {"spec": {"affinity": affinity}}}
    return models.small(NAME, engine=EXACT | FEWER_ROWS, pools=[pool], replicas=replicas, rollout=rollout)


@pytest.mark.timeout(600)
def test_replicas_that_span_nodes(system: System, namespace: str, phases: Phases) -> None:
    cluster = system.cluster
    with lws.installed(cluster), models.applied(cluster, namespace, wide(1)):
        with phases("applied → a group of two pods, ready"):
            (only,) = eventually(lambda: expect_groups(cluster, namespace, 1), seconds=180)
        made = cluster.get("leaderworkerset", SET, namespace)["metadata"]
        assert made["generation"] == 1, "the operator and LWS's webhooks agree"
        with phases("the same answer as one process gives"):
            expect_equal_answers(system, namespace)
        with clients(system.url, NAME, CLIENTS, TOKENS) as asking, phases("a second group, under load"):
            cluster.apply(wide(2), namespace=namespace)
            first = eventually(lambda: expect_groups(cluster, namespace, 2), seconds=180)
            eventually(lambda: expect_answers_of(asking, leaders(first)))
        expect_no_loss(answers_of(asking), TOKENS)
        assert uids(first[0]) == uids(only), "the first group is left alone"
        expect_group_objects(cluster, namespace, first)
        with phases("a third group that a quota forbids → the status says why"):
            expect_quoted(cluster, namespace)
        with clients(system.url, NAME, CLIENTS, TOKENS) as asking, phases("a worker killed → its group made anew, as a whole"):
            eventually(lambda: expect_answers_of(asking, leaders(first)))
            eventually(lambda: expect_streams_of(asking, leaders(first[:1])))
            kill(first[0][1])
            replaced = eventually(lambda: expect_replaced(cluster, namespace, first[:1], 2), seconds=180)
        assert uids(replaced[1]) == uids(first[1]), "the other group is left alone"
        expect_lost_by_one(answers_of(asking), leaders(first[:1]))
        with clients(system.url, NAME, CLIENTS, TOKENS) as asking:
            with phases("an update under load → a third group first, then one by one"):
                cluster.apply(wide(2, restartedAt="2026-01-01T00:00:00Z"), namespace=namespace)
                eventually(lambda: expect_surge(cluster, namespace, replaced), seconds=180)
                second = eventually(lambda: expect_replaced(cluster, namespace, replaced, 2), seconds=180)
            with phases("one group less, under load"):
                eventually(lambda: expect_answers_of(asking, leaders(second)))
                cluster.apply(wide(1, restartedAt="2026-01-01T00:00:00Z"), namespace=namespace)
                (only,) = eventually(lambda: expect_groups(cluster, namespace, 1), seconds=180)
        expect_no_loss(answers_of(asking), TOKENS)
        assert uids(only) == uids(second[0]), "the highest index goes first"
        with phases("one group → its update is blocked until it may stop"):
            expect_blocked_while_alone(cluster, namespace, only)
        with phases("deleted → nothing left"):
            cluster.kubectl("delete", models.KIND, NAME, f"--namespace={namespace}")
            left = "leaderworkersets,statefulsets,pods,services,networkpolicies,poddisruptionbudgets,controllerrevisions"
            eventually(lambda: expect_none(cluster, left, namespace), seconds=120)


def expect_equal_answers(system: System, namespace: str) -> None:
    """An engine on two nodes says what an engine of one process says."""

    def answer(model: str) -> str:
        asked = system.openai().completions.create(model=model, prompt="What does json.loads do?", max_tokens=24, temperature=0)
        return asked.choices[0].text

    with models.applied(system.cluster, namespace, models.small(ALONE, engine=EXACT)):
        said = eventually(lambda: answer(ALONE), seconds=120)
        assert said and eventually(lambda: answer(NAME), seconds=60) == said


def expect_lost_by_one(answers: list[Answer], replicas: set[str]) -> None:
    """Only requests of the group that lost a rank have failed, at most one of each client, and so that they are sent again."""
    lost = [it for it in answers if not it.complete]
    assert 0 < len(lost) <= CLIENTS
    assert all(it.retryable and it.replica in replicas | {""} for it in lost), lost
    expect_no_loss([it for it in answers if it.complete], TOKENS)


def leaders(groups: list[list[Object]]) -> set[str]:
    """UIDs of the pods that answer for their groups."""
    return {leader["metadata"]["uid"] for leader, _ in groups}


def expect_groups(cluster: Cluster, namespace: str, count: int) -> list[list[Object]]:
    """The groups by index, each its leader and its worker; fails unless the operator and LWS both call them ready and done."""
    pods = cluster.list("pods", namespace, f"{LWS}/name={SET}")
    pods.sort(key=lambda pod: [pod["metadata"]["labels"][f"{LWS}/{it}-index"] for it in ("group", "worker")])
    assert len(pods) == 2 * count, f"{len(pods)} pods"
    groups = [pods[at : at + 2] for at in range(0, len(pods), 2)]
    for leader, worker in groups:
        assert {leader["spec"].get("nodeName"), worker["spec"].get("nodeName")} == NODES, "a group spans both nodes"
    told = cluster.get("leaderworkerset", SET, namespace)["status"]
    available = {it["type"]: it["status"] for it in told.get("conditions", [])}.get("Available")
    assert (available, told.get("readyReplicas"), told.get("updatedReplicas")) == ("True", count, count)
    status = cluster.get(models.KIND, NAME, namespace)["status"]
    assert status["ready"] == f"{count}/{count}"
    (pool,) = status["pools"]
    told = {"name": "cpu", "ready": f"{count}/{count}", "updated": count, "warming": 0, "draining": 0, "cost": count}
    assert told.items() <= pool.items()
    found = models.conditions(cluster, namespace, NAME)
    verdicts = {kind: found[kind]["reason"] for kind in ("Accepted", "PodsReady", "Serving", "Progressing", "Degraded")}
    assert verdicts == {
        "Accepted": "Accepted",
        "PodsReady": "AllReady",
        "Serving": "ReplicasReady",
        "Progressing": "Complete",
        "Degraded": "AsExpected",
    }
    return groups


def expect_quoted(cluster: Cluster, namespace: str) -> None:
    """What a Deployment has as a condition, a LeaderWorkerSet's StatefulSet says in Events alone."""
    cluster.kubectl("create", "quota", "full", "--hard=pods=4", f"--namespace={namespace}")
    cluster.apply(wide(3), namespace=namespace)
    eventually(lambda: expect_words(cluster, namespace, "exceeded quota: full"), seconds=120)
    cluster.kubectl("delete", "quota", "full", f"--namespace={namespace}")
    cluster.apply(wide(2), namespace=namespace)
    eventually(lambda: expect_groups(cluster, namespace, 2), seconds=120)


def expect_words(cluster: Cluster, namespace: str, words: str) -> None:
    found = models.conditions(cluster, namespace, NAME)
    assert words in found["PodsReady"]["message"], found["PodsReady"]
    assert (found["Degraded"]["status"], found["Serving"]["status"]) == ("True", "True")


def expect_group_objects(cluster: Cluster, namespace: str, groups: list[list[Object]]) -> None:
    """Names, addresses, and who may reach whom."""
    policies = {it["metadata"]["name"]: it["spec"] for it in cluster.list("networkpolicies", namespace)}
    assert set(policies) == {SET, f"{SET}-workers"}
    reached, guarded = (policies[name]["podSelector"]["matchLabels"] for name in (SET, f"{SET}-workers"))
    peers = [
        peer["podSelector"]["matchLabels"]
        for rule in policies[SET]["ingress"]
        if opens(rule, MASTER_PORT)
        for peer in rule["from"]
    ]
    for index, (leader, worker) in enumerate(groups):
        name = f"{SET}-{index}"
        service = cluster.get("service", name, namespace)["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert leader["metadata"]["name"] == name
        for pod in (leader, worker):  # it is by this name that the worker came, else the leader would not be ready
            (engine,) = pod["spec"]["containers"]
            assert {"name": "LWS_LEADER_ADDRESS", "value": f"{name}.{name}.{namespace}"} in engine["env"]
        assert selected(reached, leader) and not selected(reached, worker), "a policy for replicas is for leaders"
        assert selected(guarded, worker) and not selected(guarded, leader), "and one for their workers"
        assert any(selected(peer, worker) for peer in peers), "a worker reaches its leader"
    (own,) = cluster.list("endpointslices", namespace, f"kubernetes.io/service-name={SET}")
    leaders = {leader["status"]["podIP"] for leader, _ in groups}
    assert {address for it in own["endpoints"] for address in it["addresses"]} == leaders, "workers are no replicas"


def opens(rule: Object, port: int) -> bool:
    """Whether a rule of a NetworkPolicy is about that TCP port."""
    return any(it["protocol"] == "TCP" and it["port"] <= port <= it.get("endPort", it["port"]) for it in rule["ports"])


def selected(wanted: dict[str, str], pod: Object) -> bool:
    return wanted.items() <= pod["metadata"]["labels"].items()


def kill(pod: Object) -> None:
    (engine,) = pod["status"]["containerStatuses"]
    os.kill(int(engine["containerID"].removeprefix("process://")), signal.SIGKILL)


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def expect_replaced(cluster: Cluster, namespace: str, old: list[list[Object]], count: int) -> list[list[Object]]:
    """The groups, once all are ready and none of those pods is there any more."""
    groups = expect_groups(cluster, namespace, count)
    gone = {uid for group in old for uid in uids(group)}
    assert not gone & {uid for group in groups for uid in uids(group)}
    return groups


def expect_surge(cluster: Cluster, namespace: str, old: list[list[Object]]) -> None:
    """Fails unless a third group has begun while both old ones are there."""
    there = uids(cluster.list("pods", namespace, f"{LWS}/name={SET}"))
    assert len(there) > 4 and all(uids(group) <= there for group in old)


def expect_blocked_while_alone(cluster: Cluster, namespace: str, only: list[Object]) -> None:
    """LWS would wait for ever where one group is to be replaced by surge."""
    again = "2026-01-02T00:00:00Z"
    cluster.apply(wide(1, restartedAt=again), namespace=namespace)
    ready = eventually(lambda: expect_blocked(cluster, namespace), seconds=120)
    assert "allowDowntime" in ready["message"]
    cluster.apply(wide(1, restartedAt=again, allowDowntime=True), namespace=namespace)
    eventually(lambda: expect_replaced(cluster, namespace, [only], 1), seconds=180)


def expect_blocked(cluster: Cluster, namespace: str) -> Object:
    found = models.conditions(cluster, namespace, NAME)
    assert found["Ready"]["reason"] == "RolloutBlocked", found["Ready"]
    assert found["Serving"]["status"] == "True"
    return found["Ready"]


def expect_none(cluster: Cluster, kinds: str, namespace: str) -> None:
    left = [f"{it['kind']}/{it['metadata']['name']}" for it in cluster.list(kinds, namespace)]
    assert not left, f"{', '.join(left)} are left"
