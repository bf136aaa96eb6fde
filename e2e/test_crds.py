"""The CRDs on a real API server: what it refuses and with which words, what it fills in, and what kubectl says of them."""

import json
import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from e2e import models
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.commands import CommandError
from e2e.waiting import eventually
from penstock.api import labels
from penstock.api.resources import InferenceModel, LoraAdapter, crds
from penstock.operator.crd_check import check

Object = dict[str, Any]
API = f"{labels.GROUP}/{labels.VERSION}"
POOL, PREFILL, DECODE = {"name": "a"}, {"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}
HINT = {"start": "0 8 * * 1-5", "duration": "1h", "min": 1}
NIXL = {"connector": {"type": "nixl"}}
BUCKET = {"uri": "s3://pages/small", "size": "1Gi", "secretRef": {"name": "pages"}}


def judged(**judge: Any) -> Object:
    """A canary with a judge."""
    return {"canary": {"of": "other", "weight": 50, "judge": judge}}


def scaled(**scaling: Any) -> Object:
    """The spec's fields for one pool with this scaling."""
    return {"replicas": None, "pools": [{"name": "a", "scaling": {"max": 3, **scaling}}]}


# Each rule of the schemas, broken once: the changed fields of a spec, and the beginning of what is said.
REFUSED_MODELS: dict[str, tuple[Object, str]] = {
    "replicas-scaling": ({"pools": scaled()["pools"]}, "replicas is for a model with one pool and no scaling"),
    "replicas-pools": ({"pools": [POOL, {"name": "b"}]}, "replicas is for a model with one pool and no scaling"),
    "half": ({"replicas": None, "pools": [PREFILL], "engine": NIXL}, "pools: give every pool the role Both"),
    "mixed": ({"replicas": None, "pools": [POOL, PREFILL, DECODE], "engine": NIXL}, "pools: give every pool the role Both"),
    "pages": ({"engine": {"connector": {"type": "offload"}}}, "engine: connector: memory goes with the types offload"),
    "pages-secret": (
        {"engine": {"connector": {"type": "transfer", "memory": "1Gi"}}},
        "engine: connector: secretRef goes with the type transfer",
    ),
    "copies": (
        {"engine": {"connector": {"type": "nixl", "disk": {"size": "1Gi"}}}},
        "engine: connector: disk, store and bucket keep copies of what is in memory",
    ),
    "secrets": (
        {
            "source": {"uri": "s3://models/small", "secretRef": {"name": "models"}},
            "engine": {"connector": {"type": "offload", "memory": "1Gi", "bucket": BUCKET}},
        },
        "engine: connector: bucket: a replica has the credentials of one Secret",
    ),
    "connector": ({"replicas": None, "pools": [PREFILL, DECODE]}, "pools: Prefill and Decode need engine.connector"),
    "canary": ({"canary": {"of": "canary", "weight": 5}}, "canary: of must name another model"),
    "canary-steps": (judged(steps=[10, 60]), "canary: every one of judge.steps must be below weight"),
    "canary-falls": (judged(steps=[20, 10]), "judge: steps must rise"),
    "canary-window": (judged(window="1s"), "judge: window must be from 5s to 24h"),
    "shared-idle": ({"scaling": {"budget": 1}}, "scaling is for pools that the autoscaler sizes"),
    "budget": ({**scaled(min=3), "scaling": {"budget": 2}}, "scaling: budget must pay for the min of every pool"),
    "ratio": ({**scaled(), "scaling": {"prefillPerDecode": {}}}, "scaling.prefillPerDecode is for Prefill and Decode pools"),
    "ratio-bounds": (
        {**scaled(), "scaling": {"prefillPerDecode": {"minPercent": 9, "maxPercent": 8}}},
        "prefillPerDecode: minPercent must not be above maxPercent",
    ),
    "drain": ({"drainTimeout": "25h"}, "drainTimeout must be from 0s to 24h"),
    "uri": ({"source": {"uri": "ftp://host/model"}}, "source: uri must be an absolute path or begin with hf://"),
    "secret": ({"source": {"uri": "/m", "secretRef": {"name": "s"}}}, "source: secretRef is for hf:// and s3://; remove it"),
    "cache": (
        {"source": {"uri": "/m", "cache": {"type": "PVC", "claimName": "c"}}},
        "source: cache is for hf:// and s3://; remove it",
    ),
    "cache-kind": (
        {"source": {"uri": "hf://a/b", "cache": {"type": "Node", "size": "1Gi"}}},
        "source: cache: type PVC needs either claimName",
    ),
    "image": ({"source": {"uri": "oci://models"}}, "source: oci:// must be followed by the reference of an image"),
    "device-claim": ({"pools": [{"name": "a", "resourceClaims": [{"name": "gpu"}]}]}, "resourceClaims: name either a template"),
    "claim": ({"source": {"uri": "pvc:///m"}}, "source: pvc:// must be followed by a claim's name"),
    "owned-flag": ({"engine": {"extraArgs": ["--port", "1"]}}, "engine: extraArgs may not set --host, --port"),
    "typed-flag": ({"engine": {"extraArgs": ["--dtype=auto"]}}, "engine: extraArgs may not set what has a field"),
    "memory-twice": (
        {"engine": {"limits": {"memoryPercent": 9}, "extraArgs": ["--kv-cache-memory-bytes=1"]}},
        "engine: limits.memoryPercent, and --kv-cache-memory-bytes",
    ),
    "slots": ({"lora": {"slots": 8, "cpuSlots": 4}}, "lora: cpuSlots must not be below slots"),
    "prefix": ({"lora": {"sources": [{"prefix": "team"}]}}, "lora: sources: prefix must be an absolute path"),
    "prefix-secret": ({"lora": {"sources": [{"prefix": "/a", "secretRef": {"name": "s"}}]}}, "lora: sources: secretRef is for"),
    "drafter": ({"engine": {"speculative": {"method": "eagle3"}}}, "engine: speculative: model goes with the methods"),
    "drafter-uri": (
        {"engine": {"speculative": {"method": "eagle", "model": "s3://b/head"}}},
        "engine: speculative: model must be an absolute path",
    ),
    "experts": ({"pools": [{"name": "a", "parallelism": {"expert": {"redundant": 1}}}]}, "parallelism.expert: redundant needs"),
    "moving experts": ({"pools": [{"name": "a", "parallelism": {"expert": {"eplb": {}}}}]}, "parallelism.expert: eplb needs"),
    "nodes": (
        {"pools": [{"name": "a", "parallelism": {"tensor": 3, "nodes": 2}}]},
        "parallelism: nodes must divide data, the cores",
    ),
    "device-nodes": (
        {"pools": [{"name": "a", "parallelism": {"tensor": 2, "nodes": 2}, "accelerator": {"resource": "nvidia.com/gpu"}}]},
        "parallelism.nodes is for pools without devices",
    ),
    "min-max": (scaled(min=4), "scaling: min must not be above max"),
    "warm": (scaled(warm=4), "scaling: warm must not be above max"),
    "zero": (scaled(min=0), "scaling: min 0 and scaleToZeroAfter go together"),
    "never-zero": (scaled(scaleToZeroAfter="5m"), "scaling: min 0 and scaleToZeroAfter go together"),
    "down-window": (scaled(downWindow="25h"), "scaling: downWindow must be from 0s to 24h"),
    "zero-after": (scaled(min=0, scaleToZeroAfter="169h"), "scaling: scaleToZeroAfter must be from 1s to 168h"),
    "no-goal": (scaled(slo={}), "slo: name a goal"),
    "ttft": (scaled(slo={"ttft": "2h"}), "slo: ttft must be from 1ms to 1h"),
    "itl": (scaled(slo={"itl": "0s"}), "slo: itl must be from 1ms to 1m"),
    "hint": (scaled(schedule=[{**HINT, "duration": "200h"}]), "schedule: duration must be from 1m to 168h"),
    "range": (scaled(schedule=[{**HINT, "start": "0 8 * * 5-1"}]), "schedule: a range in start must not end before it begins"),
    "zone": (scaled(schedule=[{**HINT, "timeZone": "Mars/Olympus"}]), "schedule: timeZone must be a name of the tz database"),
    "hold": ({"routing": {"holdTimeout": "2h"}}, "routing: holdTimeout must be from 0s to 1h"),
    "pace": ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "rollout: maxSurge and maxUnavailable must not both be 0"),
    "growth": (scaled(growth={"period": "2h"}), "growth: period must be from 1s to 1h"),
    "cold-start": (scaled(coldStart="2h"), "scaling: coldStart must be from 1s to 1h"),
    "deadline": ({"rollout": {"progressDeadline": "1s"}}, "rollout: progressDeadline must be from 10s to 24h"),
    "long-" + "n" * 40: ({}, "metadata.name must have at most 40 characters"),
}
REFUSED_ADAPTERS: dict[str, tuple[Object, str]] = {
    "adapter-uri": ({"uri": "team/sql"}, "source: uri must be an absolute path or begin with hf://"),
    "adapter-up": ({"uri": "s3://team-a/../team-b/sql"}, "source: uri may not lead upwards by '..'"),
}
UNCHANGEABLE = {"role cannot change", "modelRef cannot change"}
# Rules that no one sentence of ours states: the schema's own words.
REFUSED_BY_SCHEMA: dict[str, tuple[Object, str]] = {
    "pool-twice": ({"replicas": None, "pools": [POOL, POOL]}, "spec.pools[1]: Duplicate value"),
    "no-pool": ({"replicas": None, "pools": []}, "spec.pools in body should have at least 1 items"),
    "many-pools": ({"replicas": None, "pools": [{"name": f"p{n}"} for n in range(9)]}, "spec.pools: Too many: 9"),
    "word": ({"drainTimeout": "2 minutes"}, "spec.drainTimeout in body should match"),
    "type": ({"replicas": "two"}, 'spec.replicas in body must be of type integer: "string"'),
    "enum": ({"routing": {"policy": "Best"}}, "spec.routing.policy: Unsupported value"),
    "many": ({"engine": {"limits": {"blockSize": 2048}}}, "blockSize in body should be less than or equal to 1024"),
}


