"""InferenceModel and LoraAdapter: what is accepted, what is refused and with which words, and the CRDs made of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api.resources import InferenceModel, LoraAdapter, crds, seconds, unsupported
from penstock.api.resources.reference import with_references

MANIFESTS = Path(__file__).parents[2] / "manifests" / "crds"
DOCS = Path(__file__).parents[2] / "docs" / "operator"

WHOLE = yaml.safe_load((DOCS / "everything.yaml").read_text())


def resource(**changes: Any) -> dict[str, Any]:
    """A small valid InferenceModel whose spec has `changes`."""
    spec: dict[str, Any] = {"served": {"name": "tiny"}, "source": {"uri": "/models/tiny"}, "pools": [{"name": "main"}]}
    meta = {"name": "tiny", "namespace": "default", "uid": "u1", "generation": 1}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": meta, "spec": {**spec, **changes}}


def test_the_whole_spec_goes_through_and_back() -> None:
    model = InferenceModel.parse(WHOLE)
    assert model.spec.model_dump(by_alias=True, exclude_unset=True) == WHOLE["spec"]
    assert model.served_names == ["llama-8b", "llama"]


POOL = {"name": "a"}
DAY = {"start": "0 8 * * 1-5", "duration": "10h", "min": 2}
MEMORY = {"type": "offload", "memory": "1Gi"}
BUCKET = {"uri": "s3://b/kv", "size": "1Gi", "secretRef": {"name": "pages"}}
FROM_S3 = {"source": {"uri": "s3://b/m", "secretRef": {"name": "weights"}}}
PREFILL, DECODE = {"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2, "pools": [POOL, {"name": "b"}]}, "keep one pool"),
    ({"replicas": 2, "pools": [{"name": "a", "scaling": {"max": 2}}]}, "remove its scaling"),
    ({"pools": [POOL, POOL]}, "two pools have the same name"),
    ({"pools": [POOL, PREFILL]}, "at least one Prefill and one Decode"),
    ({"pools": [PREFILL]}, "at least one Prefill and one Decode"),
    ({"pools": [PREFILL, DECODE]}, "engine.connector"),
    ({"engine": {"connector": {"type": "offload"}}}, "memory goes with the types offload and transfer"),
    ({"engine": {"connector": {"memory": "1Gi"}}}, "memory goes with the types offload and transfer"),
    ({"engine": {"connector": {"disk": {"size": "1Gi"}}}}, "disk, store and bucket keep copies of what is in memory"),
    ({"engine": {"connector": {**MEMORY, "bucket": {"uri": "s3://b", "size": "1Gi"}}}}, "engine.connector.bucket.uri"),
    ({"engine": {"connector": {**MEMORY, "bucket": BUCKET}}, **FROM_S3}, "a replica has the credentials of one Secret"),
    ({"engine": {"connector": {"type": "transfer", "memory": "1Gi"}}}, "secretRef goes with the type transfer"),
    ({"engine": {"connector": {"type": "offload", "memory": "1Gi", "secretRef": {"name": "s"}}}}, "secretRef goes with the type"),
    ({"pools": [{"name": "a", "scaling": {"min": 3, "max": 2}}]}, "min must not be above max"),
    ({"pools": [{"name": "a", "scaling": {"max": 2, "warm": 3}}]}, "warm must not be above max"),
    ({"pools": [{"name": "a", "scaling": {"max": 2, "min": 0}}]}, "set both or neither"),
    ({"pools": [{"name": "a", "scaling": {"max": 2, "scaleToZeroAfter": "1m"}}]}, "set both or neither"),
    ({"pools": [{"name": "a", "scaling": {"max": 2, "slo": {}}}]}, "name a goal"),
    ({"scaling": {"budget": 3}}, "give at least one pool scaling"),
    ({"pools": [{"name": "a", "scaling": {"max": 2}}], "scaling": {"prefillPerDecode": {}}}, "for Prefill and Decode"),
    (
        {
            "pools": [PREFILL, {**DECODE, "scaling": {"max": 2}}],
            "scaling": {"prefillPerDecode": {"minPercent": 9, "maxPercent": 8}},
        },
        "minPercent must not be above",
    ),
    ({"pools": [{"name": "a", "scaling": {"max": 2, "schedule": [{"start": "8", "duration": "1h", "min": 1}]}}]}, "start"),
    (
        {"pools": [{"name": "a", "scaling": {"max": 2, "schedule": [{**DAY, "duration": "200h"}]}}]},
        "duration must be from 1m to 168h",
    ),
    ({"pools": []}, "at least 1 item"),
    ({"source": {"uri": "models/tiny"}}, "absolute path or begin with hf://"),
    ({"source": {"uri": "file:///m", "cache": {"claimName": "c"}}}, "cache is for hf://"),
    ({"source": {"uri": "pvc:///m"}}, "must be followed by a claim's name"),
    ({"source": {"uri": "oci://models"}}, "must be followed by the reference of an image"),
    ({"source": {"uri": "hf://a/b", "cache": {}}}, "needs either claimName, a claim of yours, or size"),
    ({"source": {"uri": "hf://a/b", "cache": {"type": "Node", "size": "1Gi"}}}, "type Node takes neither"),
    ({"source": {"uri": "hf://a/b", "cache": {"size": "lots"}}}, "size"),
    ({"pools": [{"name": "a", "resourceClaims": [{"name": "gpu"}]}]}, "name either a template"),
    ({"pools": [{"name": "a", "resourceClaims": [{"name": "gpu", "template": "t", "claim": "c"}]}]}, "name either a template"),
    ({"source": {"uri": "file:///m", "secretRef": {"name": "s"}}}, "secretRef is for hf://"),
    ({"canary": {"of": "tiny", "weight": 5}}, "another model"),
    ({"canary": {"of": "old", "weight": 5, "judge": {"steps": [1, 5]}}}, "steps must be below weight"),
    ({"canary": {"of": "old", "weight": 50, "judge": {"steps": [5, 1]}}}, "steps must rise"),
    ({"canary": {"of": "old", "weight": 50, "judge": {"steps": [0, 1]}}}, "greater than or equal to 1"),
    ({"canary": {"of": "old", "weight": 50, "judge": {"window": "1s"}}}, "window must be from 5s to 24h"),
    ({"lora": {"slots": 8, "cpuSlots": 4}}, "cpuSlots must not be below slots"),
    ({"engine": {"extraArgs": ["--port=1"]}}, "extraArgs may not set"),
    ({"engine": {"extraArgs": ["--host", "x"]}}, "extraArgs may not set"),
    ({"engine": {"extraArgs": ["--dtype=float32"]}}, "may not set what has a field: use source, engine.dtype"),
    ({"engine": {"extraArgs": ["--max-num-seqs", "8"]}}, "may not set what has a field"),
    (
        {"engine": {"limits": {"memoryPercent": 50}, "extraArgs": ["--kv-cache-memory-bytes=1000"]}},
        "exclude each other; remove one",
    ),
    ({"engine": {"speculative": {"method": "eagle3"}}}, "model goes with the methods draft_model"),
    ({"engine": {"speculative": {"method": "ngram", "model": "hf://org/head"}}}, "model goes with the methods draft_model"),
    ({"engine": {"speculative": {"method": "eagle", "model": "s3://b/head"}}}, "model must be an absolute path in the pods or"),
    ({"pools": [{"name": "a", "parallelism": {"expert": {"redundant": 2}}}]}, "redundant needs enabled: true"),
    ({"pools": [{"name": "a", "parallelism": {"expert": {"eplb": {}}}}]}, "eplb needs enabled: true"),
    ({"pools": [{"name": "a", "parallelism": {"tensor": 3, "nodes": 2}}]}, "nodes must divide data"),
    ({"pools": [{"name": "a", "parallelism": {"tensor": 2, "data": 3, "nodes": 2}}]}, "nodes must divide data"),
    (
        {"pools": [{"name": "a", "parallelism": {"tensor": 2, "nodes": 2}, "accelerator": {"resource": "nvidia.com/gpu"}}]},
        "parallelism.nodes is for pools without devices",
    ),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "schedule": [{**DAY, "timeZone": "Mars/Olympus"}]}}]}, "tz database"),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "downWindow": "25h"}}]}, "downWindow must be from 0s to 24h"),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "coldStart": "2h"}}]}, "coldStart must be from 1s to 1h"),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "growth": {"period": "0s"}}}]}, "period must be from 1s to 1h"),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "targets": {"kvUsagePercent": 101}}}]}, "less than or equal to 100"),
    ({"pools": [{"name": "a", "scaling": {"max": 3, "slo": {"itl": "0ms"}}}]}, "itl must be from 1ms to 1m"),
    (
        {"scaling": {"budget": 19}, "pools": [{"name": "a", "cost": 10, "scaling": {"min": 2, "max": 3}}]},
        "budget must pay for the min of every pool",
    ),
    ({"lora": {"sources": [{"prefix": "team-a/"}]}}, "prefix must be an absolute path or begin with"),
    ({"lora": {"sources": [{"prefix": "/a", "secretRef": {"name": "s"}}]}}, "lora: sources: secretRef is for hf://"),
    ({"routing": {"holdTimeout": "2h"}}, "holdTimeout must be from 0s to 1h"),
    ({"drainTimeout": "25h"}, "drainTimeout must be from 0s to 24h"),
    ({"drainTimeout": "2 minutes"}, "drainTimeout"),
    ({"rollout": {"maxSurge": 0}}, "must not both be 0"),
    ({"rollout": {"maxSurge": "0%"}}, "maxSurge"),
    ({"rollout": {"maxUnavailable": "101%"}}, "maxUnavailable"),
    ({"rollout": {"progressDeadline": "1s"}}, "progressDeadline must be from 10s to 24h"),
    ({"replicas": "2"}, "replicas"),
    ({"replicaz": 2}, "replicaz"),
]
"""Changes that a rule refuses, and a part of its sentence."""


@pytest.mark.req("XC-02")
@pytest.mark.parametrize(("changes", "sentence"), BROKEN)
def test_a_broken_rule_is_refused_with_a_sentence_that_says_what_to_change(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        InferenceModel.parse(resource(**changes))


@pytest.mark.parametrize("name", ["a" * 41, "8b", "a.b", "a-"])
def test_a_name_from_which_no_service_can_be_named_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"metadata\.name must have at most 40"):
        InferenceModel.parse({**resource(), "metadata": {"name": name}})


def test_another_kind_or_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"expected kind InferenceModel of penstock\.dev/v1alpha1, got kind Pod of v1"):
        InferenceModel.parse({"apiVersion": "v1", "kind": "Pod"})


def test_fields_that_nothing_implements_are_named() -> None:
    assert unsupported(InferenceModel.parse(resource()).spec) == []
    named = " ".join(unsupported(InferenceModel.parse(WHOLE).spec))
    for path in (
        "lora",
        "engine.quantization.weights",
        "engine.quantization.activations",
        "engine.connector.type",
    ):
        assert f"spec.{path}" in named
    for name in ("tensor", "pipeline", "data", "expert"):
        assert f"spec.pools[prefill].parallelism.{name}" in named
    on_devices = {"name": "a", "accelerator": {"resource": "nvidia.com/gpu"}}
    kept = [{"engine": {"quantization": {"kvCache": name}}} for name in ("int8_per_token_head", "fp8_inc")]
    fine, unknown = (unsupported(InferenceModel.parse(resource(pools=[on_devices], **it)).spec) for it in kept)
    assert not any("kvCache" in path for path in fine) and any("kvCache (fp8_inc; auto, bfloat16" in path for path in unknown)
    disaggregated = resource(
        pools=[PREFILL, DECODE], engine={"connector": {"type": "nixl"}}, source={"uri": "s3://b/m", "revision": "v"}
    )
    named = " ".join(unsupported(InferenceModel.parse(disaggregated).spec))
    assert "spec.pools[p].role" in named
    assert "spec.source.revision (only hf://" in named


@pytest.mark.parametrize(
    ("start", "fine"),
    [
        ("0 8 * * 1-5", True),
        ("*/5 0-23/2,7 1,15 * 0,7", True),
        ("59 23 31 12 7", True),
        ("5/10 1 1 1 1", True),
        ("60 8 * * *", False),
        ("0 24 * * *", False),
        ("0 8 0 * *", False),
        ("0 8 * 13 *", False),
        ("0 8 * * 8", False),
        ("0 8 * * 5-1", False),
        ("0 8 * * MON", False),
        ("*/0 8 * * *", False),
        ("0 8 * *", False),
        ("0  8 * * *", False),
    ],
)
def test_starts_of_schedules(start: str, fine: bool) -> None:
    pool = {"name": "a", "scaling": {"max": 3, "schedule": [{**DAY, "start": start}]}}
    try:
        InferenceModel.parse(resource(pools=[pool]))
    except ValidationError:
        assert not fine
    else:
        assert fine


@pytest.mark.parametrize(
    ("prefix", "allowed", "refused"),
    [
        ("s3://team-a/", ["s3://team-a/sql", "s3://team-a"], ["s3://team-ab", "s3://team-b/sql"]),
        ("hf://org/name", ["hf://org/name", "hf://org/name/x"], ["hf://org/name2", "hf://org"]),
        ("/adapters", ["/adapters/a"], ["/adapters2/a", "/"]),
    ],
)
def test_an_adapter_source_allows_its_place_and_what_is_below(prefix: str, allowed: list[str], refused: list[str]) -> None:
    lora = InferenceModel.parse(resource(lora={"sources": [{"prefix": prefix}]})).spec.lora
    assert lora is not None
    assert all(lora.sources[0].allows(uri) for uri in allowed)
    assert not any(lora.sources[0].allows(uri) for uri in refused)


@pytest.mark.parametrize("uri", ["s3://team-a/../team-b/x", "file:///adapters/..", "adapters/a", "ftp://x/y"])
def test_an_adapter_that_leads_elsewhere_is_refused(uri: str) -> None:
    spec = {"modelRef": {"name": "m"}, "served": {"name": "sql"}, "source": {"uri": uri}}
    adapter = {"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": {"name": "sql"}, "spec": spec}
    with pytest.raises(ValidationError, match="uri m"):
        LoraAdapter.parse(adapter)


def test_durations() -> None:
    assert [seconds(text) for text in ("40ms", "90s", "1h30m", "2m0s")] == [0.04, 90, 5400, 120]


def test_lora_adapters() -> None:
    spec = {"modelRef": {"name": "llama"}, "served": {"name": "sql"}, "source": {"uri": "s3://team-a/sql", "revision": "v3"}}
    adapter = {"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": {"name": "sql"}, "spec": spec}
    assert LoraAdapter.parse(adapter).spec.model_ref.name == "llama"
    with pytest.raises(ValidationError, match="secretRef"):
        LoraAdapter.parse({**adapter, "spec": {**spec, "secretRef": {"name": "x"}}})


ELSEWHERE = {
    "InferenceModel.spec.replicas",
    "InferenceModel.spec.source.cache.size",
    "InferenceModel.spec.pools[].resourceClaims[].claim",
}
"""Fields that exclude one of those in the example."""


def test_the_example_of_everything_has_every_field() -> None:
    told = {re.sub(r"\[\d+\]", "[]", path) for path in paths(WHOLE["spec"], "InferenceModel.spec")}
    there = {path for path, _ in schemas() if path.startswith("InferenceModel.spec")} - ELSEWHERE
    assert {path for path in there if ".template" not in path and not path.endswith("{}")} <= told, "add what is new"


def paths(value: Any, path: str) -> list[str]:
    """The paths of all values, lists and objects included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    under = [paths(child, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}") for key, child in items]
    return [path, *(found for some in under for found in some)]


def nodes(schema: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every schema node with its path."""
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for inner, sign in (("items", "[]"), ("additionalProperties", "{}")):
        if inner in schema:
            found += nodes(schema[inner], f"{path}{sign}")
    return found


def schemas() -> list[tuple[str, dict[str, Any]]]:
    """The nodes of all spec and status schemas."""
    found: list[tuple[str, dict[str, Any]]] = []
    for crd in crds():
        properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        for part in ("spec", "status"):
            found += nodes(properties[part], f"{crd['spec']['names']['kind']}.{part}")
    return found


@pytest.mark.parametrize(("path", "node"), schemas(), ids=[path for path, _ in schemas()])
def test_schemas_are_structural_and_bounded(path: str, node: dict[str, Any]) -> None:
    assert ("type" in node) != ("x-kubernetes-int-or-string" in node)
    assert not {"$ref", "anyOf", "allOf", "oneOf", "title", "const"} & node.keys()
    kind = node.get("type")
    if kind == "string":
        assert "enum" in node or "maxLength" in node, "an unbounded string: the cost of CEL rules cannot be estimated"
    if "additionalProperties" in node:
        assert "maxProperties" in node
    if kind == "array":
        assert "maxItems" in node
        assert "x-kubernetes-list-type" in node, "without it server-side apply replaces the list"
    if kind in (None, "integer") and ".spec" in path:
        assert {"minimum", "maximum"} <= node.keys()
    if not path.endswith(("[]", "{}")):
        assert node.get("description"), "`kubectl explain` would have nothing to say"


def test_what_kubectl_shows() -> None:
    model, adapter = (crd["spec"] for crd in crds())
    columns = model["versions"][0]["additionalPrinterColumns"]
    narrow, wide = ([it["name"] for it in columns if it.get("priority", 0) == priority] for priority in (0, 1))
    assert narrow == ["Model", "Ready", "Desired", "Status", "URL", "Age"]
    assert wide == ["Source", "Image", "Rollout", "Scaling", "Routed", "Canary", "Message"]
    assert model["names"]["shortNames"] == ["im"]
    assert model["names"]["categories"] == adapter["names"]["categories"] == ["penstock"]
    assert model["versions"][0]["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    pools = model["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["pools"]
    assert (pools["x-kubernetes-list-type"], pools["x-kubernetes-list-map-keys"], pools["maxItems"]) == ("map", ["name"], 8)
    assert pools["items"]["properties"]["template"]["x-kubernetes-preserve-unknown-fields"] is True


def test_manifests_hold_what_is_generated() -> None:
    written = {path.name: yaml.safe_load(path.read_text()) for path in MANIFESTS.glob("*.yaml")}
    assert written == {f"{crd['metadata']['name']}.yaml": crd for crd in crds()}, "run `make crds`"


@pytest.mark.parametrize("kind", ["InferenceModel", "LoraAdapter"])
def test_the_docs_have_the_reference_that_the_schema_gives(kind: str) -> None:
    text = (DOCS / f"{kind.lower()}.md").read_text()
    assert f"<!-- reference: {kind} -->" in text and (kind != "InferenceModel" or "<!-- refused: everything.yaml -->" in text)
    assert with_references(text, DOCS) == text, "run `make crds`"


@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_replicas_and_scaling_exclude_each_other(replicas: int, low: int, high: int, scaled: bool) -> None:
    pool = {"name": "main", **({"scaling": {"min": low, "max": high}} if scaled else {})}
    valid = not scaled and low <= 5
    try:
        InferenceModel.parse(resource(replicas=replicas, pools=[pool]))
    except ValidationError:
        assert not valid
    else:
        assert valid
