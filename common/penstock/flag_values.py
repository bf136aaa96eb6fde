"""Numbers that flags take, each from its text; `argparse.ArgumentTypeError` says what is wrong with one."""

import argparse
import math

DAY_S = 86_400


def number(text: str, least: float, most: float = math.inf, *, above: bool = False) -> float:
    """Parse a number from `least` (or above it, if `above`) to `most`. Infinity is allowed where `most` is infinite."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (value > least if above else value >= least):
        raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'at least'} {least:g}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text} is above {most:g}")
    return value


def above_zero(text: str) -> float:
    """Finite and above 0."""
    return _finite(number(text, 0, above=True))


def not_negative(text: str) -> float:
    """Finite and 0 or above."""
    return _finite(number(text, 0))


def seconds(text: str) -> float:
    """A time from 0 to a day."""
    return number(text, 0, DAY_S)


def rate(text: str) -> float:
    """Above 0; infinity: without a limit."""
    return number(text, 0, above=True)


def share(text: str) -> float:
    """Parse a share: at least 0 and below 1."""
    if (ratio := number(text, 0)) >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1")
    return ratio


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _integer(text, 1)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _integer(text, 0)


def port(text: str) -> int:
    """A TCP port."""
    return _port(text, 1)


def port_or_any(text: str) -> int:
    """A TCP port; 0: any that is free."""
    return _port(text, 0)


def _finite(value: float) -> float:
    if math.isinf(value):
        raise argparse.ArgumentTypeError("must be finite")
    return value


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value


def _port(text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, {least} to 65535")
    return int(text)
