"""No dead fields: each one of the schema reaches an engine, the gateway or the autoscaler, or is refused by name."""

import copy
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from penstock.api import fleet, labels
from penstock.api.resources import InferenceModel, crds, unsupported
from penstock.gateway.discovery.objects import fleet_of
from penstock.operator.api import WORKLOADS
from penstock.operator.desired import Rendering, children, revision_of
from penstock.operator.desired.source import Fetched, cache_claim, fetch_job, on_node
from penstock.operator.local.models import local_model
from penstock.operator.rollout.pace import Step, step

Object = dict[str, Any]

EVERYTHING = yaml.safe_load((Path(__file__).parents[2] / "docs/operator/everything.yaml").read_text())


def bent(whole: Object, **spec: Any) -> Object:
    """`whole` with other fields in its spec; None removes one."""
    changed = copy.deepcopy(whole)
    changed["spec"] = {key: value for key, value in (changed["spec"] | spec).items() if value is not None}
    return changed


# One pool, and weights that a Job brings.
WHOLE = bent(
    EVERYTHING,
    source={**EVERYTHING["spec"]["source"], "uri": "hf://org/llama", "revision": "main"},
    pools=[{**EVERYTHING["spec"]["pools"][0], "name": "main", "role": "Both"}],
    scaling={"budget": 1600},
)

# Values for fields of which no other can be made up by the schema alone.
OTHER: Object = {
    "spec.served.aliases[]": "other",
    "spec.source.uri": "hf://org/other",
    "spec.source.cache.size": "2Gi",
    "spec.lora.sources[].prefix": "s3://team-b/",
    "spec.engine.extraArgs[]": "--seed=2",
    "spec.engine.quantization.weights": "other",
    "spec.engine.speculative.method": "eagle",
    "spec.engine.speculative.model": "hf://org/head",
    "spec.pools[].scaling.slo.itl": "50ms",
    "spec.rollout.restartedAt": "2026-02-01T12:00:00Z",
    "spec.pools[].accelerator.resource": "amd.com/gpu",
    "spec.pools[].accelerator.perNode": 4,
    "spec.routing.inferencePool.picker.name": "another",
    "spec.routing.inferencePool.gateway.name": "another",
    "spec.routing.inferencePool.gateway.namespace": "another",
    "spec.pools[].metadata.labels": {"kueue.x-k8s.io/queue-name": "team-b"},
    "spec.pools[].metadata.annotations": {},
    "spec.engine.connector.memory": "9Gi",
    "spec.engine.connector.disk.size": "9Gi",
    "spec.engine.connector.store.uri": "mooncake://other:50051",
    "spec.engine.connector.store.size": "9Gi",
    "spec.engine.connector.bucket.size": "9Gi",
    "spec.rollout.maxSurge": 3,
    "spec.rollout.maxUnavailable": "10%",
    "spec.pools[].template": {"spec": {"nodeSelector": {"gpu": "b200"}}},
    "spec.pools[].scaling.schedule[].start": "0 9 * * *",
    "spec.pools[].scaling.schedule[].timeZone": "UTC",
}

