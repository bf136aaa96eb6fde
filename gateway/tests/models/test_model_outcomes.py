"""What is counted of each model's requests, and whose weight counts."""

from typing import Any

import pytest

from penstock.api.fleet import LATENCY_EDGES_S, Canary, Fleet, Model
from penstock.gateway.discovery.objects import fleet_of
from penstock.gateway.models.names import Names
from penstock.gateway.models.outcomes import Outcomes

MAIN = Model(id="default/main", served_names=["main"])
NEXT = Model(id="default/next", served_names=["next"], canary=Canary(of="main", weight=5))


def test_requests_failures_and_first_tokens() -> None:
    outcomes = Outcomes()
    for code in ("200", "404", "429", "500", "503", "reset", ""):
        outcomes.answered(NEXT.id, code)
    outcomes.answered(MAIN.id, "200", 0.0101, streamed=True)
    outcomes.answered(MAIN.id, "200", 1e6, streamed=True)
    outcomes.answered("default/gone", "500")
    shown = {it.model: it for it in outcomes.view(Names(Fleet(models=[MAIN, NEXT])))}
    assert set(shown) == {MAIN.id, NEXT.id}
    assert (shown[NEXT.id].requests, shown[NEXT.id].failures, sum(shown[NEXT.id].ttft_counts)) == (7, 4, 0)
    assert (shown[MAIN.id].requests, shown[MAIN.id].failures) == (2, 0)
    counts = shown[MAIN.id].ttft_counts
    assert len(counts) == len(LATENCY_EDGES_S) + 1 and (counts[1], counts[-1], sum(counts)) == (1, 1, 2)
    assert (shown[NEXT.id].canary_of, shown[MAIN.id].canary_of) == (MAIN.id, None)
    assert Outcomes().epoch != outcomes.epoch


def test_a_canary_that_can_get_nothing_is_none() -> None:
    assert Names(Fleet(models=[NEXT])).main_of(NEXT.id) is None


@pytest.mark.parametrize(
    ("canary", "status", "weight"),
    [
        ({"weight": 50}, {}, 50),
        ({"weight": 50}, {"canary": {"weight": 5}}, 50),  # nobody judges any more
        ({"weight": 50, "judge": {}}, {}, 50),
        ({"weight": 50, "judge": {"steps": [5, 25]}}, {}, 5),
        ({"weight": 50, "judge": {"steps": [5, 25]}}, {"canary": {"weight": 25}}, 25),
        ({"weight": 50, "judge": {"steps": [5, 25]}}, {"canary": {"weight": 0}}, 0),
        ({"weight": 3, "judge": {}}, {"canary": {"weight": 25}}, 3),  # the user has the last word
    ],
)
def test_the_weight_is_what_the_operator_says_where_it_judges(canary: Any, status: Any, weight: int) -> None:
    meta = {"name": "next", "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"served": {"name": "next"}, "canary": {"of": "main", **canary}, "pools": [{"name": "main"}]}
    (model,) = fleet_of([{"metadata": meta, "spec": spec, "status": status}], []).models
    assert model.canary == Canary(of="main", weight=weight)
