"""What the operator tells Prometheus of models and decisions."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from penstock.operator import telemetry
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.learned import Learned
from penstock.operator.autoscale.loop import Record
from penstock.operator.store import Resources, key_of
from penstock.operator.telemetry import Exposition, ModelSeries, ScalingMetrics


def told(series: ModelSeries) -> dict[str, dict[tuple[str, ...], float]]:
    """By family the values of samples as a reader has them, by their labels' values in the order of the labels' names."""
    families = text_string_to_metric_families(series.render().decode())
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families:
        samples = {tuple(sample.labels[it] for it in sorted(sample.labels)): sample.value for sample in family.samples}
        assert (family.type, len(samples)) == ("gauge", len(family.samples))
        found[family.name] = samples
    return found


def with_status(version: int, ready: str, reason: str = "NoReadyReplica", **more: Any) -> dict[str, Any]:
    """A model whose one pool and one condition say that."""
    meta = {"name": "tiny", "namespace": "default", "uid": "u", "resourceVersion": str(version)}
    serving = {"type": "Serving", "status": "False", "reason": reason}
    status = {"conditions": [serving], "pools": [{"name": "main", "ready": ready, "updated": 0}], **more}
    return {"kind": "InferenceModel", "metadata": meta, "spec": {}, "status": status}


def test_conditions_and_replicas_are_those_of_the_status(make: Any) -> None:
    resources = Resources()
    series = ModelSeries(resources)
    canary = {"weight": 5, "verdict": "Judging", "since": "2026-01-01T00:00:00Z", "reason": "", "judged": "x"}
    resource = with_status(1, "1/3", canary=canary)
    resources.put(resource)
    resources.put(make.resource(name="new"))  # without a status yet
    states = {"wanted": 3.0, "ready": 1.0, "updated": 0.0}
    assert told(series) == {
        "penstock_model_condition": {("Serving", "tiny", "default", "NoReadyReplica", "False"): 1.0},
        "penstock_pool_replicas": {("tiny", "default", "main", state): count for state, count in states.items()},
        "penstock_canary_weight_percent": {("tiny", "default", "Judging"): 5.0},
    }
    resources.drop(key_of(resource))
    assert not any(told(series).values())


def test_a_status_that_changes_is_told_at_the_next_scrape_and_one_that_stays_is_not_made_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    lines = telemetry._lines

    def counted(key: Any, status: Any) -> Any:
        made.append(key.name)
        return lines(key, status)

    monkeypatch.setattr(telemetry, "_lines", counted)
    resources = Resources()
    series = ModelSeries(resources)
    resources.put(with_status(1, "1/3"))
    resources.put(make.resource(name="other"))
    assert series.render() == series.render()
    assert made == ["tiny", "other"]
    resources.put(with_status(2, "2/3"))
    assert told(series)["penstock_pool_replicas"]["tiny", "default", "main", "ready"] == 2.0
    assert made == ["tiny", "other", "tiny"]


@given(st.text())
def test_whatever_a_reason_is_it_is_read_as_it_was_written(reason: str) -> None:
    series = ModelSeries(resources := Resources())
    resources.put(with_status(1, "1/3", reason))
    ((condition, *_),) = (list(it) for name, it in told(series).items() if name == "penstock_model_condition")
    assert condition[3] == reason


def test_what_is_told_is_the_registry_and_the_texts() -> None:
    exposition = Exposition()
    Counter("penstock_of_the_registry", "text", registry=exposition.registry)
    exposition.texts.append(lambda: b"# TYPE penstock_own gauge\npenstock_own 1\n")
    names = [it.name for it in text_string_to_metric_families(exposition.render().decode())]
    assert [it for it in names if "created" not in it] == ["penstock_of_the_registry", "penstock_own"]


def test_a_decision_is_told_and_what_is_not_known_is_no_number() -> None:
    registry = CollectorRegistry()
    metrics = ScalingMetrics(registry)
    decision = Decision(3, "Demand", "more", inputs={"demand": 2.5})
    metrics.record(Record("default/tiny/main", 2, decision, Learned(), acted=True, dry_run=False))
    labels = {"namespace": "default", "model": "tiny", "pool": "main"}
    values = {
        name: registry.get_sample_value(f"penstock_autoscaler_{name}_replicas", labels)
        for name in ("desired", "current", "demand")
    }
    assert values == {"desired": 3, "current": 2, "demand": 2.5}
    cold_start = "penstock_autoscaler_cold_start_seconds"
    assert math.isnan(registry.get_sample_value(cold_start, labels) or 0.0)
    metrics.record(Record("default/tiny/main", 3, decision, Learned(cold_start_s=40.0), acted=False, dry_run=False))
    assert registry.get_sample_value(cold_start, labels) == 40.0
    assert registry.get_sample_value("penstock_autoscaler_decisions_total", {"constraint": "Demand"}) == 2
