"""Every file of examples/ on a real API server, and the operator's word on its models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import models
from e2e.cluster import build, crds
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually

EXAMPLES = sorted(REPOSITORY.glob("examples/*.yaml"))
FOREIGN = (crds.INFERENCE_POOLS, crds.HTTP_ROUTES, crds.SCALED_OBJECTS)
OURS = ("inferencemodels", "loraadapters")
Object = dict[str, Any]


@pytest.fixture(scope="module")
def foreign_kinds(cluster: Cluster, phases: Phases) -> Iterator[None]:
    """The CRDs of the other projects whose kinds the examples have."""
    paths = [f"--filename={crds.place(build.programs_folder(), source)}" for source in FOREIGN]
    with phases("CRDs of KEDA and the Gateway API installed"):
        cluster.kubectl("apply", "--server-side", *paths)
        cluster.await_crds(*paths)
    yield
    cluster.kubectl("delete", *paths, "--wait=false")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_api_server_takes_it(cluster: Cluster, foreign_kinds: None, namespace: str, path: Path) -> None:
    """All of its fields: nothing in it is unknown to the kinds' schemas, and none of their rules is broken."""
    objects = inside(namespace, path)
    said = cluster.kubectl(
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        f"--namespace={namespace}",
        "--filename=-",
        stdin=yaml.safe_dump_all(objects),
    )
    assert len(said.splitlines()) == len(objects), said


def inside(namespace: str, path: Path) -> list[Object]:
    """The objects of an example, in a namespace of the test's own."""
    objects = list(yaml.safe_load_all(path.read_text()))
    for it in objects:
        it["metadata"]["namespace"] = namespace
    return objects


def test_the_operator_accepts_every_model_and_adapter(system: System, namespace: str) -> None:
    """All of them in one namespace. What they then lack here (the Hub, a bucket, GPUs) is not this test's."""
    cluster = system.cluster
    applied = [it for path in EXAMPLES for it in inside(namespace, path) if it["apiVersion"] == models.example()["apiVersion"]]
    cluster.apply(*applied, namespace=namespace)

    def accepted() -> None:
        found = {
            it["metadata"]["name"]: {condition["type"]: condition for condition in it.get("status", {}).get("conditions", [])}
            for it in cluster.list(",".join(OURS), namespace)
        }
        assert len(found) == len(applied)
        told = {name: conditions.get("Accepted", {}) for name, conditions in found.items()}
        assert {name: it for name, it in told.items() if it.get("status") != "True"} == {}

    try:
        eventually(accepted, seconds=60)
    finally:  # before what is theirs, which would else be made again
        cluster.kubectl("delete", ",".join(OURS), "--all", f"--namespace={namespace}")