def adapter(name: str, model: str = "m", uri: str = "s3://team-a/sql") -> Object:
    spec = {"modelRef": {"name": model}, "served": {"name": name}, "source": {"uri": uri}}
    return {"apiVersion": API, "kind": "LoraAdapter", "metadata": {"name": name}, "spec": spec}


def refusals(cluster: Cluster, *resources: Object) -> str:
    """What the API server says of resources that it refuses, all of them in one go; nothing is kept."""
    with pytest.raises(CommandError) as refusal:
        dry_run(cluster, *resources)
    return str(refusal.value)


def dry_run(cluster: Cluster, *resources: Object) -> str:
    return cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump_all(resources))


@pytest.mark.req("XC-02")
def test_each_rule_refuses_with_a_sentence_that_says_what_to_do(cluster: Cluster) -> None:
    """By the API server, and with the same words where there is none."""
    cases = {name: (models.small(name, **fields), words) for name, (fields, words) in REFUSED_MODELS.items()}
    cases |= {name: (adapter(name, **fields), words) for name, (fields, words) in REFUSED_ADAPTERS.items()}
    said = refusals(cluster, *(resource for resource, _ in cases.values()))
    by_name = dict(re.findall(r'\.penstock\.dev "([^"]+)" is invalid: (.*)', said))
    assert set(by_name) == set(cases)
    for name, (resource, words) in cases.items():
        assert words in by_name[name], f"{name}: {by_name[name]}"
        with pytest.raises(ValueError, match=re.escape(words)):
            (InferenceModel if resource["kind"] == "InferenceModel" else LoraAdapter).parse(resource)
    for message in rules():
        shown = any(message.startswith(words) for _, words in cases.values())
        assert shown or any(message.startswith(words) for words in UNCHANGEABLE), f"no case breaks the rule: {message}"