DISAGGREGATED = bent(
    WHOLE,
    pools=[
        {"name": "d", "role": "Decode", "scaling": {"max": 4}},
        {"name": "e", "role": "Decode"},
        {"name": "p", "role": "Prefill"},
    ],
    scaling={"prefillPerDecode": {"minPercent": 10, "maxPercent": 50}},
)
CLAIMED = bent(WHOLE, scaling=None, pools=[{"name": "main", "resourceClaims": [{"name": "nic", "claim": "shared"}]}])
SIZED = bent(WHOLE, source={"uri": "hf://org/llama", "revision": "main", "cache": {"size": "1Gi"}})
# Fields that WHOLE cannot have beside the others.
ELSEWHERE: dict[str, Object] = {
    "spec.pools[].resourceClaims[].claim": CLAIMED,
    "spec.rollout.surgeBeforeEvict": bent(
        WHOLE, replicas=1, scaling=None, pools=[{"name": "main"}], rollout={"surgeBeforeEvict": True}
    ),
    "spec.source.cache.size": SIZED,
    "spec.replicas": bent(WHOLE, replicas=2, scaling=None, pools=[{"name": "main"}]),
    "spec.pools[].scaling.min": bent(WHOLE, pools=[{"name": "main", "scaling": {"min": 1, "max": 4}}]),
    "spec.pools[].role": DISAGGREGATED,
    "spec.engine.connector.memory": DISAGGREGATED,
    "spec.engine.connector.secretRef.name": DISAGGREGATED,
    "spec.pools[].parallelism.expert.enabled": bent(
        WHOLE, scaling=None, pools=[{"name": "main", "parallelism": {"expert": {"enabled": False}}}]
    ),
    "spec.pools[].parallelism.nodes": bent(
        WHOLE, scaling=None, pools=[{"name": "main", "parallelism": {"tensor": 6, "nodes": 2}}]
    ),
    "spec.scaling.prefillPerDecode.minPercent": DISAGGREGATED,
    "spec.scaling.prefillPerDecode.maxPercent": DISAGGREGATED,
}
# Fields of which another value needs the rest of their part to be another, too.
TOGETHER: dict[str, tuple[str, Any]] = {
    "spec.source.cache.type": ("spec.source.cache", {"type": "Node"}),
    "spec.engine.connector.type": ("spec.engine.connector", {"type": "nixl"}),
}
# What takes effect in running replicas, or needs none; every other field makes a new revision (XC-04).
HOT = (
    "spec.source.secretRef.",  # of a model with a cache: its Job's alone
    "spec.source.cache.size",
    "spec.replicas",
    "spec.canary.",
    "spec.routing.",
    "spec.rollout.paused",
    "spec.rollout.allowDowntime",
    "spec.rollout.maxSurge",
    "spec.rollout.maxUnavailable",
    "spec.rollout.surgeBeforeEvict",
    "spec.scaling.",
    "spec.pools[].cost",
    "spec.pools[].scaling.",
    "spec.pools[].metadata.",
)


def leaves(schema: Object, path: str) -> dict[str, Object]:
    """The schema's fields that have no fields of their own, by path."""
    if "items" in schema:
        return leaves(schema["items"], f"{path}[]")
    if "properties" not in schema:
        return {path: schema}
    found: dict[str, Object] = {}
    for name, child in schema["properties"].items():
        found |= leaves(child, f"{path}.{name}")
    return found


(MODEL, ADAPTER) = (crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] for crd in crds())
# Where there is one value only, there is nothing to choose.
FIELDS = {path: schema for path, schema in leaves(MODEL, "spec").items() if len(schema.get("enum", "ab")) > 1}


def place(resource: Object, path: str) -> tuple[Any, Any]:
    """The last container on the way to a field, and the key in it; of lists the first item."""
    keys: list[Any] = []
    for part in path.split("."):
        name, *indices = part.split("[]")
        keys += [name, *(0 for _ in indices)]
    here: Any = resource
    for key in keys[:-1]:
        here = here[key]
    return here, keys[-1]


def another(value: Any, schema: Object) -> Any:
    """A value that the schema allows, other than `value`."""
    if "enum" in schema:
        return next(it for it in reversed(schema["enum"]) if it != value)
    match schema["type"]:
        case "boolean":
            return not value
        case "integer":
            return value + 1 if value < schema["maximum"] else value - 1
        case _:
            return "61s" if schema.get("pattern", "").endswith("(ms|s|m|h))+$") else f"{value}x"


