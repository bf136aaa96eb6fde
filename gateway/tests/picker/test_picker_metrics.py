"""What a scrape says of picks and answers, which are counted many at once, against counters that count each by itself."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.api import metrics
from penstock.api.fleet import LATENCY_EDGES_S, Fleet, Model
from penstock.gateway.http.metrics import PICK_BUCKETS, RESPONSE_BUCKETS, PickerMetrics
from penstock.gateway.models.names import Names
from penstock.gateway.models.outcomes import BATCH, Outcomes

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
MODELS = ("ns/a", "ns/b")


def samples(registry: CollectorRegistry) -> Samples:
    """All of a scrape but the times at which counters of the library were made."""
    found = [sample for family in registry.collect() for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


@pytest.mark.parametrize("seed", range(3))
def test_a_scrape_says_what_single_counts_say(seed: int) -> None:
    rng, plain, registry = random.Random(seed), CollectorRegistry(), CollectorRegistry()
    outcomes = Outcomes()
    of = PickerMetrics(registry, outcomes)
    Counter(metrics.PICK_REFUSALS, "x", ["reason"], registry=plain)
    picks = Counter(metrics.PICKS, "x", ["pool", "policy"], registry=plain)
    pick_seconds = Histogram(metrics.PICK_SECONDS, "x", buckets=PICK_BUCKETS, registry=plain)
    requests = Counter(metrics.MODEL_REQUESTS, "x", ["model", "code"], registry=plain)
    response_seconds = Histogram(metrics.RESPONSE_SECONDS, "x", ["model"], buckets=RESPONSE_BUCKETS, registry=plain)
    begun = {model: [0, 0, *[0] * (len(LATENCY_EDGES_S) + 1)] for model in MODELS}
    names = Names(Fleet(models=[Model(id=model, served_names=[model]) for model in MODELS]))
    assert samples(registry) == samples(plain)
    for size in (1, BATCH - 1, BATCH, 3 * BATCH, 1):
        for _ in range(size):
            pool, policy, seconds = rng.choice("pq"), rng.choice(("Cost", "Random")), rng.choice((*PICK_BUCKETS, rng.random()))
            of.picked(pool, policy, seconds)
            picks.labels(pool, policy).inc()
            pick_seconds.observe(seconds)
        for _ in range(size + rng.randrange(BATCH)):
            model, code = rng.choice(MODELS), rng.choice(("200", "404", "500", "503", "reset"))
            took = rng.choice((*RESPONSE_BUCKETS, *LATENCY_EDGES_S, 100 * rng.random())) if code == "200" else None
            streamed = took is not None and rng.random() < 0.5
            of.answered(model, code, took, streamed=streamed)
            requests.labels(model, code).inc()
            begun[model][0] += 1
            begun[model][1] += code in ("500", "503", "reset")
            if took is not None:
                response_seconds.labels(model).observe(took)
                if streamed:
                    begun[model][2 + sum(edge < took for edge in LATENCY_EDGES_S)] += 1
        if rng.random() < 0.5:
            assert samples(registry) == samples(plain)
        shown = {it.model: [it.requests, it.failures, *it.ttft_counts] for it in outcomes.view(names)}
        assert shown == {model: counts for model, counts in begun.items() if counts[0]}
    assert samples(registry) == samples(plain)
