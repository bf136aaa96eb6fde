"""A model that sleeps and wakes by its requests, and whose replicas go when they are the least loss: engines that compute."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import models
from e2e.cluster.phases import Phases
from e2e.system import NAMESPACE, System
from e2e.traffic import Client, answers_of, clients, expect_no_loss
from e2e.waiting import eventually

NAME = "sleeper"
ASKING = 3  # clients: of two replicas one has fewer of them
SHORT, LONG = 40, 2000  # tokens; with so many layers the latter takes several times the deadline below
LAYERS = 32
DEADLINE = 2  # seconds that a replica has to finish
COLD_START = 60.0


def change(system: System, namespace: str, patch: object) -> None:
    there = (f"--namespace={namespace}", "--type=merge", f"--patch={json.dumps(patch)}")
    system.cluster.kubectl("patch", models.KIND, NAME, *there)


def pool(**scaling: object) -> dict[str, object]:
    return {"name": "cpu", "scaling": {"downWindow": "1s", **scaling}}


@pytest.mark.req("SC-15", "DR-09", "DR-12")
def test_to_zero_and_back_and_a_shrink_that_costs_least(system: System, namespace: str, tmp_path: Path, phases: Phases) -> None:
    cluster = system.cluster
    source = {"uri": f"file://{models.deep(tmp_path / 'deep', LAYERS)}"}
    assert not [it for it in cluster.list("services", NAMESPACE) if "prometheus" in it["metadata"]["name"]]

    def ready(count: int) -> Callable[[], dict[str, models.Object]]:
        return lambda: models.ready_pods(cluster, namespace, NAME, count)

    asleep = pool(min=0, max=2, scaleToZeroAfter="1s")
    model = models.small(NAME, source=source, replicas=None, drainTimeout="2m", pools=[asleep])
    with models.applied(cluster, namespace, model):
        with phases("applied, nobody asks → no replica"):
            eventually(ready(0), seconds=120)
            eventually(lambda: _routed(system), seconds=120)
        with phases("held requests → all answered"), clients(system.url, NAME, ASKING, SHORT) as held:
            began = time.monotonic()
            eventually(lambda: _answers(held), seconds=COLD_START)
            first = time.monotonic() - began
        expect_no_loss(answers_of(held), SHORT)
        with phases(f"(first of them after {first:.1f} s) nobody asks → no replica again"):
            eventually(ready(0), seconds=120)

        change(system, namespace, {"spec": {"pools": [pool(min=2, max=2)]}})
        with phases("at least two → two replicas ready"):
            eventually(ready(2), seconds=120)
        _a_shrink_costs_least(system, namespace, phases)
        with phases("a shorter deadline, the replica replaced"):
            (old,) = ready(1)()
            change(system, namespace, {"spec": {"drainTimeout": f"{DEADLINE}s"}})
            (new,) = eventually(lambda: _others(ready(1)(), old), seconds=120)
        _a_deadline_ends_what_is_under_way(system, namespace, ready(1)()[new]["metadata"]["name"], phases)


def _routed(system: System) -> None:
    assert NAME in [model.id for model in system.openai().models.list()]


def _answers(asking: list[Client]) -> None:
    assert all(client.answers for client in asking)


def _others(found: dict[str, models.Object], old: str) -> list[str]:
    assert old not in found
    return list(found)


def _streams(asking: list[Client]) -> list[str]:
    """The replica that streams to each."""
    assert all(client.received > 2 and client.replica for client in asking)
    return [client.replica for client in asking]


def _a_shrink_costs_least(system: System, namespace: str, phases: Phases) -> None:
    """The replica that answers fewer requests goes, once they have been answered."""
    cluster = system.cluster

    def victim() -> str:
        pods = models.pods(cluster, namespace, NAME)
        going = [uid for uid, pod in pods.items() if "deletionTimestamp" in pod["metadata"]]
        assert len(going) == 1, going
        assert pods[going[0]]["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "-1000"
        return going[0]

    with clients(system.url, NAME, ASKING, LONG) as asking:
        streams = eventually(lambda: _streams(asking), seconds=120)
        assert len(set(streams)) == 2, "the picker gave all requests to one replica"
        least = min(set(streams), key=streams.count)
        for client in asking:
            client.finish()  # what follows is about these answers
        with phases("at most one, while both answer → the one with fewer requests is told to go"):
            change(system, namespace, {"spec": {"pools": [pool(min=1, max=1)]}})
            gone = eventually(victim, seconds=120)
        under_way = time.monotonic()
    assert gone == least, streams
    answers = answers_of(asking)
    expect_no_loss(answers, LONG)
    assert [answer for answer in answers if answer.replica == gone and answer.ended > under_way], "nothing was under way"
    with phases("its answers complete → gone"):
        eventually(lambda: models.ready_pods(cluster, namespace, NAME, 1), seconds=120)


def _a_deadline_ends_what_is_under_way(system: System, namespace: str, name: str, phases: Phases) -> None:
    with clients(system.url, NAME, ASKING, LONG) as asking:
        eventually(lambda: _streams(asking), seconds=120)
        for client in asking:
            client.finish()
        with phases(f"a replica with a deadline of {DEADLINE} s deleted → its answers have failed"):
            deleted = time.monotonic()
            system.cluster.kubectl("delete", "pod", name, f"--namespace={namespace}", "--wait=false")
            for client in asking:
                client.join(timeout=60)
    answers = answers_of(asking)
    assert [answer for answer in answers if answer.complete] == [], "an answer was shorter than the deadline"
    for answer in answers:
        assert answer.retryable, answer
        assert deleted + DEADLINE * 0.9 < answer.ended, "it was not let finish for as long as it might"
