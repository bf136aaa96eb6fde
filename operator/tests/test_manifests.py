"""The manifests: least privilege, and what the examples and the system say is what the code takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.api.resources import InferenceModel, unsupported
from penstock.operator.api import RESOURCES
from penstock.operator.cli import crds

ROOT = Path(__file__).parents[2]


def documents(*paths: str) -> list[dict[str, Any]]:
    """All objects in some manifests."""
    return [it for path in paths for it in yaml.safe_load_all((ROOT / "manifests" / path).read_text())]


def rules(path: str) -> list[dict[str, Any]]:
    """The rules of all roles in a manifest."""
    return [rule for it in documents(path) if it["kind"] in ("Role", "ClusterRole") for rule in it["rules"]]


@pytest.mark.parametrize("path", ["rbac/operator.yaml", "rbac/gateway.yaml"])
def test_nobody_reads_secrets_runs_commands_or_makes_roles(path: str) -> None:
    for rule in rules(path):
        assert "*" not in (*rule["resources"], *rule["verbs"], *rule["apiGroups"])
        forbidden = {"secrets", "pods/exec", "pods/attach", "pods/portforward", "roles", "clusterroles", "rolebindings"}
        assert not forbidden & {*rule["resources"]}
        assert not {"escalate", "bind", "impersonate"} & {*rule["verbs"]}


def test_the_gateway_only_reads() -> None:
    assert {verb for rule in rules("rbac/gateway.yaml") for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_operator_may_do_what_it_does_and_no_pods_are_made_by_it() -> None:
    allowed = {
        (resource, verb) for rule in rules("rbac/operator.yaml") for resource in rule["resources"] for verb in rule["verbs"]
    }
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        for verb in ("get", "list", "watch", "create", "patch", "delete"):
            assert (RESOURCES[kind].plural, verb) in allowed
    assert ("inferencemodels/status", "patch") in allowed
    assert not {("pods", "create"), ("pods", "delete"), ("inferencemodels", "patch"), ("inferencemodels", "update")} & allowed


def test_the_kustomization_names_every_manifest() -> None:
    listed = set(yaml.safe_load((ROOT / "manifests/kustomization.yaml").read_text())["resources"])
    assert {str(path.relative_to(ROOT / "manifests")) for path in (ROOT / "manifests").glob("*/*.yaml")} == listed


def test_the_example_is_honoured_in_every_field() -> None:
    resource = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    assert unsupported(InferenceModel.parse(resource).spec) == []


def test_crds_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crds([]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [it["kind"] for it in printed] == ["CustomResourceDefinition"] * 2
    assert crds(["--write", str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "manifests" / "crds" / path.name).read_text()
