"""Each part goes in turn, politely or not, while clients ask without a pause: what was lost is counted, part by part."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.commands import CommandError
from e2e.cluster.phases import Phases
from e2e.conftest import Write
from e2e.system import ENVOY, GATEWAY, NAMESPACE, OPERATOR, System, acting
from e2e.traffic import Answer, Client, answers_of, clients, expect_no_loss
from e2e.waiting import eventually
from penstock.api import labels

Object = dict[str, Any]

NAME, WHERE = "sturdy", "disrupted"
REPLICAS, CLIENTS, TOKENS = 2, 4, 200


@pytest.fixture(scope="module")
def sturdy(system: System, phases: Phases) -> Iterator[None]:
    """A model in a namespace of its own. Both replicas are on node-2, the scheduler's choice put off."""
    cluster = system.cluster
    cluster.kubectl("create", "namespace", WHERE)
    with cordoned(cluster, "node-1"), phases("a model of two replicas on one node applied → Ready"):
        cluster.apply(models.small(NAME, replicas=REPLICAS), namespace=WHERE)
        models.wait_until_ready(cluster, WHERE, NAME)
        eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS), seconds=120)
    yield
    cluster.kubectl("delete", models.KIND, NAME, f"--namespace={WHERE}")
    eventually(lambda: models.expect_gone(cluster, WHERE, NAME), seconds=120)
    cluster.kubectl("delete", "namespace", WHERE, "--wait=false")


@contextmanager
def cordoned(cluster: Cluster, *nodes: str) -> Iterator[None]:
    """Nothing is scheduled there meanwhile."""
    cluster.kubectl("cordon", *nodes)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", *nodes)


def process_of(pod: Object) -> int:
    """The first process of its container."""
    (container,) = pod["status"]["containerStatuses"]
    return int(container["containerID"].removeprefix("process://"))


def first_gateway(system: System) -> Object:
    """The one that Envoys ask."""
    return system.cluster.get("pod", f"{GATEWAY}-0", NAMESPACE)


def expect_ready(system: System, component: str) -> dict[str, int]:
    """How often each of its two pods has been restarted, by UID; fails unless there are two, and both are ready."""
    found = system.pods(component)
    assert len(found) == 2
    statuses = [status for pod in found for status in pod["status"].get("containerStatuses", [])]
    assert len(statuses) == 2 and all(status["ready"] for status in statuses)
    return {pod["metadata"]["uid"]: status["restartCount"] for pod, status in zip(found, statuses, strict=True)}


def ended(system: System, component: str, choose: Callable[[], Object]) -> None:
    """That pod deleted as a rollout does it; back once another one is ready in its place."""
    pod = choose()
    system.cluster.kubectl("delete", "pod", pod["metadata"]["name"], f"--namespace={NAMESPACE}", "--wait=false")

    def replaced() -> None:
        assert pod["metadata"]["uid"] not in expect_ready(system, component)

    eventually(replaced, seconds=120)


def killed(system: System, component: str, *pods: Object) -> None:
    """SIGKILL for the first process of each; back once they run again and are ready."""
    before = expect_ready(system, component)
    for pod in pods:
        os.kill(process_of(pod), signal.SIGKILL)

    def restarted() -> None:
        now = expect_ready(system, component)
        assert all(now[uid] == before[uid] + 1 for uid in (pod["metadata"]["uid"] for pod in pods))

    eventually(restarted, seconds=120)


def frozen(system: System) -> None:
    """The API server stopped until no operator acts any more; back once one does again, and none was restarted for it."""
    before = expect_ready(system, OPERATOR)
    places = [f"{pod['status']['podIP']}:9091" for pod in system.pods(OPERATOR)]
    eventually(lambda: expect_acting(places, 1), seconds=30)
    server = system.cluster.processes.pid("kube-apiserver")
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    try:
        eventually(lambda: expect_acting(places, 0), seconds=40)
    finally:
        os.kill(server, signal.SIGCONT)
    eventually(lambda: expect_acting(places, 1), seconds=40)
    assert eventually(lambda: expect_ready(system, OPERATOR), seconds=30) == before


def expect_acting(places: list[str], count: int) -> None:
    assert sum(acting(place) for place in places) == count


BLOWS: dict[str, Callable[[System], None]] = {
    "picker, SIGTERM": lambda system: ended(system, GATEWAY, lambda: first_gateway(system)),
    "picker, SIGKILL": lambda system: killed(system, GATEWAY, first_gateway(system)),
    "Envoy, SIGTERM": lambda system: ended(system, ENVOY, lambda: system.pods(ENVOY)[0]),
    "both operators, SIGKILL": lambda system: killed(system, OPERATOR, *system.pods(OPERATOR)),
    "API server, SIGSTOP until its operators have noticed": frozen,
    "control plane with etcd, SIGKILL": lambda system: system.cluster.restart_control_plane(),
}


def expect_answers(asking: list[Client], after: float) -> None:
    """Every client has been answered since."""
    for client in asking:
        assert [answer for answer in client.answers if answer.started > after and answer.complete]


