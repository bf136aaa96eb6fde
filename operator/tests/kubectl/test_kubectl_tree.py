"""`penstock status`: what the tree says of a model, from what the API server has."""

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.operator.kubectl.tree import BAD, GOOD, WAITING, Node, Seen, age, trees

NOW = datetime(2026, 1, 1, 1, 0, tzinfo=UTC)


def lines(node: Node, depth: int = 0) -> list[str]:
    return [" " * depth + node.text, *(line for below in node.below for line in lines(below, depth + 1))]


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "observedGeneration": 1}


def observed(resource: dict[str, Any], *conditions: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**resource, "status": {"observedGeneration": 1, "ready": "1/2", "conditions": list(conditions), **more}}


def workload(revision: str = "r1") -> dict[str, Any]:
    labels = {"penstock.dev/model": "tiny", "penstock.dev/pool": "main", "penstock.dev/revision": revision}
    template = {"metadata": {"labels": labels}}
    return {
        "kind": "Deployment",
        "metadata": {"name": "tiny-main", "namespace": "default", "labels": labels},
        "spec": {"template": template},
    }


def test_a_model_with_everything_below_it(make: Any) -> None:
    model = observed(
        make.resource(),
        condition("Ready", "True", "Serving"),
        condition("Degraded", "False", "AsExpected"),
        condition("ScalingActive", "False", "NotConfigured", "no pool has scaling"),
        url="http://gw/v1",
        pools=[{"name": "main", "ready": "1/2", "updated": 1}],
    )
    pod = make.ready_pod("tiny-main-a")
    pod["spec"] = {"nodeName": "node-1"}
    cordoned = make.ready_pod("tiny-main-b", revision="r0")
    cordoned["metadata"]["annotations"] = {"penstock.dev/cordoned": "true"}
    adapter = {
        "metadata": {"name": "sql", "namespace": "default", "generation": 1},
        "spec": {"served": {"name": "sql"}, "modelRef": {"name": "tiny"}},
        "status": {"observedGeneration": 1, "ready": "1/1", "conditions": [condition("Ready", "True", "Serving")]},
    }
    (tree,) = trees(Seen([model], [adapter], [workload()], [cordoned, pod]), NOW)
    assert lines(tree) == [
        "default/tiny  Serving  1/2 ready  http://gw/v1",
        " served as tiny",
        " pool main  Both  1/2  revision r1",
        "  tiny-main-a  Ready  on node-1  60m",
        "  tiny-main-b  Ready  60m  cordoned  old revision r0",
        " adapter sql  Serving  1/1",
    ]
    assert GOOD in tree.style


def test_what_is_wrong_is_told_once_with_the_pod_that_has_it(make: Any) -> None:
    cause = "pod tiny-main-a cannot be scheduled: 0/2 nodes have nvidia.com/gpu"
    model = observed(
        make.resource(),
        condition("Ready", "False", "Unschedulable", cause),
        condition("Degraded", "True", "Unschedulable", cause),
        condition("Serving", "False", "NoReadyReplica", "no replica takes requests"),
        condition("Routed", "Unknown", "NoGateway", "there is no gateway to ask"),
        condition("Progressing", "True", "Starting", "replicas are starting"),
    )
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes have nvidia.com/gpu"}
    (tree,) = trees(Seen([model], [], [workload()], [make.pod("tiny-main-a", conditions=[scheduled])]), NOW)
    said = lines(tree)
    assert f" Ready=False  Unschedulable: {cause}" in said
    assert not any("Degraded" in line or "Progressing" in line for line in said), said
    assert " Serving=False  NoReadyReplica: no replica takes requests" in said
    assert f"  tiny-main-a  Unschedulable: {cause}  60m" in said
    styles = {node.text.split("=")[0]: node.style for node in tree.below}
    assert (styles["Ready"], styles["Routed"]) == (BAD, WAITING)


@pytest.mark.parametrize("status", [{}, {"status": {"observedGeneration": 1, "ready": "1/1", "conditions": []}}])
def test_a_status_about_an_older_spec_is_called_so(make: Any, status: dict[str, Any]) -> None:
    (tree,) = trees(Seen([{**make.resource(generation=2), **status}]), NOW)
    assert " the operator has not seen generation 2 of it yet" in lines(tree)
    assert WAITING in tree.style
    assert " pool main  Both  0/0  not made yet" in lines(tree)


def test_models_of_the_same_name_keep_their_pods_apart(make: Any) -> None:
    other = make.resource()
    other["metadata"]["namespace"] = "elsewhere"
    both = trees(Seen([other, make.resource()], [], [], [make.pod("pod-of-default")]), NOW)
    assert [node.text.split()[0] for node in both] == ["default/tiny", "elsewhere/tiny"]
    assert ["pod-of-default" in "".join(lines(node)) for node in both] == [True, False]


def test_pods_of_a_pool_that_the_spec_has_no_more_are_shown(make: Any) -> None:
    (tree,) = trees(Seen([make.resource()], [], [], [make.pod("left", pool="gone")]), NOW)
    at = lines(tree).index(" of pools that are no more")
    assert lines(tree)[at + 1].startswith("  left  Starting")


@pytest.mark.parametrize(("since", "said"), [("00:59:30", "30s"), ("00:58:01", "119s"), ("00:50:00", "10m"), ("01:00:30", "0s")])
def test_ages_are_kubectls(since: str, said: str) -> None:
    assert age(f"2026-01-01T{since}Z", NOW) == said
