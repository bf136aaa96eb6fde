"""The ORCA codec and the event stream's encoding."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import events, load_report
from penstock.api.load_report import WAITING_REASONS, LoadReport, LoadReportError

counts = st.integers(0, 2**40)
rates = st.floats(0, 1e12, allow_nan=False)
reports = st.builds(
    LoadReport,
    epoch=st.integers(0, 2**52),
    seq=counts,
    num_requests_running=counts,
    num_requests_waiting=st.dictionaries(st.sampled_from(WAITING_REASONS), st.integers(1, 10**6)),
    max_num_seqs=counts,
    kv_cache_usage_perc=st.floats(0, 1),
    kv_blocks_total=counts,
    kv_blocks_reclaimable=counts,
    prefill_backlog_tokens=counts,
    prefill_tokens_per_s=rates,
    decode_step_s=rates,
    prompt_tokens_per_s=rates,
    generation_tokens_per_s=rates,
    lora_slots=counts,
    lora_slots_free=counts,
    lora_running=st.dictionaries(st.text(max_size=20), counts, max_size=4),
    lora_waiting=st.dictionaries(st.text(max_size=20), st.integers(1, 10**6), max_size=4),
)


@given(report=reports, form=st.sampled_from(["TEXT", "JSON", "BIN"]))
def test_headers_leave_out_which_adapters_there_are_and_events_say_it(report: LoadReport, form: load_report.Format) -> None:
    telling = msgspec.structs.replace(report, adapters=("sql", "chat"))
    assert load_report.decode(load_report.encode(telling, form)) == report
    assert events.decode(events.encode(events.EventBatch(1, 0.0, [telling]))).events == [telling]
    assert msgspec.json.decode(msgspec.json.encode(telling), type=LoadReport) == telling


@pytest.mark.req("RT-05")
@given(report=reports, form=st.sampled_from(["TEXT", "JSON", "BIN"]))
def test_every_form_carries_the_whole_report(report: LoadReport, form: load_report.Format) -> None:
    value = load_report.encode(report, form)
    assert value.startswith(form + " ")
    assert load_report.decode(value) == report


@given(report=reports, at=st.integers(0, 900), put=st.sampled_from(["", "9", "-", ".", "e9", ", a=1", "nan", "=", " "]))
def test_what_engines_of_ours_write_is_read_as_any_other_text(report: LoadReport, at: int, put: str) -> None:
    """By the short way and by the long one, whole and damaged."""
    plain = msgspec.structs.replace(report, lora_running={}, lora_waiting={})
    text = load_report.encode(plain, "TEXT")
    assert load_report._own(text) in (plain, None)
    damaged = text[:at] + put + text[at + 1 :]
    if (own := load_report._own(damaged)) is not None:
        assert own == LoadReport.from_metrics(load_report.decode_metrics(damaged))


def test_a_usual_report_is_read_the_short_way() -> None:
    waiting = {"capacity": 3, "lora": 1}
    usual = LoadReport(
        epoch=1_764_000_000_000, seq=77, max_num_seqs=256, num_requests_running=12, num_requests_waiting=waiting,
        kv_cache_usage_perc=0.3, prefill_tokens_per_s=51_234.5678, decode_step_s=1e-5,
    )  # fmt: skip
    assert load_report._own(load_report.encode(usual, "TEXT")) == usual


@pytest.mark.parametrize("name", ["seq", "num_requests_waiting_by_reason.capacity"])
def test_a_number_that_no_double_holds_is_not_read_the_short_way(name: str) -> None:
    text = load_report.encode(LoadReport(epoch=1, seq=5, num_requests_waiting={"capacity": 5}), "TEXT")
    assert load_report._own(text) is not None
    assert load_report._own(text.replace(f"{name}=5", f"{name}=9007199254740993")) is None


@pytest.mark.parametrize(
    "value",
    [
        "TEXT named_metrics.kv_cache_usage_perc=0.42, named_metrics.num_requests_waiting=3.0",
        "TEXT named_metrics.kv_cache_usage_perc:0.42,named_metrics.num_requests_waiting:3.0",
        "text kv_cache_usage_perc=0.42, num_requests_waiting=3",
        "named_metrics.kv_cache_usage_perc=0.42, named_metrics.num_requests_waiting=3.0",
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.42, "num_requests_waiting": 3.0}}',
        '{"named_metrics": {"kv_cache_usage_perc": 0.42, "num_requests_waiting": 3}}',
    ],
)
def test_the_dialects_of_the_field_are_read(value: str) -> None:
    assert load_report.decode_metrics(value) == {"kv_cache_usage_perc": 0.42, "num_requests_waiting": 3.0}


def test_an_unpadded_bin_report_is_read() -> None:
    report = LoadReport(epoch=1, seq=2, num_requests_running=3)
    assert load_report.decode(load_report.encode(report, "BIN").rstrip("=")) == report


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("TEXT a=1, a=2", "twice"),
        ("TEXT a=nan", "a is nan"),
        ("TEXT a=inf", "a is inf"),
        ("TEXT a=-1", "a is -1"),
        ("TEXT a", "name=value"),
        ("TEXT a=b", "number"),
        ("JSON {", "JSON"),
        ("BIN !!!", "base64"),
        ("BIN CQ==", "truncated"),
        ("TEXT a=" + "1" * 20_000, "bytes"),
    ],
)
def test_an_unreadable_report_is_refused_whole(value: str, says: str) -> None:
    with pytest.raises(LoadReportError, match=says):
        load_report.decode_metrics(value)


@given(st.text(max_size=60), st.sampled_from(["TEXT ", "JSON ", "BIN ", ""]))
def test_garbage_raises_nothing_but_a_load_report_error(text: str, word: str) -> None:
    try:
        metrics = load_report.decode_metrics(word + text)
    except LoadReportError:
        return
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_report_of_another_engine_is_not_taken_for_ours() -> None:
    with pytest.raises(LoadReportError, match="epoch"):
        load_report.decode("TEXT kv_cache_usage_perc=0.42")


def test_utilization_counts_what_waits() -> None:
    report = LoadReport(epoch=0, seq=0, num_requests_running=4, max_num_seqs=8, num_requests_waiting={"capacity": 8})
    assert report.application_utilization == 1.5
    assert report.waiting == 8


@given(reports)
def test_an_event_batch_survives_the_wire(report: LoadReport) -> None:
    batch = events.EventBatch(
        7,
        1.5,
        [
            events.BlockStored([b"a", b"b"]),
            events.BlockRemoved([b"a"]),
            events.AllBlocksCleared(),
            events.RequestFinished("id", "stop", 3, 2, 1, 0.5),
            report,
        ],
    )
    assert events.decode(events.encode(batch)) == batch
    with pytest.raises(msgspec.MsgspecError):
        events.decode(b"\x00garbage")
    assert events.decode_seq(events.encode_seq(2**40)) == 2**40
