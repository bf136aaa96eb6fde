"""What is committed is what is generated, every name is one of ours, and every alert has its page."""

import json
import re
from pathlib import Path

import pytest
import yaml

from monitoring import queries
from monitoring.alerts import ALERTS
from monitoring.boards import BOARDS
from monitoring.files import FOLDER, files
from monitoring.recordings import RECORDINGS
from monitoring.rules import Alert
from penstock.api import labels, metrics

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES = [rule for group in (RECORDINGS, *ALERTS) for rule in group.rules]
NAMES = {name for key, name in vars(metrics).items() if key.isupper() and isinstance(name, str)}
OTHERS = {queries.GPU_BUSY, queries.GPU_MEMORY_USED, queries.GPU_XID, queries.GPU_DOUBLE_BIT_ERRORS}


@pytest.mark.parametrize("path", files())
def test_what_is_committed_is_what_is_generated(path: str) -> None:
    assert (FOLDER / path).read_text() == files()[path], "run make monitoring"


def test_there_are_no_other_dashboards() -> None:
    assert {it.name for it in (FOLDER / "dashboards").iterdir()} == {f"{board.uid}.json" for board in BOARDS}


def test_queries_use_names_that_are_defined() -> None:
    panels = [panel for board in BOARDS for panel in board.panels]
    said = [query.expr for panel in panels for query in panel.queries] + [rule.expr for rule in RULES]
    said += [variable.series for board in BOARDS for variable in board.variables]
    said += [annotation.expr for board in BOARDS for annotation in board.annotations]
    recorded = {rule.name for rule in RECORDINGS.rules}
    used = {name for expr in said for name in re.findall(r"(?:model:)?(?:penstock|DCGM)_[\w:]+", expr)}
    for name in used - recorded:
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in NAMES | OTHERS or name in NAMES, name


@pytest.mark.parametrize("path", sorted((FOLDER / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_grafana_finds_its_way(path: Path) -> None:
    board = json.loads(path.read_text())
    assert (board["uid"], board["tags"]) == (path.stem, ["penstock"])
    (link,) = board["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == ("dashboards", ["penstock"], True, True)
    known = {it["name"] for it in board["templating"]["list"]} | {"__rate_interval"}
    assert len({it["title"] for it in board["panels"]}) == len(board["panels"])
    for panel in (it for it in board["panels"] if it["type"] != "row"):
        assert (panel["description"] and panel["fieldConfig"]["defaults"].get("unit")) or panel["type"] == "heatmap"
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= known
    for annotation in board["annotations"]["list"]:
        assert annotation["datasource"]["uid"] == "${datasource}"
        assert set(re.findall(r"\$(\w+)", annotation["expr"])) <= known


@pytest.mark.parametrize("path", sorted((FOLDER / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_no_panel_lies_on_another(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    names = {rule.name for rule in RULES if isinstance(rule, Alert)}
    pages = {path.stem: path for path in RUNBOOKS.glob("Penstock*.md")}
    assert pages.keys() == names
    for name, page in pages.items():
        text = page.read_text()
        assert text.startswith(f"# {name}\n")
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings == ["What it means", "What to check", "How to fix"], name
        assert name in (RUNBOOKS / "README.md").read_text()


@pytest.mark.req("OB-21")
def test_pages_send_their_readers_to_panels_that_there_are() -> None:
    """From the symptom to where it is seen, and back there when something was done about it."""
    panels = {board.title.partition(" / ")[2]: {it.title for it in (*board.rows, *board.panels)} for board in BOARDS}
    for page in RUNBOOKS.glob("Penstock*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\n", " ")
        assert set(re.findall(r'"([A-Z][^"]+)"', text)) <= set().union(*panels.values()), page.name
        assert set(re.findall(r"Dashboard \*(\w+)\*", text)) <= panels.keys(), page.name


@pytest.mark.req("OB-25")
def test_preemptions_and_the_time_of_decoding_are_on_one_panel() -> None:
    panels = [panel for board in BOARDS for panel in board.panels]
    asked = [" ".join(query.expr for query in panel.queries) for panel in panels]
    assert [it for it in asked if metrics.PREEMPTIONS in it and metrics.DECODE_TIME in it]


@pytest.mark.req("OB-18")
def test_scraped_often_enough_to_see_what_lasts_half_a_minute() -> None:
    monitors = yaml.safe_load_all((FOLDER / "podmonitors.yaml").read_text())
    assert {end["interval"] for it in monitors for end in it["spec"]["podMetricsEndpoints"]} == {"5s"}
    assert yaml.safe_load((ROOT / "charts/penstock/values.yaml").read_text())["monitoring"]["interval"] == "5s"


def test_alerts_point_to_their_pages() -> None:
    groups = yaml.safe_load((FOLDER / "rules" / "penstock.yaml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) == len({it["alert"] for it in alerts})
    for alert in alerts:
        assert (ROOT / alert["annotations"]["runbook_url"]).is_file()


def test_pages_name_only_metrics_that_there_are() -> None:
    for page in RUNBOOKS.glob("*.md"):
        for name in re.findall(r"penstock_\w+", page.read_text()):
            assert re.sub(r"_(total|bucket|sum|count)$", "", name) in NAMES or name in NAMES, (page.name, name)


def test_series_of_replicas_get_the_labels_that_queries_go_by() -> None:
    monitors = {it["metadata"]["name"]: it for it in yaml.safe_load_all((FOLDER / "podmonitors.yaml").read_text())}
    (engine,) = monitors["penstock-engine"]["spec"]["podMetricsEndpoints"]
    given = {it["targetLabel"]: it["sourceLabels"] for it in engine["relabelings"]}
    wanted = {"model": labels.MODEL, "pool": labels.POOL, "role": labels.ROLE}
    pod = "__meta_kubernetes_pod_label_"
    assert given == {name: [pod + re.sub(r"\W", "_", label)] for name, label in wanted.items()}
    (operator,) = monitors["penstock-operator"]["spec"]["podMetricsEndpoints"]
    assert operator["honorLabels"]
