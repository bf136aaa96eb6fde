"""Recording rules and alerts as plain values, and what Prometheus reads of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Object = dict[str, Any]
RUNBOOKS: Final = "docs/runbooks"
"""Folder in the repository. The chart puts `monitoring.runbookUrl` in its place."""


@dataclass(frozen=True)
class Recording:
    """A series that is computed in advance; its name says `level:metric:operation`."""

    name: str
    expr: str

    def to_rule(self) -> Object:
        """See Prometheus' rule files."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """A symptom that a person should hear of.

    It fires where `signal condition` has held for `lasting`, for each label set of the signal.
    """

    name: str
    severity: Literal["critical", "warning"]
    """`critical` pages a person: clients notice the fault."""
    signal: str
    """What is watched: has a value in a healthy system too, so that it can be seen that it would speak."""
    condition: str
    summary: str
    """One line with the signal's labels and value."""
    description: str
    lasting: str = "0s"
    needs: str = ""
    """The metric that the alert needs, as in `Panel.needs`."""

    @property
    def expr(self) -> str:
        """What is evaluated."""
        return f"{self.signal} {self.condition}"

    def to_rule(self) -> Object:
        """See Prometheus' rule files."""
        told = {"summary": self.summary, "description": self.description, "runbook_url": runbook_url(self.name)}
        rule: Object = {"alert": self.name, "expr": self.expr}
        if self.lasting != "0s":
            rule["for"] = self.lasting
        return rule | {"labels": {"severity": self.severity}, "annotations": told}


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: Sequence[Recording | Alert]


def runbook_url(alert: str) -> str:
    """Return the URL of the alert's runbook."""
    return f"{RUNBOOKS}/{alert}.md"


def rule_file(groups: Sequence[Group]) -> Object:
    """A rule file of Prometheus', which is also the spec of a PrometheusRule."""
    return {"groups": [{"name": group.name, "rules": [rule.to_rule() for rule in group.rules]} for group in groups]}


def prometheus_rule(groups: Sequence[Group]) -> Object:
    """Return the PrometheusRule for Prometheus operators."""
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/part-of": "penstock"}
    metadata = {"name": "penstock", "namespace": "penstock-system", "labels": labels}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata, "spec": rule_file(groups)}
