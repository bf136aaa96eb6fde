"""Warnings that repeat are counted."""

import logging

from penstock.gateway.logs import PERIOD_S, CountRepeats


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_repeated_warning_is_written_once_a_minute_with_its_count() -> None:
    now = 0.0
    handler, log = Lines(), logging.Logger("test")
    handler.addFilter(CountRepeats(lambda: now))
    log.addHandler(handler)
    for _ in range(30):
        log.warning("no answer from %s", "r1")
        log.info("a line")
        now += 1.0
    log.warning("no answer from %s", "r2")
    assert handler.lines == ["no answer from r1", *["a line"] * 30, "no answer from r2"]
    now = PERIOD_S
    log.warning("no answer from %s", "r1")
    assert handler.lines[-1] == "no answer from r1 (and 29 times more in the last 60 s)"
    now += PERIOD_S
    log.warning("no answer from %s", "r1")
    assert handler.lines[-1] == "no answer from r1"


def test_tracebacks_are_never_left_out() -> None:
    handler, log = Lines(), logging.Logger("test")
    handler.addFilter(CountRepeats(lambda: 0.0))
    log.addHandler(handler)
    for _ in range(2):
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
    assert handler.lines == ["failed", "failed"]