def test_both_forms_of_the_rules_agree(cluster: Cluster) -> None:
    """On specs at random, the API server takes what the classes take."""
    random = Random(20261121)
    resources = [models.small(f"random-{number}", **chosen(random)) for number in range(150)]
    said = refusals(cluster, *resources)
    by_server = {resource["metadata"]["name"] for resource in resources if f'"{resource["metadata"]["name"]}" is inv' in said}
    by_classes = {resource["metadata"]["name"] for resource in resources if not parses(resource)}
    assert by_server == by_classes
    assert 30 < len(by_server) < 120, "a draw that shows little"


def chosen(random: Random) -> Object:
    """Fields of a spec, mostly fine, and some of them at or near a bound that a rule has."""

    def some(*values: Any) -> Any:
        return random.choice(values)

    def duration(fine: str) -> str:
        return some(fine, fine, fine, "0s", "1ms", "999ms", "9s", "10s", "59m60s", "1h1ms", "24h", "24h1s", "168h", "999999h")

    def scaling() -> Object:
        low = some(0, 1, 1, 2)
        zero = {"scaleToZeroAfter": duration("10m")} if low == 0 or random.random() < 0.05 else {}
        hint = {
            "start": some("0 8 * * *", "*/5 0-23/2,7 1,15 * 0,7", "0 24 * * *", "9-8 * * * *"),
            "duration": duration("1h"),
            "min": 1,
            "timeZone": some("UTC", "Asia/Tokyo", "No/Where"),
        }
        more = [{"warm": some(0, 2, 3)}, {"downWindow": duration("5m")}, {"slo": {"itl": duration("1s")}}, {"schedule": [hint]}]
        return {"min": low, "max": some(1, 2, 2, 2), **zero, **some({}, *more)}

    roles = some(["Both"], ["Both"], ["Both", "Both"], ["Prefill", "Decode"], ["Both", "Decode"])
    apart = roles == ["Prefill", "Decode"] and random.random() < 0.8
    extra = {"extraArgs": [some("--seed=1", "--hash-seed=--port", "--devices", "--port", "--dtype=x", "--device")]}
    sized = random.random() < 0.6
    shared = some({"budget": some(1, 2, 5, 9)}, {"prefillPerDecode": {"minPercent": 2}}) if random.random() < 0.2 else None
    return {
        "replicas": some(0, 2) if (len(roles) == 1 and not sized) or random.random() < 0.05 else None,
        "pools": [
            {"name": f"p{n}", "role": role, "cost": some(1, 3), **({"scaling": scaling()} if sized else {})}
            for n, role in enumerate(roles)
        ],
        "engine": NIXL if apart else some({}, extra),
        "scaling": shared,
        "drainTimeout": duration("60s"),
    }


