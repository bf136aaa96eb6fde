"""Goodput, cost and the JSON document."""

import pytest

from penstock.client.bench.records import Record
from penstock.client.bench.report import Cost, summarize


def answer(ttft: float, gap: float, tokens: int = 11) -> Record:
    """An answer with even gaps, in seconds."""
    stamps = [10 + ttft + gap * number for number in range(tokens)]
    return Record(10.0, 10.0, stamps, [1] * tokens, prompt_tokens=100)


@pytest.mark.req("MET-11", "PD-28")
def test_an_answer_is_good_only_if_every_bound_holds() -> None:
    records = [answer(0.1, 0.04), answer(0.19, 0.05), answer(0.1, 0.06)]  # the last breaks TPOT alone
    report = summarize(records, 4.0, [50], {"ttft": 200.0, "tpot": 50.1}, Cost(1))
    assert (report.good, report.goodput) == (2, 0.5)
    assert summarize(records, 4.0, [50], {"ttft": 150.0}, Cost(1)).good == 2
    assert summarize(records, 4.0, [50], {"e2el": 595.0}, Cost(1)).good == 1


def test_one_token_cannot_break_the_time_per_token() -> None:
    assert summarize([answer(0.1, 0, tokens=1)], 1.0, [50], {"tpot": 0.001}, Cost(1)).good == 1


def test_without_bounds_there_is_no_goodput() -> None:
    report = summarize([answer(0.1, 0.1)], 1.0, [50], {}, Cost(1))
    assert (report.good, report.goodput, report.to_json()["request_goodput"]) == (None, None, None)


@pytest.mark.req("MET-14")
def test_tokens_per_device_second_and_the_price_of_a_million() -> None:
    records = [answer(0.1, 0.01, tokens=500) for _ in range(8)]  # 4000 tokens on 2 devices in 10 s
    report = summarize(records, 10.0, [50], {}, Cost(2, per_device_hour=3.6))
    assert report.output_tokens_per_device_second == 200
    assert report.cost_per_million_output_tokens == pytest.approx(5.0)  # 2 · 0.001 · 10 for 4000
    document = report.to_json()
    assert document["output_tokens_per_device_second"] == 200
    assert document["cost_per_million_output_tokens"] == pytest.approx(5.0)


def test_failed_requests_are_counted_by_kind_and_lend_no_numbers() -> None:
    failed = [Record(10, 10, [10.001], [1], 5, error=kind) for kind in ("HTTP 503", "timeout", "HTTP 503")]
    report = summarize([answer(0.5, 0.1), *failed], 2.0, [0], {"ttft": 600}, Cost(1))
    assert report.errors == {"HTTP 503": 2, "timeout": 1}
    assert (report.completed, report.good, report.output_tokens, report.input_tokens) == (1, 1, 11, 100)
    assert report.latencies["ttft"].percentiles[0] == pytest.approx(500)
    assert report.to_json()["failed"] == 3


def test_where_nothing_succeeded_no_number_is_made_up() -> None:
    report = summarize([Record(1, 1, error="HTTP 500")], 1.0, [50], {}, Cost(1, 2.0))
    assert report.latencies == {}
    assert report.cost_per_million_output_tokens is None
    assert report.to_json()["output_throughput"] == 0


def test_the_document_has_the_names_of_vllms() -> None:
    document = summarize([answer(0.1, 0.01)], 1.0, [50, 99.9], {}, Cost(1)).to_json()
    assert {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"} <= set(document)
    assert {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"} <= set(document)
    assert {"mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99.9_e2el_ms"} <= set(document)
    assert document["total_token_throughput"] == 111


def test_lateness_is_what_the_client_adds() -> None:
    late = Record(10.25, 10.0, [11.0], [1])
    report = summarize([late], 1.0, [100], {}, Cost(1))
    assert report.lateness is not None and report.lateness.percentiles[100] == pytest.approx(250)
    assert report.latencies["ttft"].percentiles[100] == pytest.approx(750)
