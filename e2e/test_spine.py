"""From `kubectl apply` to a streamed token, and what load, drains and crashes do to the requests under way."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import GATEWAY, NAMESPACE, System
from e2e.traffic import Client, answers_of, clients, expect_no_loss
from e2e.waiting import eventually
from penstock.api import headers

NAME = "tiny"
BUSY, STEADY = 12, 3  # clients
LONG, SHORT = 1500, 300  # tokens of an answer; one alone takes seconds even where nothing else runs
LEAST, MOST = 2, 3  # replicas


@pytest.fixture(scope="module")
def tiny(system: System, phases: Phases) -> Iterator[str]:
    """The Kubernetes namespace in which the example runs: applied as it is, then made quicker to scale."""
    cluster, resource = system.cluster, models.example()
    namespace = resource["metadata"]["namespace"]
    with phases("kubectl apply -f examples/tiny.yaml → Ready"):
        cluster.kubectl("apply", f"--filename={models.EXAMPLE}")
        models.wait_until_ready(cluster, namespace, NAME)
    with phases("all its replicas ready"):
        first = eventually(lambda: models.ready_pods(cluster, namespace, NAME, LEAST), seconds=120)
    resource["spec"]["engine"]["limits"]["maxNumSeqs"] = STEADY
    (pool,) = resource["spec"]["pools"]
    pool["scaling"] = {"min": LEAST, "max": MOST, "downWindow": "5s"}

    def expect_all_new() -> None:
        assert not first.keys() & models.ready_pods(cluster, namespace, NAME, LEAST).keys()

    with phases("made quicker to scale, all replicas replaced"):
        cluster.apply(resource, namespace=namespace)
        eventually(expect_all_new, seconds=120)
    yield namespace
    with phases("the example deleted, nothing left"):
        cluster.kubectl("delete", models.KIND, NAME, f"--namespace={namespace}")
        eventually(lambda: models.expect_gone(cluster, namespace, NAME), seconds=120)


@pytest.fixture(scope="module")
def fixed(system: System, tiny: str) -> str:
    """The same, held at its least size: what is lost with a replica is load on the others, which would bring another one."""
    patch = f'[{{"op": "replace", "path": "/spec/pools/0/scaling/max", "value": {LEAST}}}]'
    system.cluster.kubectl("patch", models.KIND, NAME, f"--namespace={tiny}", "--type=json", f"--patch={patch}")
    eventually(lambda: models.ready_pods(system.cluster, tiny, NAME, LEAST), seconds=120)
    return tiny


def streaming(client: Client) -> str:
    """Who streams to it, once some of the answer is there."""
    assert client.received > 2
    return client.replica


def test_openai_client_streams_through_envoy(system: System, tiny: str, phases: Phases) -> None:
    client = system.openai()
    assert [model.id for model in client.models.list()] == [NAME]
    replicas = eventually(lambda: models.ready_pods(system.cluster, tiny, NAME, LEAST))
    question: Any = {"model": NAME, "messages": [{"role": "user", "content": "What does json.loads do?"}], "temperature": 0}
    with phases("one answer, streamed"):
        raw = client.chat.completions.with_raw_response.create(**question, stream=True, max_tokens=100)
        with raw.parse() as stream:
            chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert len(chunks) > 5
    assert re.search("json|JSON|deserialize", text), text
    assert raw.headers[headers.REPLICA] in replicas
    assert headers.LOAD not in raw.headers
    whole = client.chat.completions.create(**question, max_tokens=100)
    assert whole.choices[0].message.content == text
    assert whole.usage and whole.usage.completion_tokens >= len(text.split())


@pytest.mark.req("SC-09", "DR-07")
def test_replica_comes_under_load_and_goes_without_losing_a_request(system: System, tiny: str, phases: Phases) -> None:
    def expect_pods(count: int) -> None:
        models.ready_pods(system.cluster, tiny, NAME, count)

    # One client stays: two would keep both cores of a small machine busy, and give as many tokens a second as all twelve.
    with clients(system.url, NAME, 1, LONG) as steady:
        with clients(system.url, NAME, BUSY - 1, SHORT) as extra, phases("load raised → one more replica ready"):
            eventually(lambda: expect_pods(MOST), seconds=120)
        scaled = system.cluster.get(models.KIND, NAME, tiny)["status"]["scaling"][0]
        assert scaled["desired"] == MOST, scaled
        with phases("load lowered → one replica drained and gone"):
            eventually(lambda: expect_pods(LEAST), seconds=150)
    answers = answers_of(steady)
    expect_no_loss(answers, LONG)
    expect_no_loss(answers_of(extra), SHORT)
    assert len({answer.replica for answer in [*answers, *answers_of(extra)]}) >= MOST
    said = [event for event in models.events(system.cluster, tiny, NAME) if "Scal" in event["reason"]]
    assert len(said) >= 2, "no Events about scaling"


@pytest.mark.req("DR-06", "DR-07")
def test_deleted_replica_finishes_what_it_answers(system: System, fixed: str, phases: Phases) -> None:
    cluster = system.cluster
    before = eventually(lambda: models.ready_pods(cluster, fixed, NAME, LEAST))
    with phases("a replica that answers deleted → gone"), clients(system.url, NAME, STEADY, LONG) as asking:
        replica = eventually(lambda: streaming(asking[0]))
        cluster.kubectl("delete", "pod", before[replica]["metadata"]["name"], f"--namespace={fixed}", "--wait=false")
        deleted = time.monotonic()
        eventually(lambda: expect_replaced(cluster, fixed, replica), seconds=120)
    answers = answers_of(asking)
    expect_no_loss(answers, LONG)
    last = [answer for answer in answers if answer.replica == replica]
    assert any(answer.started < deleted < answer.ended for answer in last), "no answer was under way"
    assert not [answer for answer in last if answer.started > deleted + 5], "a replica that goes was picked"


def expect_replaced(cluster: Cluster, namespace: str, replica: str) -> None:
    assert replica not in models.ready_pods(cluster, namespace, NAME, LEAST)


@pytest.mark.req("DR-07", "XC-04")
def test_rolling_update_loses_no_request(system: System, fixed: str, phases: Phases) -> None:
    cluster = system.cluster
    before = eventually(lambda: models.ready_pods(cluster, fixed, NAME, LEAST))
    patch = f'{{"spec": {{"engine": {{"limits": {{"maxNumSeqs": {STEADY + 1}}}}}}}}}'

    def expect_all_new() -> None:
        assert not before.keys() & models.ready_pods(cluster, fixed, NAME, LEAST).keys()

    with phases("spec changed → all replicas replaced"), clients(system.url, NAME, STEADY, SHORT) as asking:
        cluster.kubectl("patch", models.KIND, NAME, f"--namespace={fixed}", "--type=merge", f"--patch={patch}")
        eventually(expect_all_new, seconds=120)
    expect_no_loss(answers_of(asking), SHORT)


@pytest.mark.req("DR-04", "DR-13", "RT-40")
@pytest.mark.parametrize("part", ["frontend", "core"])
def test_killed_engine_comes_back_and_only_its_own_requests_fail(system: System, fixed: str, phases: Phases, part: str) -> None:
    cluster = system.cluster
    before = eventually(lambda: models.ready_pods(cluster, fixed, NAME, LEAST))

    def back() -> None:
        (now,) = models.pods(cluster, fixed, NAME)[victim]["status"]["containerStatuses"]
        (then,) = before[victim]["status"]["containerStatuses"]
        assert now["ready"] and now["restartCount"] == then["restartCount"] + 1

    with clients(system.url, NAME, 2 * STEADY, SHORT) as asking:
        victim = eventually(lambda: streaming(asking[0]))
        frontend, core = processes(before[victim])
        os.kill(frontend if part == "frontend" else core, signal.SIGKILL)
        killed = time.monotonic()
        with phases(f"an engine's {part} killed → back"):
            eventually(back, seconds=120)
        ready = time.monotonic()
        with phases("that engine ready → answers again"):
            eventually(lambda: expect_served_by(asking, victim, after=ready), seconds=120)
    answers = answers_of(asking)
    failed = [answer for answer in answers if not answer.complete]
    assert failed, "nothing was under way on the killed engine"
    for answer in failed:
        assert answer.retryable, answer
        assert answer.replica in (victim, ""), "a request of another replica failed"
        assert answer.started < killed < answer.ended < killed + 20, "it failed later than the engine"
    expect_no_loss([answer for answer in answers if answer.complete], SHORT)


def expect_served_by(asking: list[Client], replica: str, after: float) -> None:
    answers = [answer for client in asking for answer in client.answers]
    assert [answer for answer in answers if answer.replica == replica and answer.started > after and answer.complete]


def processes(pod: dict[str, Any]) -> tuple[int, int]:
    """The process ids of an engine's frontend, which is its container's first process, and of the core that it started."""
    (container,) = pod["status"]["containerStatuses"]
    frontend = container["containerID"].removeprefix("process://")
    (core,) = Path(f"/proc/{frontend}/task/{frontend}/children").read_text().split()
    return int(frontend), int(core)


def test_killed_gateway_cuts_no_running_answer(system: System, fixed: str, phases: Phases) -> None:
    gateways = [pod["metadata"]["name"] for pod in system.pods(GATEWAY)]
    with clients(system.url, NAME, STEADY, LONG) as asking:
        for client in asking:
            eventually(lambda client=client: streaming(client))
        force = ["--grace-period=0", "--force", "--wait=false"]
        system.cluster.kubectl("delete", "pod", *gateways, f"--namespace={NAMESPACE}", *force)
        killed = time.monotonic()
        with phases("gateway killed → answers again"):
            eventually(lambda: expect_answers(asking, after=killed), seconds=120)
    answers = answers_of(asking)
    running = [answer for answer in answers if answer.started < killed]
    expect_no_loss(running, LONG)
    assert len([answer for answer in running if answer.ended > killed]) == STEADY
    assert all(answer.complete or answer.retryable for answer in answers)


def expect_answers(asking: list[Client], after: float) -> None:
    for client in asking:
        assert [answer for answer in client.answers if answer.started > after and answer.complete]