def parses(resource: Object) -> bool:
    try:
        InferenceModel.parse(resource)
    except ValidationError:
        return False
    return True


def rules() -> Iterator[str]:
    """The messages of all rules in the schemas."""
    for crd in crds():
        text = json.dumps(crd["spec"]["versions"][0]["schema"])
        yield from (json.loads(f'"{found}"') for found in re.findall(r'"message": "((?:[^"\\]|\\.)*)"', text))


def test_bounds_and_types_refuse(cluster: Cluster) -> None:
    cases = {name: (models.small(name, **fields), words) for name, (fields, words) in REFUSED_BY_SCHEMA.items()}
    said = refusals(cluster, *(resource for resource, _ in cases.values()))
    for name, (resource, words) in cases.items():
        assert words in said, name
        with pytest.raises(ValidationError):
            InferenceModel.parse(resource)
    assert 'unknown field "spec.replica"' in refusals(cluster, models.small("unknown", replica=2))


def test_defaults_are_filled_in_and_mean_the_same(cluster: Cluster) -> None:
    base = {"replicas": None, "drainTimeout": None, "pools": [{"name": "a", "scaling": {"max": 2, "schedule": [HINT]}}]}
    given = models.small("defaults", **base, routing={}, rollout={}, engine={}, lora={})
    kept = cluster.kubectl("create", "--dry-run=server", "--filename=-", "--output=json", stdin=yaml.safe_dump(given))
    spec = json.loads(kept)["spec"]
    assert spec["drainTimeout"] == "120s"
    assert spec["routing"] == {"policy": "Cost", "priority": 0, "holdTimeout": "5m"}
    pace = {"maxSurge": 1, "maxUnavailable": 0}
    later = {"paused": False, "allowDowntime": False, "surgeBeforeEvict": False, "progressDeadline": "30m"}
    assert spec["rollout"] == later | pace
    assert spec["lora"] == {"slots": 4, "maxRank": 16}
    (pool,) = spec["pools"]
    assert (pool["role"], pool["cost"]) == ("Both", 1)
    times = {"downWindow": "5m", "coldStart": "30s", "schedule": [{**HINT, "timeZone": "UTC"}]}
    assert pool["scaling"] == {"mode": "Auto", "min": 1, "max": 2, **times}
    assert InferenceModel.parse(json.loads(kept)).spec == InferenceModel.parse(given).spec


