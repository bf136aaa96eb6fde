"""InferenceModel and LoraAdapter: what is accepted, what is refused and with which words, and the CRDs made of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api.resources import InferenceModel, LoraAdapter, crds, seconds, unsupported

MANIFESTS = Path(__file__).parents[2] / "manifests" / "crds"

# Every field of the API, with a value.
WHOLE = yaml.safe_load("""
apiVersion: penstock.dev/v1alpha1
kind: InferenceModel
metadata: {name: llama, namespace: team, uid: u1, generation: 3, creationTimestamp: "2026-01-01T00:00:00Z", labels: {a: b}}
spec:
  served: {name: llama-8b, aliases: [llama]}
  canary: {of: llama-8b-old, weight: 5}
  source: {uri: "hf://org/llama", revision: main, loadFormat: auto, secretRef: {name: hf-token}, cache: {type: PVC, claimName: w}}
  engine:
    image: example/engine:1
    dtype: bfloat16
    quantization: {weights: fp8_per_channel_static, kvCache: fp8_e4m3, activations: dynamic}
    limits:
      {maxModelLen: 32768, maxNumSeqs: 256, maxBatchedTokens: 8192, longPrefillThreshold: 4096, blockSize: 16, memoryPercent: 90}
    speculative: {method: ngram, tokens: 4}
    connector: {type: nixl}
    extraArgs: ["--seed=1"]
  lora: {slots: 4, cpuSlots: 16, maxRank: 32, sources: [{prefix: "s3://team-a/", secretRef: {name: team-a}}]}
  pools:
    - name: decode-h200
      role: Both
      cost: 100
      parallelism: {tensor: 2, pipeline: 2, data: 2, expert: {enabled: true, redundant: 1}}
      accelerator: {resource: nvidia.com/gpu}
      scaling: {mode: Auto, min: 0, max: 16, warm: 1, slo: {itl: 40ms, percentile: 95}, scaleToZeroAfter: 10m}
      template: {spec: {nodeSelector: {gpu: h200}}}
  routing: {policy: Cost, weights: {prefix: 3, queue: 2, kv: 2}, priority: 1, holdTimeout: 5m}
  rollout: {paused: false, allowDowntime: true, progressDeadline: 30m}
  drainTimeout: 120s
