"""The rules, by promtool: each alert fires and stays silent when it should."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.alerts import ALERTS
from monitoring.boards.model import MODEL
from monitoring.files import FOLDER
from monitoring.recordings import COST, HIT_RATIO, RECORDINGS, SLOW_S, WAITING, error_ratio, slow_ratio
from monitoring.rules import Alert, Group, rule_file
from monitoring.tests.rule_cases import CASES, POD, TINY, Case, answered, first_tokens, load, named
from penstock.api import metrics
from penstock.gateway.http.metrics import RESPONSE_BUCKETS

RULES = FOLDER / "rules" / "penstock.yaml"
NAMES = {rule.name: rule for group in ALERTS for rule in group.rules if isinstance(rule, Alert)}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


def promtool(*arguments: object) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", RULES)


def needed(alert: Alert) -> Group:
    """What it goes by of the recordings."""
    return Group("recordings", [it for it in RECORDINGS.rules if it.name in alert.expr])


def as_promtool(alert: Alert, case: Case) -> dict[str, object]:
    """The case as promtool wants it."""
    told = {"alertname": alert.name, "alertstate": "firing", "severity": alert.severity, **(case.fires or {})}
    labels = ",".join(f'{key}="{value}"' for key, value in told.items())
    expected = [{"labels": f"ALERTS{{{labels}}}", "value": 1}] if case.fires is not None else []
    query = f'ALERTS{{alertname="{alert.name}",alertstate="firing"}}'
    return {
        "name": case.what,
        "interval": case.every,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": case.at, "exp_samples": expected}],
    }


@needs_promtool
@pytest.mark.req("OB-06", "OB-08")
@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_stays_silent(name: str, tmp_path: Path) -> None:
    cases = CASES[name]
    assert {case.fires is None for case in cases} == {True, False}
    alert = NAMES[name]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule_file([needed(alert), Group("alert", [alert])])))
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": cases[0].every,
        "tests": [as_promtool(alert, it) for it in cases],
    }
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(tests))
    promtool("test", "rules", tmp_path / "cases.yaml")


def test_every_alert_has_cases() -> None:
    assert CASES.keys() == NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_an_alert_tells_it_knows(name: str) -> None:
    alert = NAMES[name]
    told = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    fired = [case.fires for case in CASES[name] if case.fires is not None]
    assert all(told <= labels.keys() for labels in fired)


RECORDED: dict[str, tuple[dict[str, str], str, float]] = {
    # What is scraped every minute; of which labels the value is; the value.
    error_ratio("5m"): ({answered("200"): "0+90x30", answered("503"): "0+10x30"}, '{model="default/tiny"}', 0.1),
    error_ratio("30m"): ({answered("200"): "0+90x30"}, '{model="default/tiny"}', 0.0),
    slow_ratio("5m"): (first_tokens(slow=3, times=30), '{model="default/tiny"}', 0.03),
    HIT_RATIO: (
        {
            named("penstock_prefix_cache_hits_total", **POD): "0+30x30",
            named("penstock_prefix_cache_queries_total", **POD): "0+120x30",
        },
        '{namespace="default",model="tiny"}',
        0.25,
    ),
    WAITING: (load("3x30", "2x30") | load("3x30", "5x30", reason="lora"), '{namespace="default",model="tiny"}', 7),
    # Two replicas compute 120 tokens a second between them; what a cache had is no work.
    COST: (
        load("1x30", "0x30")
        | {named("penstock_kv_cache_usage_perc", **TINY, pool="gpu", pod="tiny-gpu-0"): "0.1x30"}
        | {
            named("penstock_prompt_tokens_total", **POD, source="computed"): "0+7200x30",
            named("penstock_prompt_tokens_total", **POD, source="local_cache"): "0+72000x30",
        },
        '{namespace="default",model="tiny"}',
        2 / 120,
    ),
}


@needs_promtool
@pytest.mark.req("OB-11")
@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_what_its_name_says(name: str, tmp_path: Path) -> None:
    series, labels, value = RECORDED[name]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule_file([RECORDINGS])))
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {"expr": f"round({name}, 1e-6)", "eval_time": "20m", "exp_samples": [{"labels": labels, "value": round(value, 6)}]}
        ],
    }
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    promtool("test", "rules", tmp_path / "cases.yaml")


ANNOTATED: dict[str, tuple[dict[str, str], dict[int, bool]]] = {
    # Series that are scraped every minute, and the minutes in which there is a mark or not.
    "Rollout": (
        {
            named(metrics.MODEL_CONDITION, **TINY, condition="Progressing", status="True", reason="RollingOut"): "_x3 1x4 stale",
            named(
                metrics.MODEL_CONDITION, **TINY, condition="Progressing", status="False", reason="Complete"
            ): "1x2 stale _x5 1x9",
        },
        {2: False, 4: True, 7: True, 9: False},
    ),
    "Canary": (
        {
            named(metrics.CANARY_WEIGHT, **TINY, verdict="Judging"): "_ 5x3 25x3 stale",
            named(metrics.CANARY_WEIGHT, **TINY, verdict="Failed"): "_x9 0x9",
        },
        {1: True, 3: False, 5: True, 7: False, 9: True, 12: False},
    ),
}


@needs_promtool
@pytest.mark.parametrize("name", ANNOTATED)
def test_a_change_is_marked_when_it_happens(name: str, tmp_path: Path) -> None:
    (annotation,) = (it for it in MODEL.annotations if it.name == name)
    expr = annotation.expr.replace("$namespace", "default").replace("$model", "tiny")
    series, marks = ANNOTATED[name]
    tests = [
        {
            "expr": f"count({expr}) or vector(0)",
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": int(marked)}],
        }
        for minute, marked in marks.items()
    ]
    listed = [{"series": key, "values": values} for key, values in series.items()]
    case = {"interval": "1m", "input_series": listed, "promql_expr_test": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    promtool("test", "rules", tmp_path / "cases.yaml")


@pytest.mark.req("OB-24")
def test_what_counts_as_slow_is_an_edge_of_the_buckets() -> None:
    assert float(SLOW_S) in RESPONSE_BUCKETS
