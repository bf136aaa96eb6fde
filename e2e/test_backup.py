"""The custom resources are the whole backup: what is read of them by one command brings everything back."""

from pathlib import Path
from typing import Any

from e2e import adapters, models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually

Object = dict[str, Any]
KINDS = "inferencemodels,loraadapters"
MODEL, ADAPTER = "kept", "kept-sql"


def kept(cluster: Cluster, namespace: str) -> list[Object]:
    """What a restored resource must be equal in; the one annotation is what `kubectl apply` itself was given last."""
    found: list[Object] = []
    for item in cluster.list(KINDS, namespace):
        metadata = item["metadata"]
        metadata["annotations"].pop("kubectl.kubernetes.io/last-applied-configuration")
        found.append(
            {"kind": item["kind"], "spec": item["spec"]} | {it: metadata.get(it) for it in ("name", "labels", "annotations")}
        )
    return found


def expect_served(system: System, namespace: str) -> str:
    ready, conditions = adapters.told(system.cluster, namespace, ADAPTER)
    assert (ready, conditions["Ready"]["status"]) == ("1/1", "True"), conditions
    asked = system.openai().completions.create(model=ADAPTER, prompt="What does json.loads do?", max_tokens=8, temperature=0)
    return asked.choices[0].text


def expect_no_namespace_going(cluster: Cluster) -> None:
    """What is in a namespace that goes cannot be brought back into it."""
    going = [it["metadata"]["name"] for it in cluster.list("namespaces") if "deletionTimestamp" in it["metadata"]]
    assert not going, going


def test_what_one_command_reads_brings_models_and_adapters_back(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster, here = system.cluster, f"--namespace={namespace}"
    uri = f"file://{adapters.make(tmp_path / 'sql')}"
    lora = {"slots": 1, "sources": [{"prefix": f"file://{tmp_path}"}]}
    model = models.small(MODEL, lora=lora, routing={"policy": "Random"}, served={"name": MODEL, "aliases": ["old-name"]})
    model["metadata"] |= {"labels": {"team": "a"}, "annotations": {"example.com/owner": "a team"}}
    with models.applied(cluster, namespace, model):
        cluster.apply(adapters.resource(MODEL, ADAPTER, uri), namespace=namespace)
        with phases("model and adapter applied → served"):
            models.wait_until_ready(cluster, namespace, MODEL)
            said = eventually(lambda: expect_served(system, namespace), seconds=120)
        before = kept(cluster, namespace)
        uids = [it["metadata"]["uid"] for it in cluster.list(KINDS, namespace)]
        eventually(lambda: expect_no_namespace_going(cluster), seconds=120)
        backup = cluster.kubectl("get", KINDS, "--all-namespaces", "--output=yaml")

        with phases("all of it deleted"):
            cluster.kubectl("delete", KINDS, "--all", here)
            eventually(lambda: models.expect_gone(cluster, namespace, MODEL), seconds=120)
        with phases("the backup applied → served as before"):
            cluster.kubectl("apply", "--filename=-", stdin=backup)
            models.wait_until_ready(cluster, namespace, MODEL)
            assert eventually(lambda: expect_served(system, namespace), seconds=120) == said
        assert kept(cluster, namespace) == before
        assert not set(uids) & {it["metadata"]["uid"] for it in cluster.list(KINDS, namespace)}
        cluster.kubectl("delete", adapters.KIND, ADAPTER, here)