def test_every_field_is_taken_together(cluster: Cluster) -> None:
    everything = yaml.safe_load((REPOSITORY / "docs/operator/everything.yaml").read_text())
    del everything["metadata"]["namespace"]
    assert "created" in dry_run(cluster, everything)
    InferenceModel.parse(everything)


def test_what_cannot_change_stays(cluster: Cluster, namespace: str) -> None:
    model = models.small("m", replicas=None, pools=[PREFILL, DECODE], engine=NIXL)
    cluster.apply(model, adapter("sql"), namespace=namespace)
    model["spec"]["pools"] = [{**PREFILL, "role": "Decode"}, {**DECODE, "role": "Prefill"}]
    for changed, words in ((model, "role cannot change"), (adapter("sql", model="other"), "modelRef cannot change: delete the")):
        with pytest.raises(CommandError) as refusal:
            cluster.apply(changed, namespace=namespace)
        assert words in str(refusal.value)
    model["spec"]["pools"] = [PREFILL, {**DECODE, "name": "other"}]  # a pool may go and another come
    cluster.apply(model, adapter("sql", uri="s3://team-a/sql2"), namespace=namespace)
    heads = cluster.kubectl("get", "im,la", f"--namespace={namespace}", "--output=wide")
    for column in ("MODEL", "STATUS", "SOURCE", "MESSAGE", "BASE"):
        assert column in heads


def test_one_version_is_stored_and_every_field_explained(cluster: Cluster) -> None:
    for crd in crds():
        live = cluster.get("crd", crd["metadata"]["name"])
        assert live["status"]["storedVersions"] == [labels.VERSION]
        found = {it["type"]: it["status"] for it in live["status"]["conditions"]}
        assert found["Established"] == "True" and found.get("NonStructuralSchema", "False") == "False"

    assert check(None, str(cluster.kubeconfig)) == []

    def published() -> Object:
        return json.loads(cluster.kubectl("get", "--raw", f"/openapi/v3/apis/{API}"))["components"]["schemas"]

    schemas = eventually(published)
    for kind in ("InferenceModel", "LoraAdapter"):
        (schema,) = (it for name, it in schemas.items() if name.endswith(f".{kind}"))
        told = dict(fields(schema, kind))
        assert f"{kind}.spec.source.uri" in told
        silent = [path for path, node in told.items() if not node.get("description")]
        assert not silent, f"kubectl explain has nothing to say of {silent}"
    said = eventually(lambda: cluster.kubectl("explain", "im.spec.pools.scaling.max"))  # kubectl may not know the new type yet
    assert "Never more replicas." in said


def fields(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All fields of a schema with their paths."""
    for name, child in schema.get("properties", {}).items():
        if name != "metadata" or path.count("."):  # what is in it is Kubernetes' own
            yield f"{path}.{name}", child
            yield from fields(child.get("items", child), f"{path}.{name}")
