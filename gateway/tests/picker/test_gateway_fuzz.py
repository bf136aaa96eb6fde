"""A sample of `make fuzz-gateway`, and that it finds what it looks for."""

import logging
import random

import pytest
from gateway_fuzzer import Faults, fuzz, meant
from malformed import connection

from penstock.gateway.extproc import whole
from penstock.gateway.picker.compiled import MODULE

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")


@pytest.mark.slow
def test_malformed_messages_break_nothing_and_are_answered_alike() -> None:
    assert fuzz(10_000, seed=2).startswith("10,0")


def test_a_form_that_answers_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "cut", lambda routed, _: routed.endpoints.reverse())
    with pytest.raises(AssertionError):
        fuzz(2_000, seed=1)


def test_what_is_logged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("penstock.gateway.extproc.director.PickDirector.preview", fails)
    with pytest.raises(AssertionError, match="a mistake"):
        fuzz(2_000, seed=1)


def test_a_seed_says_the_same_again() -> None:
    one, other = (connection(random.Random("0/1")) for _ in range(2))
    assert one == other and one.messages


def test_only_the_order_of_fields_may_differ() -> None:
    assert meant(b"") == ([], [])
    assert meant(b"\0\0\0\0\1\0\0\0\1") != meant(b"")


def test_warnings_are_no_faults() -> None:
    faults = Faults()
    faults.handle(logging.LogRecord("x", logging.WARNING, "", 0, "gone", None, None))
    faults.check()
    faults.handle(logging.LogRecord("x", logging.ERROR, "", 0, "broken", None, None))
    with pytest.raises(AssertionError, match="broken"):
        faults.check()
