"""The dashboards that come with this version."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import yaml

RUNBOOKS: Final = "docs/runbooks/"
"""Default location of the runbooks that panels link to."""
SIDECAR: Final = "grafana_dashboard"
"""The label by which the sidecar of Grafana's chart finds dashboards."""


@dataclass(frozen=True)
class Dashboard:
    """One of them."""

    json: str

    @property
    def content(self) -> dict[str, Any]:
        """The dashboard as Grafana's JSON."""
        return json.loads(self.json)

    @property
    def uid(self) -> str:
        """Grafana's identifier of the dashboard; the same in every version."""
        return self.content["uid"]

    @property
    def title(self) -> str:
        """What Grafana shows."""
        return self.content["title"]

    @property
    def question(self) -> str:
        """What it answers."""
        return " ".join(self.content["description"].split())

    @property
    def variables(self) -> frozenset[str]:
        """What can be chosen at its top."""
        return frozenset(it["name"] for it in self.content["templating"]["list"])

    def link(self, grafana: str, **chosen: str) -> str:
        """Return the dashboard's URL at a Grafana, with those of `chosen` that are variables of the dashboard."""
        asked = urlencode({f"var-{name}": value for name, value in chosen.items() if name in self.variables})
        return f"{grafana.rstrip('/')}/d/{self.uid}" + (f"?{asked}" if asked else "")

    def config_map(self) -> dict[str, Any]:
        """Return the ConfigMap for the sidecar of Grafana's chart."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{self.uid}-dashboard", "labels": {SIDECAR: "1"}},
            "data": {f"{self.uid}.json": self.json},
        }


def dashboards(runbooks: str | None = None) -> list[Dashboard]:
    """All of them, by title; `runbooks`: where the pages of docs/runbooks are read."""
    folder = files("penstock.operator.dashboards") / "json"
    texts = [it.read_text(encoding="utf-8") for it in folder.iterdir() if it.name.endswith(".json")]
    where = RUNBOOKS if runbooks is None else f"{runbooks.rstrip('/')}/"
    return sorted((Dashboard(text.replace(RUNBOOKS, where)) for text in texts), key=lambda it: it.title)


def export(folder: Path, made: list[Dashboard]) -> list[Path]:
    """Writes each as JSON, and all as ConfigMaps in one file; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{it.uid}.json" for it in made]
    for path, it in zip(written, made, strict=True):
        path.write_text(it.json, encoding="utf-8")
    maps = folder / "configmaps.yaml"
    maps.write_text(yaml.safe_dump_all([it.config_map() for it in made], sort_keys=False), encoding="utf-8")
    return [*written, maps]
