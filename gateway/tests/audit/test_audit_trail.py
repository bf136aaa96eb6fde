"""The audit log's lines: when they are written, what they hold, and that nothing waits for them. Time is told."""

import io
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.api.events import RequestFinished
from penstock.gateway.audit import writer as writers
from penstock.gateway.audit.entry import Entry
from penstock.gateway.audit.trail import LATE_S, SIBLINGS_S, Trail
from penstock.gateway.audit.writer import AuditWriter
from penstock.gateway.extproc.call import Call, Refused, Routed
from penstock.gateway.picker.bookings import Booking, Bookings
from penstock.gateway.picker.candidates import ReplicaKey

KEY, OTHER = ReplicaKey("u1", 8000), ReplicaKey("u2", 8000)
CALL = Call(headers={":method": "POST", ":path": "/v1/completions?key=secret", "cookie": "secret"}, body=b"secret")


class Story:
    """A trail, bookings that tell it of their ends, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[Entry] = []
        self.bookings = Bookings()
        self.trail = Trail(self.lines.append, "gw", {KEY: "r1", OTHER: "r2"}.get, lambda: self.now)
        self.bookings.ended.append(self.trail.ended)

    def routed(self, request_id: str = "one", *, envoy: bool = True, finishes: int = 1) -> Booking:
        booking = self.bookings.book(request_id, KEY, 10, self.now)
        choice: Any = SimpleNamespace(policy="Cost", scores=[0.41, 0.97], next_best=("r2", 0.97), resident_tokens=48)
        routed = Routed(
            endpoints=["a:8000"], pool=None, booking=booking, model="ns/m", name="m", came=self.now - 0.5, decided=self.now,
            tenant="search", adapter="sql", choice=choice, prompt_tokens=64, finishes=finishes, named="b-1" if envoy else None,
        )  # fmt: skip
        self.trail.routed(CALL, routed)
        return booking

    def swept(self, after_s: float = 0.0) -> list[Entry]:
        """The lines that there are `after_s` seconds later."""
        self.now += after_s
        self.trail.sweep()
        return self.lines


def finished(request_id: str = "one", output: int = 7) -> RequestFinished:
    return RequestFinished(request_id, "stop", prompt_tokens=65, cached_tokens=32, output_tokens=output, ttft_s=0.25)


def test_a_line_holds_what_gateway_engine_and_envoy_know() -> None:
    story = Story()
    booking = story.routed()
    story.now += 0.5
    story.trail.responded(booking, "200", streamed=True)
    story.now += 2.0
    story.trail.heard(KEY, finished())
    story.bookings.release(booking, "finished")
    assert story.swept() == [], "Envoy has not told how many bytes it was"
    story.trail.over(booking, 200, 321)
    [line] = story.swept()
    told = msgspec.to_builtins(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "gateway": "gw", "request_id": "one", "path": "/v1/completions", "tenant": "search", "model": "ns/m", "adapter": "sql",
        "status": 200, "reason": None, "policy": "Cost", "score": 0.41, "next_best": "r2", "next_score": 0.97, "replica": "r1",
        "replica_uid": "u1", "prefill_replica_uid": None, "waited_ms": 500.0, "ttft_ms": 1000.0, "duration_ms": 3000.0,
        "prompt_tokens": 65, "predicted_cached_tokens": 48, "cached_tokens": 32, "output_tokens": 7, "finish_reason": "stop",
        "bytes_received": 6, "bytes_sent": 321, "ended_by": "finished",
    }  # fmt: skip
    assert "secret" not in msgspec.json.encode(line).decode()
    assert story.swept(2 * SIBLINGS_S) == [line], "once"


def test_who_tells_nothing_is_not_waited_for_long() -> None:
    story = Story()
    story.bookings.release(story.routed(), "answered")
    assert story.swept(LATE_S - 0.1) == []
    [line] = story.swept(0.2)
    assert (line.ended_by, line.output_tokens, line.bytes_sent) == ("answered", None, None)
    assert line.prompt_tokens == 64, "the gateway's own count"
    assert line.duration_ms == 500.0, "to the end, not to the line"


def test_a_request_that_runs_has_no_line_until_the_gateway_goes() -> None:
    story = Story()
    story.trail.responded(story.routed(), "200", streamed=True)
    assert story.swept(3000.0) == []
    story.trail.close()
    assert [line.ended_by for line in story.lines] == [None]


@pytest.mark.parametrize("envoy", [True, False])
def test_all_answers_to_a_request_are_in_its_line(envoy: bool) -> None:
    story = Story()
    booking = story.routed(finishes=3, envoy=envoy)
    for _ in range(2):
        story.trail.heard(KEY, finished())
        story.bookings.release(booking, "finished")
        assert story.swept(10.0) == []
    story.trail.over(booking, 200, 5) if envoy else None
    story.trail.heard(OTHER, finished())
    assert story.swept() == [], "another replica's request of the same id"
    story.trail.heard(KEY, finished(output=1))
    [line] = story.swept()
    assert (line.output_tokens, line.prompt_tokens, line.cached_tokens) == (15, 195, 96)
    assert line.duration_ms == 20_500.0


def test_of_two_requests_with_one_id_each_gets_its_own() -> None:
    story = Story()
    first, second = story.routed(), story.routed()
    story.trail.heard(KEY, finished(output=1))
    story.trail.heard(KEY, finished(output=2))
    for booking in (first, second):
        story.bookings.release(booking, "finished")
        story.trail.over(booking, 200, 1)
    assert [line.output_tokens for line in story.swept()] == [1, 2]


def test_the_replica_that_answered_is_named() -> None:
    story = Story()
    booking = story.routed(envoy=False)
    story.bookings.move(booking, OTHER)
    story.bookings.release(booking, "answered")
    assert [(line.replica, line.replica_uid) for line in story.swept(LATE_S)] == [("r2", "u2")]


def test_refusals_name_who_and_what_as_far_as_that_was_found() -> None:
    story = Story()
    refused = Refused(429, "you secret", "tokens_per_minute")
    story.trail.refused(CALL, refused)
    refused.tenant, refused.model = "search", "ns/m"
    story.trail.refused(Call(headers={":path": "/secret/path"}), refused)
    first, second = story.lines
    assert (first.status, first.reason, first.tenant, first.path) == (429, "tokens_per_minute", None, "/v1/completions")
    assert (second.tenant, second.model, second.path, second.bytes_received) == ("search", "ns/m", None, None)
    assert "secret" not in msgspec.json.encode(story.lines).decode()


# --- the writer ---


def line(number: int) -> Entry:
    return Entry(time="t", gateway="gw", request_id=str(number), path=None)


def counts(registry: CollectorRegistry) -> list[float]:
    found = (registry.get_sample_value("penstock_audit_lines_total", {"outcome": it}) for it in ("written", "dropped", "failed"))
    return [value for value in found if value is not None]


def ids(path: Path) -> list[str]:
    return [msgspec.json.decode(it)["request_id"] for it in path.read_text().splitlines()]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path, registry = tmp_path / "audit.log", CollectorRegistry()
    path.write_text('{"request_id": "before"}\n')
    writer = AuditWriter(path, registry)
    writer.write(line(1))
    emit, done = writer._emit, threading.Semaphore(0)
    writer._emit = lambda text: (emit(text), done.release())[0]  # type: ignore[method-assign]
    writer.start()
    assert done.acquire(timeout=60)
    path.rename(tmp_path / "audit.log.1")
    writer.write(line(2))
    writer.close()
    assert ids(tmp_path / "audit.log.1") == ["before", "1"]
    assert ids(path) == ["2"]
    assert counts(registry) == [2, 0, 0]


def test_a_slow_disk_costs_lines_and_no_time(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    writer = AuditWriter(tmp_path / "audit.log", registry, kept=3)
    for number in range(5):
        writer.write(line(number))
    assert counts(registry) == [0, 2, 0]
    writer.start()
    writer.close()
    assert ids(tmp_path / "audit.log") == ["0", "1", "2"]
    assert counts(registry) == [3, 2, 0]


def test_a_disk_that_is_stuck_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "CLOSE_S", 0.05)
    registry, stuck = CollectorRegistry(), threading.Event()
    writer = AuditWriter(tmp_path / "audit.log", registry, kept=2)
    writer._emit = lambda text: stuck.wait(10) and None  # type: ignore[method-assign]
    writer.start()
    for number in range(3):
        writer.write(line(number))
    writer.close()
    stuck.set()
    assert sum(counts(registry)) >= 1


def test_lines_that_cannot_be_written_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, registry = tmp_path / "logs", CollectorRegistry()
    folder.mkdir()
    writer = AuditWriter(folder / "audit.log", registry)
    (folder / "audit.log").unlink()
    folder.rmdir()
    writer.write(line(1))
    writer.write(line(2))
    writer.start()
    writer.close()
    assert counts(registry) == [0, 0, 2]
    assert [record.message.split(":")[0] for record in caplog.records] == ["the audit log cannot be written"]
    full = AuditWriter(Path("/dev/full"), registry=(other := CollectorRegistry()))
    full.write(line(1))
    full.start()
    full.close()
    assert counts(other) == [0, 0, 1]


def test_a_path_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="audit"):
        AuditWriter(tmp_path / "nowhere" / "audit.log", CollectorRegistry())


def test_standard_output_is_the_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    writer = AuditWriter(None, CollectorRegistry())
    writer.write(line(1))
    writer.start()
    logging.getLogger("penstock.gateway").warning("something else")
    writer.close()
    [only] = sys.stdout.getvalue().splitlines()  # type: ignore[attr-defined]
    assert msgspec.json.decode(only)["request_id"] == "1"
