"""Dashboards as plain values, and what Grafana reads of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from monitoring.rules import Alert, runbook_url

TAG: Final = "penstock"
SOURCE: Final = model.DataSourceRef("prometheus", "${datasource}")
WIDTH: Final = 24


@dataclass(frozen=True)
class Query:
    """One line, or family of lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    help: str
    """What it shows, and what to do when it is bad."""
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["lines", "stacked", "stat", "heatmap"] = "lines"
    warn: float | None = None
    """Threshold of yellow."""
    bad: float | None = None
    """Threshold of red."""
    most: float | None = None
    """The axis' upper end."""
    alert: Alert | None = None
    """The alert whose runbook explains the panel."""
    width: int = 8
    needs: str = ""
    """What has to be there for the queries to have an answer, where a system without GPUs has it not."""


@dataclass(frozen=True)
class Variable:
    """A choice at the top, of a label's values."""

    name: str
    series: str
    """The series with the label."""
    label: str = ""
    """The label. Default: the variable's name."""

    @property
    def query(self) -> str:
        """The variable's query for Grafana."""
        return f"label_values({self.series}, {self.label or self.name})"


@dataclass(frozen=True)
class Annotation:
    """Marks on the time axis of every panel of a dashboard."""

    name: str
    expr: str
    """Has a sample at each time to mark. Consecutive samples become a region."""
    text: str
    """May use the labels of the samples."""
    colour: str


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    help: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    annotations: Sequence[Annotation] = ()

    @property
    def panels(self) -> Iterator[Panel]:
        """All of them."""
        return (panel for row in self.rows for panel in row.panels)


def to_json(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(_others())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    number = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel, number))
    written = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    written["annotations"] = {"list": [_annotation(it) for it in board.annotations]}
    return json.dumps(written, indent=1, sort_keys=True) + "\n"


def _annotation(annotation: Annotation) -> dict[str, Any]:
    """The annotation for Grafana's Prometheus data source. The SDK's class has no field for the texts."""
    return {
        "name": annotation.name,
        "enable": True,
        "iconColor": annotation.colour,
        "datasource": {"type": SOURCE.type_val, "uid": SOURCE.uid},
        "expr": annotation.expr,
        "titleFormat": annotation.name,
        "textFormat": annotation.text,
        "step": "15s",
    }


def _others() -> dashboard.DashboardLink:
    """A menu of all dashboards with the tag; time and variables go along."""
    link = dashboard.DashboardLink("Penstock").type(model.DashboardLinkType.DASHBOARDS)
    return link.tags([TAG]).as_dropdown(True).include_vars(True).keep_time(True)


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(variable.name).label(variable.name.capitalize()).datasource(SOURCE)
    made = made.query({"query": variable.query, "refId": variable.name})
    made = made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
    made = made.multi(True).include_all(True).all_value(".+")
    return made.current(model.VariableOption(True, "All", "$__all"))


def _panel(panel: Panel, number: int) -> Any:
    made = {"lines": _lines, "stacked": _lines, "stat": _stat, "heatmap": _heatmap}[panel.kind](panel)
    needs = f"\n\nNeeds {panel.needs}." if panel.needs else ""
    more = f"\n\nRunbook: {runbook_url(panel.alert.name)}" if panel.alert is not None else ""
    made = made.id(number).title(panel.title).description(panel.help + needs + more).datasource(SOURCE)
    made = made.span(panel.width).height(4 if panel.kind == "stat" else 8)
    for index, query in enumerate(panel.queries):
        made = made.with_target(_target(panel, query, chr(ord("A") + index)))
    return made


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref).editor_mode(prometheus_model.QueryEditorMode.CODE)
    if panel.kind == "heatmap":
        return made.format(prometheus_model.PromQueryFormat.HEATMAP).legend_format("{{le}}").range()
    made = made.legend_format(query.legend or panel.title)
    return made.instant() if panel.kind == "stat" else made.range()


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(common_model.LegendDisplayMode.LIST).show_legend(True)
    made = timeseries.Panel().unit(panel.unit).min(0).legend(legend.placement(common_model.LegendPlacement.BOTTOM))
    made = made.show_points(common_model.VisibilityMode.NEVER).thresholds(_thresholds(panel))
    if panel.warn is not None or panel.bad is not None:
        shown = common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.LINE)
        made = made.thresholds_style(shown)
    if panel.most is not None:
        made = made.max(panel.most)
    if panel.kind == "stacked":
        made = made.fill_opacity(30).stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    return made


def _stat(panel: Panel) -> stat.Panel:
    return stat.Panel().unit(panel.unit).thresholds(_thresholds(panel)).no_value("none")


def _heatmap(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64).exponent(0.5)
    return heatmap.Panel().y_axis(heatmap.YAxisConfig().unit(panel.unit)).color(colours)


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(None, "green")]
    steps += [model.Threshold(panel.warn, "yellow")] if panel.warn is not None else []
    steps += [model.Threshold(panel.bad, "red")] if panel.bad is not None else []
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
