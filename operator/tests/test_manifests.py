"""The manifests: least privilege, and what the examples and the system say is what the code takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.api.resources import InferenceModel, unsupported
from penstock.operator.api import CHILDREN, RESOURCES
from penstock.operator.cli import crds
from penstock.operator.desired.network_policy import OPERATOR, PICKERS

ROOT = Path(__file__).parents[2]


def documents(*paths: str) -> list[dict[str, Any]]:
    """All objects in some manifests."""
    return [it for path in paths for it in yaml.safe_load_all((ROOT / "manifests" / path).read_text())]


def rules(path: str) -> list[dict[str, Any]]:
    """The rules of all roles in a manifest."""
    return [rule for it in documents(path) if it["kind"] in ("Role", "ClusterRole") for rule in it["rules"]]


@pytest.mark.parametrize("path", ["rbac/operator.yaml", "rbac/gateway.yaml", "inference-pool/rbac.yaml"])
def test_nobody_reads_secrets_runs_commands_or_makes_roles(path: str) -> None:
    for rule in rules(path):
        assert "*" not in (*rule["resources"], *rule["verbs"], *rule["apiGroups"])
        forbidden = {"secrets", "pods/exec", "pods/attach", "pods/portforward", "roles", "clusterroles", "rolebindings"}
        assert not forbidden & {*rule["resources"]}
        assert not {"escalate", "bind", "impersonate"} & {*rule["verbs"]}


@pytest.mark.parametrize("path", ["rbac/gateway.yaml", "inference-pool/rbac.yaml"])
def test_the_gateway_only_reads(path: str) -> None:
    assert {verb for rule in rules(path) for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_operator_may_do_what_it_does_and_no_pods_are_made_by_it() -> None:
    allowed = {
        (group, resource, verb)
        for rule in rules("rbac/operator.yaml")
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for kind in CHILDREN:
        for verb in ("get", "list", "watch", "create", "patch", "delete"):
            assert (RESOURCES[kind].group, RESOURCES[kind].plural, verb) in allowed
    assert ("penstock.dev", "inferencemodels/status", "patch") in allowed
    assert not {("", "pods", "create"), ("", "pods", "delete")} & allowed
    assert not {("penstock.dev", "inferencemodels", verb) for verb in ("patch", "update")} & allowed


def test_the_kustomizations_name_every_manifest() -> None:
    root = ROOT / "manifests"
    listed: set[Path] = set()
    for path in [*root.rglob("kustomization.y*ml")]:
        wanted = yaml.safe_load(path.read_text())
        patches = [patch["path"] for patch in wanted.get("patches", []) if "path" in patch]
        listed |= {(path.parent / name).resolve() for name in (*wanted["resources"], *patches)}
    plain_rules = root / "monitoring" / "rules" / "penstock.yaml"  # for a Prometheus that reads files
    there = {path for path in root.rglob("*.yaml") if path.name != "kustomization.yaml"} - {plain_rules}
    assert there == {it for it in listed if it.is_file()}
    folders = {it for it in listed if it.is_dir()}
    assert folders == {path.parent for path in root.rglob("kustomization.yml")}


def test_the_picker_of_one_namespace_may_read_what_it_watches_and_listens_where_its_pool_says() -> None:
    allowed = {resource for rule in rules("inference-pool/rbac.yaml") for resource in rule["resources"]}
    assert allowed == {resource for rule in rules("rbac/gateway.yaml") for resource in rule["resources"]}
    deployment, service = documents("inference-pool/picker.yaml")
    (pool,) = documents("inference-pool/pool.yaml")
    reference = pool["spec"]["endpointPickerRef"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert (reference["name"], reference["port"]["number"]) == (service["metadata"]["name"], port["port"])
    (target,) = (it["containerPort"] for it in container["ports"] if it["name"] == port["targetPort"])
    assert f"--pool-port=$(NAMESPACE)/{pool['metadata']['name']}={target}" in container["args"]


def test_the_example_is_honoured_in_every_field() -> None:
    resource = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    assert unsupported(InferenceModel.parse(resource).spec) == []


def test_crds_are_compared_with_older_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = ROOT / "manifests/crds/inferencemodels.penstock.dev.yaml"
    assert crds(["--check", str(written)]) == 0
    assert capsys.readouterr().out == "nothing breaks\n"
    old = yaml.safe_load(written.read_text())
    spec = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["replicas"]["maximum"], spec["colour"] = 2000, {"type": "string"}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    assert crds(["--check", str(tmp_path / "old.yaml")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "inferencemodels.penstock.dev: spec.colour is gone",
        "inferencemodels.penstock.dev: spec.replicas: maximum was 2000 and is 1000",
    ]
    (tmp_path / "none.yaml").write_text("kind: Pod\nmetadata: {name: a}\n")
    assert crds(["--check", str(tmp_path / "none.yaml")]) == 2
    assert "holds none of inferencemodels.penstock.dev" in capsys.readouterr().err


def test_crds_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crds([]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [it["kind"] for it in printed] == ["CustomResourceDefinition"] * 2
    assert crds(["--write", str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "manifests" / "crds" / path.name).read_text()


def test_replicas_let_in_the_pods_that_the_manifests_make() -> None:
    workloads = documents("system/operator.yaml", "system/gateway.yaml", "inference-pool/picker.yaml")
    templates = [it["spec"]["template"] for it in workloads if it["kind"] in ("Deployment", "StatefulSet")]
    assert [it["metadata"]["labels"]["app.kubernetes.io/name"] for it in templates] == [OPERATOR, *PICKERS]
    (operator,) = (it for it in templates if it["metadata"]["labels"]["app.kubernetes.io/name"] == OPERATOR)
    assert "--system-namespace=$(POD_NAMESPACE)" in operator["spec"]["containers"][0]["args"], "else a policy names another one"