""")


def resource(**changes: Any) -> dict[str, Any]:
    """A small valid InferenceModel whose spec has `changes`."""
    spec: dict[str, Any] = {"served": {"name": "tiny"}, "source": {"uri": "/models/tiny"}, "pools": [{"name": "main"}]}
    meta = {"name": "tiny", "namespace": "default", "uid": "u1", "generation": 1}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": meta, "spec": {**spec, **changes}}


@pytest.mark.req("XC-01")
def test_the_whole_spec_goes_through_and_back() -> None:
    model = InferenceModel.parse(WHOLE)
    assert model.spec.model_dump(by_alias=True, exclude_unset=True) == WHOLE["spec"]
    assert model.served_names == ["llama-8b", "llama"]


POOL = {"name": "a"}
PREFILL, DECODE = {"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}


@pytest.mark.req("XC-02")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"replicas": 2, "pools": [POOL, {"name": "b"}]}, "keep one pool"),
        ({"replicas": 2, "pools": [{"name": "a", "scaling": {"max": 2}}]}, "remove its scaling"),
        ({"pools": [POOL, POOL]}, "two pools have the same name"),
        ({"pools": [POOL, PREFILL]}, "at least one Prefill and one Decode"),
        ({"pools": [PREFILL]}, "at least one Prefill and one Decode"),
        ({"pools": [PREFILL, DECODE]}, "engine.connector"),
        ({"pools": [{"name": "a", "scaling": {"min": 3, "max": 2}}]}, "min must not be above max"),
        ({"pools": [{"name": "a", "scaling": {"max": 2, "warm": 3}}]}, "warm must not be above max"),
        ({"pools": [{"name": "a", "scaling": {"max": 2, "min": 0}}]}, "set both or neither"),
        ({"pools": [{"name": "a", "scaling": {"max": 2, "scaleToZeroAfter": "1m"}}]}, "set both or neither"),
        ({"pools": [{"name": "a", "scaling": {"max": 2, "slo": {}}}]}, "name a goal"),
        ({"pools": []}, "at least 1 item"),
        ({"source": {"uri": "models/tiny"}}, "absolute path or begin with hf://"),
        ({"source": {"uri": "file:///m", "secretRef": {"name": "s"}}}, "secretRef is for hf://"),
        ({"canary": {"of": "tiny", "weight": 5}}, "another model"),
        ({"lora": {"slots": 8, "cpuSlots": 4}}, "cpuSlots must not be below slots"),
        ({"engine": {"extraArgs": ["--port=1"]}}, "extraArgs may not set"),
        ({"engine": {"extraArgs": ["--host", "x"]}}, "extraArgs may not set"),
        ({"drainTimeout": "25h"}, "24h or shorter"),
        ({"drainTimeout": "2 minutes"}, "drainTimeout"),
        ({"rollout": {"progressDeadline": "1s"}}, "progressDeadline must be 10s"),
        ({"replicas": "2"}, "replicas"),
        ({"replicaz": 2}, "replicaz"),
    ],
)
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
    outside_pools = (
        "source.revision", "source.cache", "canary", "lora", "engine.quantization", "engine.speculative", "engine.connector.type",
        "routing.weights", "routing.priority", "rollout.allowDowntime",
    )  # fmt: skip
    for path in outside_pools:
        assert f"spec.{path}" in named
    for path in (
        "cost",
        "accelerator",
        "scaling.slo",
        *(f"parallelism.{name}" for name in ("tensor", "pipeline", "data", "expert")),
    ):
        assert f"spec.pools[decode-h200].{path}" in named
    disaggregated = resource(pools=[PREFILL, DECODE], engine={"connector": {"type": "nixl"}}, source={"uri": "s3://b/m"})
    named = " ".join(unsupported(InferenceModel.parse(disaggregated).spec))
    assert "spec.pools[p].role" in named
    assert "spec.source.uri (s3://" in named


def test_durations() -> None:
    assert [seconds(text) for text in ("40ms", "90s", "1h30m", "2m0s")] == [0.04, 90, 5400, 120]


def test_lora_adapters() -> None:
    spec = {"modelRef": {"name": "llama"}, "served": {"name": "sql"}, "source": {"uri": "s3://team-a/sql", "revision": "v3"}}
    adapter = {"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": {"name": "sql"}, "spec": spec}
    assert LoraAdapter.parse(adapter).spec.model_ref.name == "llama"
    with pytest.raises(ValidationError, match="secretRef"):
        LoraAdapter.parse({**adapter, "spec": {**spec, "secretRef": {"name": "x"}}})


def nodes(schema: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every schema node with its path."""
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    if "items" in schema:
        found += nodes(schema["items"], f"{path}[]")
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
    assert "type" in node
    assert not {"$ref", "anyOf", "allOf", "oneOf", "additionalProperties", "title", "const"} & node.keys()
    if node["type"] == "string":
        assert "enum" in node or "maxLength" in node, "an unbounded string: the cost of CEL rules cannot be estimated"
    if node["type"] == "array":
        assert "maxItems" in node
        assert "x-kubernetes-list-type" in node, "without it server-side apply replaces the list"
    if node["type"] == "integer" and ".spec" in path:
        assert {"minimum", "maximum"} <= node.keys()
    if not path.endswith("[]"):
        assert node.get("description"), "`kubectl explain` would have nothing to say"


def test_what_kubectl_shows() -> None:
    model, adapter = (crd["spec"] for crd in crds())
    assert [column["name"] for column in model["versions"][0]["additionalPrinterColumns"]] == [
        "Model", "Ready", "Desired", "Status", "URL", "Age",
    ]  # fmt: skip
    assert model["names"]["shortNames"] == ["im"]
    assert model["names"]["categories"] == adapter["names"]["categories"] == ["penstock"]
    assert model["versions"][0]["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    pools = model["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["pools"]
    assert (pools["x-kubernetes-list-type"], pools["x-kubernetes-list-map-keys"], pools["maxItems"]) == ("map", ["name"], 8)
    assert pools["items"]["properties"]["template"]["x-kubernetes-preserve-unknown-fields"] is True


def test_manifests_hold_what_is_generated() -> None:
    written = {path.name: yaml.safe_load(path.read_text()) for path in MANIFESTS.glob("*.yaml")}
    assert written == {f"{crd['metadata']['name']}.yaml": crd for crd in crds()}, "run `penstock crds --write manifests/crds`"


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
