"""InferenceModels as a user has them: the example, variations of it, and what kubectl says of them."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from safetensors.torch import load_file, save_file

from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.waiting import eventually
from penstock.api import labels

Object = dict[str, Any]
KIND = "inferencemodel"
KINDS = {
    "InferenceModel", "ControllerRevision", "Deployment", "ReplicaSet", "Pod", "Service", "EndpointSlice", "NetworkPolicy",
    "PodDisruptionBudget",
}  # fmt: skip
"""What becomes of a model with more than one replica."""
EXAMPLE = REPOSITORY / "examples/tiny.yaml"
DEMO_MODEL = REPOSITORY / "examples/models/penstock-tiny"


def example() -> Object:
    """examples/tiny.yaml."""
    (resource,) = yaml.safe_load_all(EXAMPLE.read_text())
    return resource


def small(name: str, **spec: Any) -> Object:
    """A pool of one replica with the demo model; `spec` replaces whole fields, or removes them (None)."""
    base: Object = {
        "served": {"name": name},
        "source": {"uri": f"file://{DEMO_MODEL}"},
        "replicas": 1,
        "pools": [{"name": "cpu"}],
        "drainTimeout": "30s",
    }
    fields = {field: value for field, value in (base | spec).items() if value is not None}
    head = {"apiVersion": f"{labels.GROUP}/{labels.VERSION}", "kind": "InferenceModel"}
    return head | {"metadata": {"name": name}, "spec": fields}


def deep(folder: Path, layers: int) -> Path:
    """The demo model with its layers over and over: how long an answer takes is up to the test, not to the machine's mood."""
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(DEMO_MODEL / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    for layer in range(config["num_hidden_layers"], layers):
        weights |= {name.replace(".0.", f".{layer}.", 1): tensor for name, tensor in first.items()}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return folder


def with_source(resource: Object, uri: str) -> Object:
    """The same with other weights."""
    changed = copy.deepcopy(resource)
    changed["spec"]["source"]["uri"] = uri
    return changed


@contextmanager
def applied(cluster: Cluster, namespace: str, *resources: Object) -> Iterator[None]:
    """They are there meanwhile, and their pods are gone afterwards."""
    cluster.apply(*resources, namespace=namespace)
    try:
        yield
    finally:
        names = [f"{KIND}/{resource['metadata']['name']}" for resource in resources]
        cluster.kubectl("delete", *names, f"--namespace={namespace}", "--ignore-not-found")
        for resource in resources:
            eventually(lambda name=resource["metadata"]["name"]: expect_gone(cluster, namespace, name), seconds=120)


def wait_until_ready(cluster: Cluster, namespace: str, name: str, seconds: int = 120) -> None:
    """As a user waits."""
    cluster.kubectl(
        "wait",
        "--for=condition=Ready",
        f"{KIND}/{name}",
        f"--namespace={namespace}",
        f"--timeout={seconds}s",
        timeout=seconds + 5,
    )


def conditions(cluster: Cluster, namespace: str, name: str) -> dict[str, Object]:
    """The conditions by type; those about an older spec are a failure."""
    resource = cluster.get(KIND, name, namespace)
    found = resource.get("status", {}).get("conditions", [])
    assert found, f"{name} has no conditions yet"
    stale = [it["type"] for it in found if it["observedGeneration"] != resource["metadata"]["generation"]]
    assert not stale, f"{stale} are about an older spec"
    return {condition["type"]: condition for condition in found}


def pods(cluster: Cluster, namespace: str, name: str) -> dict[str, Object]:
    """The model's pods by UID."""
    return {pod["metadata"]["uid"]: pod for pod in cluster.list("pods", namespace, f"{labels.MODEL}={name}")}


def ready_pods(cluster: Cluster, namespace: str, name: str, count: int) -> dict[str, Object]:
    """Its pods by UID; fails unless there are exactly so many, all of them ready."""
    found = pods(cluster, namespace, name)
    assert len(found) == count, f"{len(found)} pods, not {count}"
    assert all(_is_ready(pod) for pod in found.values())
    return found


def _is_ready(pod: Object) -> bool:
    return any(it["type"] == "Ready" and it["status"] == "True" for it in pod["status"].get("conditions", []))


def events(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The Events about the model itself."""
    return [event for event in cluster.list("events", namespace) if event["involvedObject"].get("name") == name]


def belongings(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The model itself and everything that was made for it, of KINDS."""
    items = cluster.list(",".join(sorted(KINDS)), namespace)
    return [
        item
        for item in items
        if (item["kind"] == "InferenceModel" and item["metadata"]["name"] == name)
        or item["metadata"].get("labels", {}).get(labels.MODEL) == name
    ]


def expect_gone(cluster: Cluster, namespace: str, name: str) -> None:
    """Fails while anything of the model is left."""
    left = [f"{item['kind']}/{item['metadata']['name']}" for item in belongings(cluster, namespace, name)]
    assert not left, f"{', '.join(left)} are left"


def metric(pod: Object, name: str, *having: str) -> float:
    """The sum of a metric's samples that an engine shows with these labels, each as `name="value"`."""
    lines = httpx.get(f"http://{pod['status']['podIP']}:8000/metrics", timeout=5).text.splitlines()
    found = [line for line in lines if line.startswith(name) and all(label in line for label in having)]
    return sum(float(line.rpartition(" ")[2]) for line in found)
