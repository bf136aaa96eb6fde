"""What was seen lately: samples with their times, and what is made of them. Pure."""

from typing import TypeVar

T = TypeVar("T")

Samples = tuple[tuple[float, T], ...]
"""(time, value), oldest first."""


def kept(samples: Samples[T], since: float) -> Samples[T]:
    """Those taken since then."""
    return tuple(sample for sample in samples if sample[0] >= since)


def mean(samples: Samples[float], since: float) -> float:
    """Of those taken since then; 0 where there are none."""
    inside = [value for time, value in samples if time >= since]
    return sum(inside) / len(inside) if inside else 0.0