def lost(answers: list[Answer], began: float, over: float) -> tuple[int, int]:
    """How many requests were under way in that time, and how many of them were lost."""
    meanwhile = [answer for answer in answers if answer.started < over and answer.ended > began]
    return len(meanwhile), len([answer for answer in meanwhile if not answer.complete])


@pytest.mark.req("RT-40")
def test_the_parts_go_in_turn_and_no_request_with_them(system: System, sturdy: None, phases: Phases, report: Write) -> None:
    cluster, times = system.cluster, dict[str, tuple[float, float]]()
    engines = restarts(cluster)
    with clients(system.url, NAME, CLIENTS, TOKENS) as asking:
        for name, strike in BLOWS.items():
            with phases(f"{name} → all there and answering"):
                began = time.monotonic()
                strike(system)
                recovered = time.monotonic()
                eventually(lambda after=recovered: expect_answers(asking, after), seconds=120)
            times[name] = (began, time.monotonic())
        assert restarts(cluster) == engines, "an engine was restarted"
        with phases("the operator judges again"):
            patch = json.dumps({"spec": {"routing": {"policy": "LeastRequest"}}})
            cluster.kubectl("patch", models.KIND, NAME, f"--namespace={WHERE}", "--type=merge", f"--patch={patch}")
            eventually(lambda: models.conditions(cluster, WHERE, NAME), seconds=120)
    answers = answers_of(asking)
    for name, (began, over) in times.items():
        report("         {1:3d} requests, {2} lost: {0}".format(name, *lost(answers, began, over)))
    expect_no_loss(answers, TOKENS)


def restarts(cluster: Cluster) -> dict[str, int]:
    """How often the engines have been restarted, by their pods' UIDs."""
    found = models.ready_pods(cluster, WHERE, NAME, REPLICAS)
    return {uid: pod["status"]["containerStatuses"][0]["restartCount"] for uid, pod in found.items()}


@pytest.mark.req("RT-40")
def test_a_killed_envoy_takes_only_its_own_requests_along(system: System, sturdy: None, phases: Phases, report: Write) -> None:
    doomed, other = eventually(lambda: [pod for pod in system.pods(ENVOY) if expect_ready(system, ENVOY)])

    def of(pod: Object) -> str:
        return f"http://{pod['status']['podIP']}:8080"

    with clients(of(other), NAME, 2, TOKENS) as spared, clients(of(doomed), NAME, 2, TOKENS) as hit:
        for client in spared:
            eventually(lambda client=client: expect_streaming(client))
        (envoy,) = children_of(process_of(doomed))
        eventually(lambda: expect_half_to_come(hit))
        struck = time.monotonic()
        with phases("Envoy, SIGKILL → back and answering"):
            os.kill(envoy, signal.SIGKILL)
            eventually(lambda: expect_answers(hit, after=struck), seconds=120)
    answers = answers_of(hit)
    failed = [answer for answer in answers if not answer.complete]
    broken = [answer for answer in failed if answer.started < struck]
    refused = len(failed) - len(broken)
    report(
        f"         {len(answers)} requests, {len(broken)} lost, {refused} connections refused until it was back: Envoy, SIGKILL"
    )
    assert 0 < len(broken) <= len(hit), "each client has one request at a time"
    assert all(answer.retryable for answer in failed), failed
    expect_no_loss(answers_of(spared), TOKENS)


def expect_streaming(client: Client) -> str:
    """Who streams to it, once some of the answer is there."""
    assert client.received > 2
    return client.replica


def expect_half_to_come(asking: list[Client]) -> None:
    """All of them stream, and will for a while."""
    for client in asking:
        expect_streaming(client)
        assert client.received < TOKENS // 2


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.req("DR-07")
def test_a_drained_node_takes_no_request_along(system: System, sturdy: None, phases: Phases, report: Write) -> None:
    """All that runs there moves: engines one at a time, as their budget says, an operator, a gateway and an Envoy."""
    cluster = system.cluster
    before = eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS))
    assert {pod["spec"]["nodeName"] for pod in before.values()} == {"node-2"}
    first, second = (pod["metadata"]["name"] for pod in before.values())
    try:
        with clients(system.url, NAME, CLIENTS, TOKENS) as asking:
            for client in asking:
                eventually(lambda client=client: expect_streaming(client))
            with phases("kubectl drain → all its pods elsewhere"):
                cluster.kubectl("cordon", "node-2")
                evict(cluster, first)
                with pytest.raises(CommandError, match="disruption budget"):
                    evict(cluster, second)
                options = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s"]
                cluster.kubectl("drain", "node-2", *options, timeout=125)
                after = eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS), seconds=120)
            for component in (ENVOY, GATEWAY, OPERATOR):
                eventually(lambda component=component: expect_ready(system, component), seconds=120)
                assert {pod["spec"]["nodeName"] for pod in system.pods(component)} == {"node-1"}
    finally:
        cluster.kubectl("uncordon", "node-2")
    assert not before.keys() & after.keys()
    answers = answers_of(asking)
    report(f"         {len(answers)} requests, {len([it for it in answers if not it.complete])} lost: node drained")
    expect_no_loss(answers, TOKENS)


