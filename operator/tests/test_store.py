"""What the operator keeps of what the API server sends, and who claims which names."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.api import labels
from penstock.operator.pods import argument, is_live, is_ready, revision, trouble
from penstock.operator.store import Key, Resources, key_of, trimmed_child, trimmed_pod


def certificate(pod: dict[str, Any]) -> str | None:
    return argument(pod, "--ssl-certfile")


def whole(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod with what the API server adds."""
    container = {"name": "engine", "image": "i", "args": ["--ssl-certfile=x"], "env": [{"name": str(it)} for it in range(50)]}
    annotations = {
        "penstock.dev/cordoned": "true",
        labels.DELETION_COST: "-1000",
        "k8s.v1.cni.cncf.io/network-status": "[{}]" * 100,
    }
    meta = {
        **pod["metadata"],
        "annotations": annotations,
        "managedFields": [{"manager": "kubelet"}],
        "ownerReferences": [{"uid": "u"}],
    }
    more = {
        "image": "i",
        "imageID": "registry/i@sha256:" + "0" * 64,
        "containerID": "containerd://" + "0" * 64,
        "restartCount": 1,
    }
    status = {
        **pod["status"],
        "conditions": [{**it, "lastProbeTime": None} for it in pod["status"].get("conditions", [])],
        "containerStatuses": [{**it, **more} for it in pod["status"].get("containerStatuses", [])],
        "hostIPs": [{"ip": "1.2.3.4"}],
        "qosClass": "Burstable",
    }
    return {**pod, "apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container]}, "status": status}


def cordoned(pod: dict[str, Any]) -> bool:
    return labels.CORDONED in pod["metadata"].get("annotations", {})


def cheapest(pod: dict[str, Any]) -> bool:
    return labels.DELETION_COST in pod["metadata"].get("annotations", {})


@pytest.mark.parametrize(
    "kind",
    [
        lambda make: make.pod(),
        lambda make: make.ready_pod(),
        lambda make: make.crashed_pod(),
        lambda make: make.crashed_pod(waiting=False, exit_code=137),
        lambda make: make.pod(
            conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]
        ),
        lambda make: {**make.pod(), "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}},
    ],
)
def test_a_trimmed_pod_says_all_that_is_asked_of_it(make: Any, kind: Callable[[Any], dict[str, Any]]) -> None:
    pod = whole(kind(make))
    kept = trimmed_pod(pod)
    for question in (is_live, is_ready, revision, trouble, certificate, cordoned, cheapest):
        assert question(kept) == question(pod), question
    assert trimmed_pod(kept) == kept
    assert not {"containerID", "lastProbeTime", "network-status", "managedFields"} & set(re.findall(r"[\w-]+", str(kept)))
    assert len(str(kept)) < len(str(pod)) / 2


def test_what_pods_have_in_common_is_kept_once(make: Any) -> None:
    first, second = (trimmed_pod(json.loads(json.dumps(whole(make.ready_pod())))) for _ in range(2))
    assert first["spec"]["containers"][0]["args"][0] is second["spec"]["containers"][0]["args"][0]
    assert first["metadata"]["labels"]["penstock.dev/revision"] is second["metadata"]["labels"]["penstock.dev/revision"]
    service = {"metadata": {"name": "s", "managedFields": []}, "spec": {"ports": [{"name": "a-port-of-all"}]}}
    (one,), (other,) = (trimmed_child(json.loads(json.dumps(service)))["spec"]["ports"] for _ in range(2))
    assert one["name"] is other["name"] and one == {"name": "a-port-of-all"}


def test_names_are_claimed_and_given_up(make: Any) -> None:
    resources = Resources()
    first, second = make.resource("first"), make.resource("second", served={"name": "second", "aliases": ["first"]})
    second["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    resources.put(first)
    resources.put(second)
    assert resources.rivals(key_of(first)) == [key_of(second)]
    assert "'first' is served by InferenceModel default/first" in resources.conflict(key_of(second))
    assert not resources.conflict(key_of(first))
    changed = {**second, "metadata": {**second["metadata"], "resourceVersion": "2"}, "spec": make.resource("second")["spec"]}
    resources.put(changed)
    assert not resources.rivals(key_of(first))
    resources.drop(key_of(second))
    resources.drop(key_of(first))
    assert resources.known() == []


def test_an_adapters_claims_are_its_models_rivals_and_found_by_it(make: Any) -> None:
    adapter = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "LoraAdapter",
        "metadata": {**make.resource()["metadata"], "name": "sql", "uid": "uid-sql"},
        "spec": {"served": {"name": "other"}, "source": {"uri": "/adapters/sql"}, "modelRef": {"name": "tiny"}},
    }
    resources = Resources()
    resources.put(adapter)
    model, other = Key("InferenceModel", "default", "tiny"), Key("InferenceModel", "default", "other")
    assert resources.adapters_of(model) == [key_of(adapter)]
    resources.put(make.resource("other"))
    assert not resources.conflict(other), "without the model itself its adapters take no name"
    resources.put(make.resource("tiny"))
    assert other in resources.rivals(model)
    assert resources.rivals(other) == [key_of(adapter)]
    resources.drop(key_of(adapter))
    assert resources.adapters_of(model) == []
