"""What flags take, and with which words they refuse."""

import argparse
from collections.abc import Callable

import pytest

from penstock.flag_values import above_zero, count, not_negative, number, port, port_or_any, positive, rate, seconds, share


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (positive, "1", 1),
        (count, "0", 0),
        (port, "65535", 65535),
        (port_or_any, "0", 0),
        (above_zero, "1e-3", 0.001),
        (not_negative, "0", 0.0),
        (seconds, "86400", 86400.0),
        (rate, "inf", float("inf")),
        (share, "0.99", 0.99),
    ],
)
def test_what_is_taken(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (positive, "0", "0 is not at least 1"),
        (positive, "1.5", "'1.5' is not a whole number"),
        (count, "-1", "-1 is not at least 0"),
        (port, "0", "'0' is not a port, 1 to 65535"),
        (port, "65536", "'65536' is not a port, 1 to 65535"),
        (port_or_any, "x", "'x' is not a port, 0 to 65535"),
        (above_zero, "0", "0 is not above 0"),
        (above_zero, "inf", "must be finite"),
        (not_negative, "nan", "nan is not at least 0"),
        (seconds, "86401", "86401 is above 86400"),
        (rate, "nan", "nan is not above 0"),
        (share, "1", "1 is not below 1"),
        (lambda text: number(text, 0, 1, above=True), "1.1", "1.1 is above 1"),
    ],
)
def test_what_is_refused(read: Callable[[str], float], text: str, sentence: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value) == sentence