@pytest.mark.req("DR-07")
def test_the_only_replica_has_a_successor_before_its_node_is_drained(
    system: System, namespace: str, phases: Phases, report: Write
) -> None:
    cluster, name = system.cluster, "lonely"
    lonely = models.small(name, replicas=1, rollout={"surgeBeforeEvict": True})
    with models.applied(cluster, namespace, lonely):
        models.wait_until_ready(cluster, namespace, name)
        before = eventually(lambda: models.ready_pods(cluster, namespace, name, 1), seconds=120)
        (node,) = {pod["spec"]["nodeName"] for pod in before.values()}

        def expect_moving() -> None:
            assert models.conditions(cluster, namespace, name)["Progressing"]["reason"] == "MovingReplica"

        try:
            with clients(system.url, name, CLIENTS, TOKENS) as asking:
                for client in asking:
                    eventually(lambda client=client: expect_streaming(client))
                with phases("the node of the only replica drained → its successor alone"):
                    cluster.kubectl("cordon", node)
                    eventually(expect_moving)
                    options = [f"--pod-selector={labels.MODEL}={name}", "--delete-emptydir-data", "--timeout=120s"]
                    cluster.kubectl("drain", node, *options, timeout=125)
                    after = eventually(lambda: models.ready_pods(cluster, namespace, name, 1), seconds=120)
        finally:
            cluster.kubectl("uncordon", node)
        assert not before.keys() & after.keys()
        assert node not in {pod["spec"]["nodeName"] for pod in after.values()}
        assert cluster.get("deployment", f"{name}-cpu", namespace)["spec"]["replicas"] == 1
    answers = answers_of(asking)
    report(f"         {len(answers)} requests, {len([it for it in answers if not it.complete])} lost: only replica moved")
    expect_no_loss(answers, TOKENS)


def evict(cluster: Cluster, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": WHERE}}
    path = f"/api/v1/namespaces/{WHERE}/pods/{pod}/eviction"
    cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))


@pytest.mark.req("RT-40")
def test_a_lost_node_takes_only_its_own_requests_along(system: System, sturdy: None, phases: Phases, report: Write) -> None:
    cluster, node = system.cluster, "node-3"
    others = eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS))
    with phases("a third replica on a node of its own"), cordoned(cluster, "node-1", "node-2"):
        cluster.add_node(node)  # by now the scheduler has seen that the others are closed
        scale(cluster, REPLICAS + 1)
        every = eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS + 1), seconds=120)
    (victim,) = every.keys() - others.keys()
    assert every[victim]["spec"]["nodeName"] == node
    with clients(system.url, NAME, 2 * CLIENTS, TOKENS) as asking:
        eventually(lambda: expect_streaming_from(asking, victim), seconds=120)
        struck = time.monotonic()
        with phases("a node lost → the model says so"):
            cluster.lose_node(node)
            eventually(lambda: expect_fewer(cluster), seconds=120)
        with phases("its replica ready elsewhere"):
            eventually(lambda: expect_alive(cluster, without=victim), seconds=120)
    answers = answers_of(asking)
    failed = [answer for answer in answers if not answer.complete]
    report(f"         {len(answers)} requests, {len(failed)} lost: node lost")
    assert all(answer.retryable and answer.replica in (victim, "") for answer in failed), failed
    assert all(answer.started < struck + 15 for answer in failed), "a replica that has gone was picked"
    expect_no_loss([answer for answer in answers if answer.complete], TOKENS)
    with phases("the node's object deleted → its pod gone"):
        cluster.kubectl("delete", "node", node)
        # Kubernetes lets orphans be for 40 s, and looks every 20.
        eventually(lambda: models.ready_pods(cluster, WHERE, NAME, REPLICAS + 1), seconds=120)


def scale(cluster: Cluster, replicas: int) -> None:
    cluster.kubectl("scale", f"{models.KIND}/{NAME}", f"--replicas={replicas}", f"--namespace={WHERE}")


def expect_streaming_from(asking: list[Client], replica: str) -> None:
    assert [client for client in asking if client.received > 2 and client.replica == replica]


def expect_fewer(cluster: Cluster) -> None:
    assert cluster.get(models.KIND, NAME, WHERE)["status"]["ready"] == f"{REPLICAS}/{REPLICAS + 1}"


def expect_alive(cluster: Cluster, without: str) -> None:
    """As many replicas as there should be are ready, and one is not among them."""
    there = {uid: pod for uid, pod in models.pods(cluster, WHERE, NAME).items() if "deletionTimestamp" not in pod["metadata"]}
    assert without not in there
    assert len(there) == REPLICAS + 1
    assert cluster.get(models.KIND, NAME, WHERE)["status"]["ready"] == f"{REPLICAS + 1}/{REPLICAS + 1}"
