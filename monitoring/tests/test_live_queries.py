"""Every query of the dashboards and rules against a Prometheus that scrapes the local system: names and labels are real."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from monitoring.alerts import ALERTS
from monitoring.boards import BOARDS
from monitoring.panels import Panel
from monitoring.recordings import RECORDINGS
from monitoring.rules import Alert
from monitoring.tests.live_system import System, live_system
from testing import patient

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian's package has it)"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]
WITHIN_S = 180.0
LORA = "an engine with --enable-lora"
GPU = "GPUs and NVIDIA's DCGM exporter"
GPU_ENGINE = "an engine on a GPU"
TENANTS = "a gateway with --tenants"
DRAFTS = "an engine with --spec-method"
GRAMMARS = "requests with structured output"
OFFLOAD = "an engine with --kv-offload-memory-bytes"
IMAGES = "requests with images"
EPLB = "an engine with --enable-eplb"
NEEDS = {
    "GPU busy": GPU,
    "GPU memory": GPU,
    "Steps by graph": GPU_ENGINE,
    "Steps without a graph, by why": GPU_ENGINE,
    "Padding": GPU_ENGINE,
    "PenstockGraphsMissing": GPU_ENGINE,
    "LoRA slots taken": LORA,
    "Accepted drafts": DRAFTS,
    "Accepted drafts by position": DRAFTS,
    "Draft tokens": DRAFTS,
    "Grammars": GRAMMARS,
    "Time to compile a grammar, p99": GRAMMARS,
    "KV pages to and from the host's memory and the disk": OFFLOAD,
    "Failures of the memory behind the KV cache": OFFLOAD,
    "Images": IMAGES,
    "Images that wait for the tower": IMAGES,
    "Balance of experts": EPLB,
    "Load of ranks with experts": EPLB,
    "Experts that move": EPLB,
    "PenstockExpertsUneven": EPLB,
    "PenstockGpuErrors": GPU,
    "PenstockAuditLinesLost": "an audit log",
    "Requests by tenant": TENANTS,
    "Requests over budget": TENANTS,
    "Requests refused": TENANTS,
    "Requests in flight by tenant": TENANTS,
    "Tokens by tenant": TENANTS,
    "Share of all tokens": TENANTS,
    "Cached share of prompts": TENANTS,
}
"""What may be without an answer, and why."""
ABSENT_WHILE_NONE = {"Alerts that fire", "Models without a ready replica", "Waiting at the gateway"}
"""Panels that show 0 for a series that is not there; of all others the series itself must be."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with live_system(tmp_path_factory.mktemp("live")) as running:
        yield running


def chosen(expr: str) -> str:
    """With every variable at what the test system has."""
    values = {"$namespace": "default", "$model": "tiny", "$pool": ".+", "$replica": ".+", "$__rate_interval": "30s"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def bare(panel: Panel, expr: str) -> str:
    """Without what stands in for an answer."""
    return expr if panel.title in ABSENT_WHILE_NONE else expr.removesuffix(" or vector(0)")


def unanswered(system: System, queries: dict[str, str]) -> list[str]:
    """The names of the queries that never had a number for an answer."""
    left = dict(queries)

    def all_answered() -> bool:
        for name, expr in list(left.items()):
            if system.query(expr):
                del left[name]
        return not left

    system.until(all_answered, WITHIN_S)
    return [f"{name}: {expr}" for name, expr in left.items()]


@pytest.mark.req("OB-20")
def test_every_panel_has_data(system: System) -> None:
    queries = {
        f"{board.title} / {panel.title} / {index}": bare(panel, chosen(query.expr))
        for board in BOARDS
        for panel in board.panels
        if not panel.needs
        for index, query in enumerate(panel.queries)
    }
    assert unanswered(system, queries) == []


def test_what_needs_more_is_known_by_name_and_is_right_all_the_same(system: System) -> None:
    panels = [panel for board in BOARDS for panel in board.panels if panel.needs]
    alerts = [alert for group in ALERTS for alert in group.rules if isinstance(alert, Alert) and alert.needs]
    assert {it.title: it.needs for it in panels} | {it.name: it.needs for it in alerts} == NEEDS
    for panel in panels:
        for query in panel.queries:
            system.query(chosen(query.expr))


def test_every_variable_has_choices(system: System) -> None:
    for variable in {it for board in BOARDS for it in board.variables}:
        assert system.values(variable.label or variable.name, chosen(variable.series)), variable


def test_every_rule_sees_what_it_watches(system: System) -> None:
    queries = {rule.name: rule.name for rule in RECORDINGS.rules}  # the series that Prometheus wrote
    alerts = [rule for group in ALERTS for rule in group.rules if isinstance(rule, Alert)]
    assert unanswered(system, queries | {it.name: it.signal for it in alerts if not it.needs}) == []
    for alert in alerts:
        system.query(alert.expr)


@pytest.mark.req("OB-01")
def test_names_and_types_pass_promtools_lint(system: System) -> None:
    for job, target in system.targets.items():
        if job == "penstock-envoy":  # its names are Envoy's
            continue
        told = patient.get(f"http://{target}/metrics").content
        linted = subprocess.run(["promtool", "check", "metrics"], input=told, capture_output=True, check=False)
        assert linted.returncode == 0, f"{job}: {linted.stdout.decode()}{linted.stderr.decode()}"
