"""Load reports of our own engines, read by the compiled parts as Python reads them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import load_report
from penstock.api.events import BEYOND
from penstock.api.load_report import FIGURES, WAITING_REASONS, LoadReport, LoadReportError
from penstock.gateway.load.own_reports import OwnReports
from penstock.gateway.picker.compiled import MODULE, Compiled, Said, installed

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
figures: dict[str, st.SearchStrategy[Any]] = {
    name: st.integers(0, 2**50) if kind is int else st.floats(0, 2**54) for name, kind in FIGURES
}
waiting = st.dictionaries(st.sampled_from(WAITING_REASONS), st.integers(1, 10**6))
reports = st.builds(LoadReport, **figures, num_requests_waiting=waiting)
puts = st.sampled_from(["", "9", "-", ".", "e9", "e-9", ", a=1", "nan", "=", " ", "0", "٣"])


def whole(report: LoadReport | Said) -> LoadReport:
    return report if isinstance(report, LoadReport) else LoadReport(*report.fields())


def said(reader: OwnReports, value: str) -> LoadReport | str:
    try:
        return whole(reader.read(value))
    except LoadReportError as error:
        return str(error)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    found = installed()
    assert found is not None
    return found


@given(report=reports, at=st.integers(0, 900), put=puts, more=st.sampled_from(["", ", named_metrics.x=1"]))
def test_reports_whole_and_damaged_are_read_alike(compiled: Compiled, report: LoadReport, at: int, put: str, more: str) -> None:
    own, plain, text = OwnReports(compiled), OwnReports(None), load_report.encode(report, "TEXT")
    for value in (text, text[:at] + put + text[at + 1 :], text + more):
        assert repr(said(own, value)) == repr(said(plain, value))


def test_a_usual_report_needs_no_python(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    report = LoadReport(epoch=1_764_000_000_000, seq=7, num_requests_waiting={"lora": 2, "capacity": 1}, decode_step_s=1.25e-5)
    absurd = LoadReport(epoch=1, seq=2, kv_cache_usage_perc=BEYOND)
    own = OwnReports(compiled)
    monkeypatch.setattr(load_report, "decode", lambda value: LoadReport(epoch=0, seq=0))
    read = own.read(load_report.encode(report, "TEXT"))
    assert not isinstance(read, LoadReport) and (read.epoch, read.seq) == (report.epoch, report.seq) and whole(read) == report
    twice = load_report.encode(report, "TEXT") + ", named_metrics.num_requests_waiting_by_reason.lora=2"
    for value in (load_report.encode(absurd, "TEXT"), load_report.encode(report, "JSON"), twice, ""):
        assert own.read(value) == LoadReport(epoch=0, seq=0)
