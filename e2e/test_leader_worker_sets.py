"""Replicas that span nodes: the operator's LeaderWorkerSets, and what the real manager of LWS makes of them."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from e2e import group_member, models
from e2e.cluster import lws
from e2e.cluster.cluster import KUBELET, REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.system import NAMESPACE, OPERATOR, System, without_operators
from e2e.waiting import eventually

Object = dict[str, Any]

NAME, SET = "wide", "wide-gpu"
NODES = ("wide-1", "wide-2")
CHIP = "example.com/chip"
UNHELD = """\
import sys
from penstock.operator import acceptance, cli
acceptance.unsupported = lambda spec: []
sys.exit(cli.operator(sys.argv[1:]))
"""
"""The operator, as if engines could span nodes already: it refuses `parallelism` above 1 until they can."""


@contextmanager
def unheld_operator(system: System, namespace: str) -> Iterator[None]:
    """It has the namespace to itself meanwhile, with the rights of the operator's own ServiceAccount."""
    cluster = system.cluster
    flags = [f"--kubeconfig={cluster.service_account_kubeconfig(NAMESPACE, OPERATOR)}", f"--namespace={namespace}"]
    with without_operators(system):
        flags += ["--allow-command-templates", "--no-leader-elect", "--http-port=19091"]
        command = [sys.executable, "-c", UNHELD, *flags]
        cluster.processes.start("operator", command, cwd=REPOSITORY)
        try:
            yield
        finally:
            cluster.processes.stop("operator")


@contextmanager
def wide_nodes(cluster: Cluster) -> Iterator[None]:
    """Two nodes with three devices each: room for three groups of two pods."""
    for name in NODES:
        cluster.add_node(name, capacity={CHIP: 3})
    try:
        yield
    finally:
        for name in NODES:
            cluster.processes.stop(KUBELET + name)
            cluster.kubectl("delete", "node", name)


def wide(replicas: int, **rollout: Any) -> Object:
    """Replicas of two devices, where a node lends a replica one."""
    pool = {
        "name": "gpu",
        "parallelism": {"tensor": 2},
        "accelerator": {"resource": CHIP, "perNode": 1},
        "template": group_member.template(),
    }
    return models.small(NAME, pools=[pool], replicas=replicas, drainTimeout="5s", rollout=rollout)


@contextmanager
def prepared(system: System, namespace: str, phases: Phases) -> Iterator[None]:
    """The manager of LWS, an operator that takes replicas of several nodes, and nodes for them."""
    with ExitStack() as ending:
        with phases("the manager of LWS installed"):
            ending.enter_context(lws.installed(system.cluster))
        with phases("an operator of the test's own, two nodes"):
            ending.enter_context(unheld_operator(system, namespace))
            ending.enter_context(wide_nodes(system.cluster))
        yield
        with phases("all of that removed"):
            ending.close()


def test_replicas_that_span_nodes(system: System, namespace: str, phases: Phases) -> None:
    cluster = system.cluster
    with prepared(system, namespace, phases), models.applied(cluster, namespace, wide(2)):
        with phases("applied → two groups, both ready"):
            first = eventually(lambda: expect_groups(cluster, namespace, 2), seconds=120)
        expect_group_objects(cluster, namespace, first)
        with phases("a third group that a quota forbids → the status says why"):
            expect_quoted(cluster, namespace)
        with phases("a worker killed → its group made anew, as a whole"):
            kill(first[0][1])
            replaced = eventually(lambda: expect_replaced(cluster, namespace, first[:1], 2), seconds=120)
        assert uids(replaced[1]) == uids(first[1]), "the other group is left alone"
        with phases("an update → a third group first, then one by one"):
            cluster.apply(wide(2, restartedAt="2026-01-01T00:00:00Z"), namespace=namespace)
            eventually(lambda: expect_surge(cluster, namespace, replaced), seconds=120)
            second = eventually(lambda: expect_replaced(cluster, namespace, replaced, 2), seconds=120)
        with phases("one group → its update is blocked until it may stop"):
            expect_only_group(cluster, namespace, second)
        with phases("deleted → nothing left"):
            cluster.kubectl("delete", models.KIND, NAME, f"--namespace={namespace}")
            left = "leaderworkersets,statefulsets,pods,services,networkpolicies,poddisruptionbudgets,controllerrevisions"
            eventually(lambda: expect_none(cluster, left, namespace), seconds=120)


