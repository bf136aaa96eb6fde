"""The files of `manifests/monitoring`, from the dashboards and rules."""

from pathlib import Path
from typing import Any

import yaml

from monitoring.alerts import ALERTS
from monitoring.boards import BOARDS
from monitoring.panels import to_json
from monitoring.recordings import RECORDINGS
from monitoring.rules import prometheus_rule, rule_file

FOLDER = Path(__file__).parents[1] / "manifests" / "monitoring"
HEAD = "# Written by `make monitoring`.\n"
NAMESPACE = "penstock-system"


def files() -> dict[str, str]:
    """What they hold, by path in the folder."""
    groups = [RECORDINGS, *ALERTS]
    found = {f"dashboards/{board.uid}.json": to_json(board) for board in BOARDS}
    found["rules/penstock.yaml"] = _yaml(rule_file(groups))
    found["prometheusrule.yaml"] = _yaml(prometheus_rule(groups))
    found["kustomization.yaml"] = _yaml(_kustomization())
    return found


def write(folder: Path = FOLDER) -> None:
    """Writes the files, and removes dashboards that there are no more."""
    wanted = files()
    for path, text in wanted.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for old in (folder / "dashboards").glob("*.json"):
        if f"dashboards/{old.name}" not in wanted:
            old.unlink()


def _kustomization() -> dict[str, Any]:
    """Dashboards as ConfigMaps, by the label that Grafana's sidecar looks for."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": ["podmonitors.yaml", "prometheusrule.yaml"],
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
        "configMapGenerator": [{"name": f"{board.uid}-dashboard", "files": [f"dashboards/{board.uid}.json"]} for board in BOARDS],
    }


def _yaml(value: dict[str, Any]) -> str:
    return HEAD + yaml.safe_dump(value, sort_keys=False, width=130)
