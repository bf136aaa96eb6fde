"""The operator, the gateway and the picker take every example as its header says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.api.resources import LoraAdapter
from penstock.gateway.tenants.document import parse as parse_tenants
from penstock.operator.acceptance import accept
from penstock.operator.adapters.plan import accepted
from penstock.operator.desired import Rendering, children
from penstock.operator.desired.source import Fetched, fetch_job, needs_fetch

EXAMPLES = Path(__file__).parents[1]
ROOT = EXAMPLES.parent
FILES = sorted(EXAMPLES.glob("*.yaml"))
Object = dict[str, Any]


def objects(path: Path, kind: str = "") -> list[Object]:
    """The objects of a file, or those of one kind."""
    return [it for it in yaml.safe_load_all(path.read_text()) if not kind or it["kind"] == kind]


def named(file: str, kind: str) -> Object:
    """The only object of that kind in an example."""
    (found,) = objects(EXAMPLES / file, kind)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_operator_makes_pods_of_every_model(path: Path) -> None:
    claims = {it["metadata"]["name"] for it in objects(path, "PersistentVolumeClaim")}
    secrets = {it["metadata"]["name"] for it in objects(path, "Secret")}
    for resource in objects(path, "InferenceModel"):
        model, refusal = accept(resource)
        assert model is not None and refusal is None, refusal
        source = model.spec.source
        if source.cache is not None and source.cache.size is None:
            assert source.cache.claim_name in claims
        if source.uri.startswith("pvc://"):
            assert source.uri.removeprefix("pvc://").partition("/")[0] in claims
        if source.secret_ref is not None:
            assert source.secret_ref.name in secrets
        if needs_fetch(model):
            assert fetch_job(model, "engine:test") is not None
        fetched = Fetched(folder="fetched", version="0" * 40) if needs_fetch(model) else None
        made = children(model, Rendering(image="engine:test", fetched=fetched))
        assert [it for it in made if it["kind"] == "Deployment"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_header_says_what_it_needs_and_what_one_sees(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"examples/{path.name}" in header
    if path.name != "tiny.yaml":  # which needs nothing, and says so
        assert [word for word in ("# Needs: ", "# Apply: ", "# You see: ") if word not in header] == []
    names = {it["metadata"]["name"] for it in objects(path)}
    for name in re.findall(r"(?:kubectl (?:get|describe) (?:im|la|hpa|scaledobject)|penstock explain) ([a-z][\w-]*)", header):
        assert name in names, f"the header asks for {name}"


def test_the_list_has_every_example_and_no_other() -> None:
    listed = set(re.findall(r"^\| \[([\w.-]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (*FILES, *EXAMPLES.glob("*.json"))}


def test_no_two_examples_claim_a_name() -> None:
    """So that all of them can be applied to one cluster."""
    served = [it["spec"]["served"] for path in FILES for it in objects(path) if "served" in it.get("spec", {})]
    names = [name for it in served for name in (it["name"], *it.get("aliases", []))]
    assert len(names) == len(set(names))
    made = [(it["kind"], it["metadata"]["name"]) for path in FILES for it in objects(path)]
    assert len(made) == len(set(made))


def test_the_model_takes_the_adapter() -> None:
    model, refusal = accept(named("lora.yaml", "InferenceModel"))
    verdict = accepted(LoraAdapter.parse(named("lora.yaml", "LoraAdapter")), model, str(refusal or ""), "")
    assert verdict.reason == "Accepted", verdict


def test_the_canary_names_the_other_model() -> None:
    old, new = objects(EXAMPLES / "canary.yaml", "InferenceModel")
    assert new["spec"]["canary"]["of"] == old["spec"]["served"]["name"]


def test_the_gateway_reads_the_tenants() -> None:
    secret = named("tenants.yaml", "Secret")
    values = yaml.safe_load((ROOT / "charts/penstock/values.yaml").read_text())["gateway"]["tenants"]
    file = parse_tenants(secret["stringData"][values["key"]])
    assert {it.name for it in file.tenants} == {"search", "chat", "nightly"}
    assert f"gateway.tenants.secretName={secret['metadata']['name']}" in (EXAMPLES / "tenants.yaml").read_text()


@pytest.mark.parametrize(("file", "kind"), [("hpa.yaml", "HorizontalPodAutoscaler"), ("keda.yaml", "ScaledObject")])
def test_an_autoscaler_of_others_has_the_pool_to_itself(file: str, kind: str) -> None:
    resource = named(file, "InferenceModel")
    (pool,) = resource["spec"]["pools"]
    assert "replicas" not in resource["spec"] and "scaling" not in pool
    assert named(file, kind)["spec"]["scaleTargetRef"]["name"] == f"{resource['metadata']['name']}-{pool['name']}"


def test_the_inference_pool_is_the_one_whose_picker_the_manifests_install() -> None:
    (installed,) = yaml.safe_load_all((ROOT / "manifests/inference-pool/pool.yaml").read_text())
    pool, pods = named("inference-pool.yaml", "InferencePool"), named("inference-pool.yaml", "Deployment")["spec"]["template"]
    assert pool == installed
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    ports = {it["containerPort"] for it in pods["spec"]["containers"][0]["ports"]}
    assert {it["number"] for it in pool["spec"]["targetPorts"]} <= ports
    (rule,) = named("inference-pool.yaml", "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