def expect_groups(cluster: Cluster, namespace: str, count: int) -> list[list[Object]]:
    """The groups by index, each its leader and its worker; fails unless the operator and LWS both call them ready and done."""
    pods = cluster.list("pods", namespace, f"{group_member.LWS}/name={SET}")
    pods.sort(key=lambda pod: [pod["metadata"]["labels"][f"{group_member.LWS}/{it}-index"] for it in ("group", "worker")])
    assert len(pods) == 2 * count, f"{len(pods)} pods"
    groups = [pods[at : at + 2] for at in range(0, len(pods), 2)]
    for leader, worker in groups:
        assert {leader["spec"].get("nodeName"), worker["spec"].get("nodeName")} == set(NODES), "a group spans both nodes"
    told = cluster.get("leaderworkerset", SET, namespace)["status"]
    available = {it["type"]: it["status"] for it in told.get("conditions", [])}.get("Available")
    assert (available, told.get("readyReplicas"), told.get("updatedReplicas")) == ("True", count, count)
    status = cluster.get(models.KIND, NAME, namespace)["status"]
    assert status["ready"] == f"{count}/{count}"
    (pool,) = status["pools"]
    told = {"name": "gpu", "ready": f"{count}/{count}", "updated": count, "warming": 0, "draining": 0, "cost": count}
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
    live = cluster.get("leaderworkerset", SET, namespace)
    assert live["metadata"]["generation"] == 1, "the operator and LWS's webhooks agree"
    policies = {it["metadata"]["name"]: it["spec"] for it in cluster.list("networkpolicies", namespace)}
    assert set(policies) == {SET, f"{SET}-workers"}
    reached, guarded = (policies[name]["podSelector"]["matchLabels"] for name in (SET, f"{SET}-workers"))
    peers = [
        peer["podSelector"]["matchLabels"]
        for rule in policies[SET]["ingress"]
        if opens(rule, group_member.MEETING)
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
    there = uids(cluster.list("pods", namespace, f"{group_member.LWS}/name={SET}"))
    assert len(there) > 4 and all(uids(group) <= there for group in old)


def expect_only_group(cluster: Cluster, namespace: str, before: list[list[Object]]) -> None:
    """LWS would wait for ever where one group is to be replaced by surge."""
    again = "2026-01-02T00:00:00Z"
    cluster.apply(wide(1, restartedAt="2026-01-01T00:00:00Z"), namespace=namespace)
    (only,) = eventually(lambda: expect_groups(cluster, namespace, 1), seconds=120)
    assert uids(only) == uids(before[0]), "the highest index goes first"
    cluster.apply(wide(1, restartedAt=again), namespace=namespace)
    ready = eventually(lambda: expect_blocked(cluster, namespace), seconds=120)
    assert "allowDowntime" in ready["message"]
    cluster.apply(wide(1, restartedAt=again, allowDowntime=True), namespace=namespace)
    eventually(lambda: expect_replaced(cluster, namespace, [only], 1), seconds=120)


def expect_blocked(cluster: Cluster, namespace: str) -> Object:
    found = models.conditions(cluster, namespace, NAME)
    assert found["Ready"]["reason"] == "RolloutBlocked", found["Ready"]
    assert found["Serving"]["status"] == "True"
    return found["Ready"]


def expect_none(cluster: Cluster, kinds: str, namespace: str) -> None:
    left = [f"{it['kind']}/{it['metadata']['name']}" for it in cluster.list(kinds, namespace)]
    assert not left, f"{', '.join(left)} are left"
