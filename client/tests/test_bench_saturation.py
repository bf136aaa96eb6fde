"""What the gauges of a run say."""

import pytest

from penstock.client.bench.saturation import Sample, combine, parse, read


@pytest.mark.parametrize(
    ("waiting", "kv", "reading"),
    [
        ([0, 0, 0, 0, 0, 0], 0.3, "headroom"),
        ([0, 0, 0, 0, 0, 0], 0.95, "near the knee"),
        ([0, 0, 0, 3, 0, 1], 0.6, "near the knee"),
        ([0, 2, 4, 6, 8, 9], 0.99, "past the knee"),
        ([0, 2, 4, 6, 8, 9], 0.2, "past the knee"),
    ],
)
def test_readings(waiting: list[float], kv: float, reading: str) -> None:
    found = read([Sample(4, count, kv) for count in waiting])
    assert found is not None
    assert (found.reading, found.peak_waiting, found.peak_kv_usage) == (reading, max(waiting), kv)


def test_what_binds_is_said() -> None:
    full, other = (read([Sample(4, 9, kv)] * 5) for kv in (0.99, 0.2))
    assert full is not None and other is not None
    assert "KV memory is full" in full.because and "another limit" in other.because


def test_a_request_that_waits_alone_is_only_being_picked_up() -> None:
    found = read([Sample(0, 1, 0.1)] * 6)
    assert found is not None and found.reading == "headroom"


def test_a_short_run_gives_no_reading() -> None:
    assert read([]) is None
    assert read([Sample(1, 9, 1.0)] * 3) is None


def test_labels_and_replicas_count_together() -> None:
    text = """\
# TYPE penstock_num_requests_running gauge
penstock_num_requests_running 3
# TYPE penstock_num_requests_waiting gauge
penstock_num_requests_waiting{reason="capacity"} 2
penstock_num_requests_waiting{reason="lora"} 5
# TYPE penstock_kv_cache_usage_perc gauge
penstock_kv_cache_usage_perc 0.5
"""
    sample = parse(text)
    assert sample == Sample(3, 7, 0.5)
    assert combine([sample, Sample(1, 0, 0.75)]) == Sample(4, 7, 0.75)


def test_other_metrics_are_no_gauges_of_an_engine() -> None:
    assert parse("# TYPE up gauge\nup 1\n") is None
