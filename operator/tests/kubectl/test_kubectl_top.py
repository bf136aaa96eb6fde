"""`penstock top`, `events` and `drain`: what they make of gateways' and the API server's answers."""

import io
from typing import Any

from rich.console import Console

from penstock.api.fleet import PoolLoad, PoolsView, ReplicaLoad
from penstock.api.load_report import LoadReport
from penstock.operator.kubectl.cluster import Gateways
from penstock.operator.kubectl.drain import requests_at
from penstock.operator.kubectl.events import concerns, line, when
from penstock.operator.kubectl.top import merged, table


def view(gateway: str, *, in_flight: int, running: int | None, age_s: float = 1.0, pool: str = "default/tiny/main") -> PoolsView:
    """A gateway's view of one replica `a`."""
    report = None if running is None else LoadReport(epoch=1, seq=1, num_requests_running=running, kv_cache_usage_perc=0.25)
    load = ReplicaLoad(
        uid="uid-a", name="a", port=8000, ready=True, cordoned=False, report=report,
        report_age_s=None if running is None else age_s, pending=0, in_flight=in_flight,
    )  # fmt: skip
    return PoolsView(gateway=gateway, version=1, pools=[PoolLoad(id=pool, model="default/tiny", held=2, replicas=[load])])


def shown(gateways: Gateways, namespace: str | None = None, model: str | None = None) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(gateways, namespace, model))
    return captured.get()


def test_gateways_requests_add_up_and_the_youngest_report_counts() -> None:
    views = [
        view("g0", in_flight=3, running=7, age_s=5),
        view("g1", in_flight=4, running=9),
        view("g2", in_flight=0, running=None),
    ]
    (pool,) = merged(views).values()
    (row,) = pool.rows.values()
    assert (pool.held, row.in_flight) == (6, 7)
    assert row.load.report is not None
    assert row.load.report.num_requests_running == 9
    assert requests_at(Gateways(3, views), "uid-a") == 7
    assert requests_at(Gateways(3, views), "uid-b") == 0


def test_the_table_is_of_what_was_asked_for_and_says_who_does_not_answer() -> None:
    gateways = Gateways(2, [view("g0", in_flight=3, running=7), view("g0", in_flight=1, running=1, pool="other/big/main")])
    text = shown(gateways, "default")
    assert "default/tiny/main" in text
    assert "other/big" not in text
    assert "25%" in text
    assert "6 held" not in text
    assert "2 held" in text
    assert "gateways do not answer" not in text
    assert "1 of 3 gateways do not answer" in shown(Gateways(3, gateways.views))
    assert "other/big/main" in shown(gateways, None, "big")


def test_a_replica_of_which_nothing_was_heard_has_no_figures() -> None:
    row = next(it for it in shown(Gateways(1, [view("g", in_flight=0, running=None)])).splitlines() if it.startswith("  a"))
    assert "never" in row
    assert "%" not in row


def event(kind: str, name: str, **more: Any) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    meta = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"involvedObject": about, "metadata": meta, "type": "Normal", "reason": "Scaled", "message": "a\n b", **more}


def test_events_of_what_a_workload_made_are_a_models_even_when_that_is_gone() -> None:
    family = {("InferenceModel", "tiny"), ("Deployment", "tiny-main"), ("Service", "tiny-main")}
    for kind, name in [
        ("InferenceModel", "tiny"),
        ("ReplicaSet", "tiny-main-5f"),
        ("Pod", "tiny-main-5f-x"),
        ("Service", "tiny-main"),
    ]:
        assert concerns(event(kind, name), family), (kind, name)
    for kind, name in [
        ("InferenceModel", "tiny-main-2"),
        ("Pod", "tiny-mainly-5f"),
        ("LoraAdapter", "tiny"),
        ("Service", "tiny-main-b"),
    ]:
        assert not concerns(event(kind, name), family), (kind, name)


def test_an_events_time_is_its_last_and_its_line_is_one() -> None:
    first = event("Pod", "p")
    assert when(first) == "2026-01-01T00:00:00Z"
    assert when({**first, "eventTime": "2026-01-01T01:00:00.000001Z", "lastTimestamp": None}) == "2026-01-01T01:00:00.000001Z"
    repeated = event("Pod", "p", lastTimestamp="2026-01-01T02:00:00Z", count=3)
    assert when({**repeated, "series": {"lastObservedTime": "2026-01-01T03:00:00Z"}}) == "2026-01-01T03:00:00Z"
    assert line(repeated) == "2026-01-01T02:00:00Z  Normal   Scaled                Pod/p  a b  (x3)\n"