def seen(resource: Object) -> dict[str, Any]:
    """All that becomes of a resource, by who acts on it."""
    model = InferenceModel.parse(resource)
    here = model.spec.source if not on_node(model) else model.spec.source.model_copy(update={"cache": None})
    local = local_model(model.model_copy(update={"spec": model.spec.model_copy(update={"source": here})}))
    job = fetch_job(model, "default/image:1")
    fetched = None if job is None else Fetched(folder=job["metadata"]["name"], version="c0ffee")
    objects = [
        job,
        cache_claim(model, None),
        *children(model, Rendering(image="default/image:1", fetched=fetched, node_cache="/models"), extra={}),
    ]
    return {
        "revisions": [revision_of(it) for it in objects[2:] if it["kind"] in WORKLOADS],
        "objects": objects,
        "rollout": _pace_without_room(model),
        "gateway": msgspec.to_builtins(fleet_of([resource], [])),
        "autoscaler": repr({name: it for name, it in vars(local).items() if name not in ("model", "pools", "deployments")}),
        "local": msgspec.to_builtins([msgspec.structs.replace(local.model, created=0.0), local.pools]),
    }


def _pace_without_room(model: InferenceModel) -> Step:
    """How a rollout goes on whose new replica finds no node."""
    since = "2026-01-01T00:00:00Z"
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": since}
    meta = {"creationTimestamp": since}
    pods = [{"metadata": {**meta, "labels": {labels.REVISION: revision}}} for revision in ("old", "new")]
    pods[1]["status"] = {"conditions": [condition]}
    rollout, workload = model.spec.rollout, {"kind": "Deployment", "spec": {}}
    allowed, paused = rollout.allow_downtime, rollout.paused
    return step(workload, pods, "new", wanted=1, allow_downtime=allowed, paused=paused, now=datetime.now(UTC))


def refused(resource: Object, path: str) -> bool:
    """Whether the operator refuses the field, or what it is in."""
    named = [re.sub(r"\[[^]]+\]", "[]", it.partition(" ")[0]) for it in unsupported(InferenceModel.parse(resource).spec)]
    return any(path == it or path.startswith((f"{it}.", f"{it}[")) for it in named)


def changed(path: str) -> tuple[Object, Object]:
    """A resource, and the same with another value in one field."""
    before = ELSEWHERE.get(path, WHOLE)
    after = copy.deepcopy(before)
    where, value = TOGETHER.get(path, (path, OTHER.get(path)))
    here, key = place(after, where)
    here[key] = another(here[key], FIELDS[path]) if value is None else value
    return before, after


@pytest.mark.req("XC-04")
@pytest.mark.parametrize("path", FIELDS)
def test_each_field_changes_something_or_is_refused_by_name(path: str) -> None:
    before, after = changed(path)
    if refused(after, path):
        return
    assert before != after
    was, now = seen(before), seen(after)
    assert was != now, f"{path} is accepted and changes nothing"
    assert (was["revisions"] == now["revisions"]) is path.startswith(HOT), "whether replicas are replaced"
    if was["gateway"] != now["gateway"]:
        assert was["local"] != now["local"], "the gateway of `penstock up` must see it too"


def test_the_resources_here_have_every_field() -> None:
    for path in FIELDS:
        here, key = place(ELSEWHERE.get(path, WHOLE), path)
        assert here[key] is not None
        InferenceModel.parse(changed(path)[1])


@pytest.mark.parametrize("path", [path for path in leaves(ADAPTER, "spec") if not path.startswith("spec.source")])
def test_each_name_of_an_adapter_reaches_the_gateway(path: str) -> None:
    meta = {"name": "sql", "namespace": "team", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"modelRef": {"name": "llama"}, "served": {"name": "sql", "aliases": ["q"]}, "source": {"uri": "s3://team-a/sql"}}
    before = {"metadata": meta, "spec": spec}
    after = copy.deepcopy(before)
    here, key = place(after, path)
    here[key] = "other"
    views: list[list[fleet.Adapter]] = [fleet_of([WHOLE], [], [it]).adapters for it in (before, after)]
    assert views[0] != views[1]
